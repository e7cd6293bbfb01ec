"""A network as a program of its own, for runtimes that know nothing of us: an ONNX file, or one of torch.export."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone
    from frugalvit.export.inference_model import ReadyModel

Run = Callable[[Tensor], Sequence[Tensor]]
"""What was written, as its own library runs it."""


class Program(nn.Module):
    """What an exported program computes: images -> logits, or pooled and grid."""

    def __init__(self, backbone: Backbone, output: str) -> None:
        super().__init__()
        self.backbone, self.names = backbone, ["logits"] if output == "logits" else ["pooled", "grid"]

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.backbone(images)
        if self.names == ["logits"]:
            return self.backbone.classify(features.pooled)
        return features.pooled, features.grid


def _captured(network: Program, model: ReadyModel) -> torch.export.ExportedProgram:
    """The program with a free batch size. Three images: sizes 1 and 2 are special cases in too many kernels."""
    example = torch.zeros(3, model.backbone.in_chans, *model.backbone.img_size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(network.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def write_pt2(network: Program, path: Path, model: ReadyModel) -> Run:
    torch.export.save(_captured(network, model), path)
    program = torch.export.load(path).module()
    return lambda images: [program(images)] if network.names == ["logits"] else program(images)


def write_onnx(network: Program, path: Path, model: ReadyModel) -> Run:
    import onnx
    import onnxruntime

    with _plain_attention(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _captured(network, model),
            (),
            input_names=["images"],
            output_names=network.names,
            dynamo=True,
            verbose=False,
            # Its optimiser takes the 1e-8 that keeps T2T's attention from dividing by nothing for a zero, and drops it.
            # onnxruntime optimises what it loads by itself.
            optimize=False,
        )
    assert program is not None
    graph = program.model_proto
    _name_batch(graph)
    _forget_weights_shapes(graph)
    _name_types(graph)
    facts = {"classes": list(model.classes or ()), "mean": model.backbone.mean, "std": model.backbone.std}
    onnx.helper.set_model_props(graph, {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()})
    onnx.checker.check_model(graph)
    onnx.save(graph, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: what it could not fold beforehand it computes
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: [torch.from_numpy(array) for array in session.run(None, {"images": images.numpy()})]


def _name_batch(graph: Any) -> None:
    """The free first dimension is called "batch" wherever it appears, instead of by a number of torch's."""
    symbol = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == symbol:
                dimension.dim_param = "batch"


def _forget_weights_shapes(graph: Any) -> None:
    """A weight says its shape itself. Said again beside it, it stays when a tool changes the weight: onnxruntime's
    quantisation transposes the classifier's, and then refuses the contradiction."""
    weights = {weight.name for weight in graph.graph.initializer}
    kept = [value for value in graph.graph.value_info if value.name not in weights]
    del graph.graph.value_info[:]
    graph.graph.value_info.extend(kept)


def _name_types(graph: Any) -> None:
    """A cast says the type it casts to: onnxruntime has no kernel for "like that one", and warns of each."""
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
    """Attention as two products and a softmax: fused kernels promise memory layouts that ONNX's do not keep."""
    fused = functional.scaled_dot_product_attention

    def plain(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal or enable_gqa:
            return fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            forbids = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if forbids else scores + attn_mask
        return scores.softmax(-1) @ value

    functional.scaled_dot_product_attention = plain
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused
