"""Export to a program that runs without frugalvit: ONNX, or torch.export."""

import contextlib
import importlib.util
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_config import model_config
from frugalvit.config.tools import ExportConfig
from frugalvit.errors import UserError
from frugalvit.experiment.calibration import Calibration, neighbour_distance
from frugalvit.export.format import ExportFormat, ExportJob, Run
from frugalvit.export.inference_model import ReadyModel
from frugalvit.utils.files import write_text


class Program(nn.Module):
    """What an exported program computes: images -> logits, or pooled and grid.

    With a calibration also probabilities (B, C) and, if training features are stored, the distance to them (B,).
    """

    def __init__(self, backbone: Backbone, output: str, calibration: Calibration | None = None) -> None:
        super().__init__()
        self.backbone, self.names = backbone, ["logits"] if output == "logits" else ["pooled", "grid"]
        self.calibration = calibration if output == "logits" else None
        if self.calibration is not None:
            self.names += ["probabilities"] + ["distance"] * (self.calibration.gallery is not None)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        features = self.backbone(images)
        if "grid" in self.names:
            return features.pooled, features.grid
        logits = self.backbone.classify(features.pooled)
        if self.calibration is None:
            return logits
        answers = (logits, (logits / self.calibration.temperature).softmax(1))
        gallery = self.calibration.gallery
        return answers if gallery is None else (*answers, neighbour_distance(features.pooled, gallery))


class TorchExportFormat(ExportFormat):
    """--to pt2: a program of torch.export, model.pt2."""

    options = frozenset({"output"})

    def write(self, job: ExportJob) -> tuple[nn.Module, Run]:
        program = _make_program(job)
        path = job.folder / "model.pt2"
        torch.export.save(_capture(program, job.model), path)
        loaded = torch.export.load(path).module()
        return program, lambda images: [loaded(images)] if program.names == ["logits"] else loaded(images)


class OnnxFormat(ExportFormat):
    """--to onnx: an ONNX graph, model.onnx."""

    options = frozenset({"output", "int8"})

    def check_options(self, config: ExportConfig) -> None:
        super().check_options(config)
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f'ONNX export needs {" and ".join(missing)}: pip install "frugalvit[export]"')

    def write(self, job: ExportJob) -> tuple[nn.Module, Run]:
        import onnx

        program, model, path = _make_program(job, job.model.calibration), job.model, job.folder / "model.onnx"
        with _plain_attention(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                _capture(program, model),
                (),
                input_names=["images"],
                output_names=program.names,
                dynamo=True,
                verbose=False,
                # Its optimizer rounds the 1e-8 in T2T's attention to zero, and so divides by zero. onnxruntime
                # optimizes the graph when it loads it.
                optimize=False,
            )
        assert exported is not None
        graph = exported.model_proto
        _name_batch(graph)
        _drop_weight_shapes(graph)
        _replace_cast_like(graph)
        facts = {"classes": list(model.classes or ()), "mean": model.backbone.mean, "std": model.backbone.std}
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()}
        onnx.helper.set_model_props(graph, texts)
        onnx.checker.check_model(graph)
        onnx.save(graph, path)
        return program, open_onnx(path)


def open_onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only; warnings are about constants that it does not fold
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: [torch.from_numpy(out) for out in session.run(None, {"images": images.numpy()})]


def _make_program(job: ExportJob, calibration: Calibration | None = None) -> Program:
    """Choose the output, and write config.json beside the program."""
    backbone, output = job.model.backbone, job.config.output
    if output == "logits" and not backbone.num_classes:
        raise UserError(f"--output logits: {job.config.model} has no classifier. Use --output features.")
    if output == "auto":
        output = "logits" if backbone.num_classes else "features"
    text = json.dumps(model_config(backbone, job.model.classes, job.meta), indent=2, ensure_ascii=False)
    write_text(job.folder / "config.json", text)
    return Program(backbone, output, calibration)


def _capture(program: Program, model: ReadyModel) -> torch.export.ExportedProgram:
    """Trace the program with a dynamic batch size, on three images. Sizes 1 and 2 are special cases in kernels."""
    example = torch.zeros(3, model.backbone.in_chans, *model.backbone.img_size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(program.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _name_batch(graph: Any) -> None:
    """Call the dynamic first dimension "batch" in all shapes; torch gives it a number."""
    symbol = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == symbol:
                dimension.dim_param = "batch"


def _drop_weight_shapes(graph: Any) -> None:
    """Remove the second record of every weight's shape.

    onnxruntime's quantization transposes the classifier's weight, and then fails because the record differs.
    """
    weights = {weight.name for weight in graph.graph.initializer}
    others = [value for value in graph.graph.value_info if value.name not in weights]
    del graph.graph.value_info[:]
    graph.graph.value_info.extend(others)


def _replace_cast_like(graph: Any) -> None:
    """Replace CastLike by Cast: onnxruntime has no kernel for it, and warns about each."""
    import onnx

    if not any(node.op_type == "CastLike" for node in graph.graph.node):
        return
    inferred = onnx.shape_inference.infer_shapes(graph).graph
    values = (*inferred.input, *inferred.output, *inferred.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {weight.name: weight.data_type for weight in inferred.initializer}
    for node in graph.graph.node:
        if node.op_type == "CastLike" and types.get(node.input[1]):
            like = node.input.pop()
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", types[like]))


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Compute attention as two products and a softmax. Fused kernels promise memory layouts that ONNX breaks."""
    fused = functional.scaled_dot_product_attention

    def plain(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float | None = None, **_: Any
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            is_boolean = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_boolean else scores + attn_mask
        return scores.softmax(-1) @ value

    functional.scaled_dot_product_attention = plain
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused
