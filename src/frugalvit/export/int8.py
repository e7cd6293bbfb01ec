"""int8 weights for an ONNX program, and what they cost in accuracy."""

from pathlib import Path
from typing import Any

import torch

from frugalvit.config.probe import EvalConfig
from frugalvit.config.tools import ExportConfig
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import ImageDataset
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model
from frugalvit.export.inference_model import ReadyModel
from frugalvit.export.onnx import open_onnx
from frugalvit.tasks.classification.evaluate import open_scored
from frugalvit.tasks.classification.predict import class_names
from frugalvit.utils import console
from frugalvit.utils.statistics import wilson_interval
from frugalvit.visualization.model_views import spread_evenly

MOST_SCORED = 1_000  # images; the 95 % interval of 90 % is then 4 points wide
_BATCH = 16


def open_labelled_images(
    config: ExportConfig, model: Model, data: str | None
) -> tuple[ImageDataset, torch.Tensor, str]:
    """Open the images that measure the loss: test, else val. Returns the images, their classes and their name.

    data: the data of the run, if --images is missing
    """
    if not model.backbone.num_classes or config.output == "features":
        raise UserError(f"--int8 measures the accuracy of a classifier, and {config.model} exports features.")
    if (data := config.images or data) is None:
        raise UserError("--int8 measures its loss on labelled images: pass a dataset with --images.")
    scored = EvalConfig(model=config.model, data=data)
    source, _, split, examples, numbers = open_scored(scored, class_names(model))
    if split == "all" and config.images is None:
        raise UserError(f"{data} has no held-out images for --int8: pass other labelled images with --images.")
    examples = spread_evenly(examples, MOST_SCORED)
    assert examples.labels is not None
    return examples, numbers[examples.labels], f"{source.name} {split}"


def write_int8(
    path: Path, model: ReadyModel, examples: ImageDataset, labels: torch.Tensor, name: str
) -> dict[str, Any]:
    """Write model_int8.onnx beside the program, and compare both on labelled images.

    Weights of matrix products and convolutions become int8, with one scale per output channel. Activations are rounded
    with a scale that each image sets, so no images are needed to prepare it.
    """
    from onnxruntime.quantization import quantize_dynamic

    small = path.with_name("model_int8.onnx")
    with console.quiet():
        quantize_dynamic(path, small, per_channel=True)
    programs = [open_onnx(path), open_onnx(small)]
    right, same, count = [0, 0], 0, 0
    for first in console.progress(range(0, len(examples), _BATCH), label="comparing int8"):
        pixels, rows = [], []
        for row in range(first, min(first + _BATCH, len(examples))):
            try:
                pixels.append(examples.read(row))
            except UnreadableImage as error:
                console.warning(f"skipped: {error}")
            else:
                rows.append(row)
        if not rows:
            continue
        images = model.transform(pixels)
        answers = [run(images)[0].argmax(1) for run in programs]
        right = [total + int((answer == labels[rows]).sum()) for total, answer in zip(right, answers, strict=True)]
        same, count = same + int((answers[0] == answers[1]).sum()), count + len(rows)
    if not count:
        raise UserError(f"{name} has no readable image for --int8.")
    return {
        "scored_on": name,
        "scored_images": count,
        "top1": 100 * right[0] / count,
        "top1_int8": 100 * right[1] / count,
        "interval_int8": list(wilson_interval(right[1], count)),
        "same_answers": 100 * same / count,
        "mb": path.stat().st_size / 1e6,
        "mb_int8": small.stat().st_size / 1e6,
    }


def describe_int8(loss: dict[str, Any]) -> str:
    return (
        "int8: {top1_int8:.1f} % right instead of {top1:.1f} % on {scored_images:,} images of {scored_on}; "
        "{same_answers:.1f} % of the answers are the same; {mb_int8:.1f} MB instead of {mb:.1f} MB"
    ).format(**loss)
