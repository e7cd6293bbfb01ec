"""int8 weights for an ONNX program, and what they cost in accuracy."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

from frugalvit.config.probe import EvalConfig
from frugalvit.config.tools import ExportConfig
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import ImageDataset
from frugalvit.errors import UserError
from frugalvit.export.inference_model import ReadyModel
from frugalvit.export.onnx import open_onnx
from frugalvit.tasks.classification.evaluate import open_scored
from frugalvit.tasks.classification.predict import class_names
from frugalvit.tasks.classification.target import load_target
from frugalvit.utils import console
from frugalvit.visualization.model_views import spread_evenly

MOST_SCORED = 1_000  # images; the 95 % interval of 90 % is then 4 points wide
NOTE = (
    "model_int8.onnx is right on {top1_int8:.1f} %, model.onnx on {top1:.1f} % of {scored_images:,} images of "
    "{scored_on}; both give the same class for {same_answers:.1f} %"
)


class ScoredImages(NamedTuple):
    """Images to compare the answers on, and their labels as the model numbers them."""

    name: str
    images: ImageDataset
    labels: list[int]


def open_scored_images(model: ReadyModel, config: ExportConfig, data: str | None) -> ScoredImages:
    """Open the images for --int8: --images, or test, else val, of the run's data. Raises before anything is written."""
    if not model.backbone.num_classes or config.output == "features":
        raise UserError(f"--int8 needs a classifier, but {config.model} exports features. Remove --int8.")
    if (data := config.images or data) is None:
        raise UserError("--int8 measures the accuracy on labelled images: pass a dataset with --images.")
    target = load_target(model.model, class_names(model))
    if target.kind != "class":
        raise UserError(f"--int8 needs one class per image, {config.model} has --target {target.kind}. Remove --int8.")
    source, _, split, examples, numbers = open_scored(EvalConfig(model=config.model, data=data), target)
    if split == "all" and config.images is None:
        raise UserError(f"{data} has no held-out images for --int8: pass other labelled images with --images.")
    examples = spread_evenly(examples, MOST_SCORED)
    assert examples.labels is not None
    return ScoredImages(f"{source.name} {split}", examples, numbers[examples.labels].tolist())


def write_int8(path: Path, model: ReadyModel, scored: ScoredImages) -> dict[str, Any]:
    """Write model_int8.onnx beside the program, and compare the answers of both.

    Weights become int8, with one scale per output channel. Each image sets the scale of its own activations. The
    distance to the training images stays exact, because a threshold belongs to it.
    """
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    small = path.with_name("model_int8.onnx")
    quant_pre_process(path, small, skip_onnx_shape=True, skip_symbolic_shape=True)  # stores weights as they are used
    gallery = None if model.calibration is None else model.calibration.gallery
    shape = [] if gallery is None else sorted(gallery.shape)
    graph = onnx.load(small).graph
    exact = {weight.name for weight in graph.initializer if sorted(weight.dims) == shape}
    exact_nodes = [node.name for node in graph.node if exact & set(node.input)]
    quantize_dynamic(small, small, per_channel=True, nodes_to_exclude=exact_nodes)
    programs, answers = [open_onnx(path), open_onnx(small)], []
    for row in console.progress(range(len(scored.images)), label="comparing int8"):
        with contextlib.suppress(UnreadableImage):
            image = model.transform(scored.images.read(row))
            answers.append((scored.labels[row], *(int(run(image)[0].argmax(1)) for run in programs)))
    share = 100 / max(1, len(answers))
    return {
        "scored_on": scored.name,
        "scored_images": len(answers),
        "top1": share * sum(label == full for label, full, _ in answers),
        "top1_int8": share * sum(label == rounded for label, _, rounded in answers),
        "same_answers": share * sum(full == rounded for _, full, rounded in answers),
    }
