"""``frugalvit export``: write a model for other programs.

The export is loaded again by its own library and compared with the model on images before it is moved to its folder.
"""

import contextlib
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_config import saved_size
from frugalvit.config.tools import EXPORTS, ExportConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.engine.hardware import configure_cpu
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import described_by, without_scores
from frugalvit.export.format import ExportFormat, ExportJob, Run
from frugalvit.export.inference_model import ReadyModel, load
from frugalvit.export.model_card import in_pixels
from frugalvit.export.verify import check_images
from frugalvit.runs import layout
from frugalvit.tasks.classification.predict import nonfinite_message
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, working_folder
from frugalvit.utils.tables import CommandResult, Table

TOLERANCE = 1e-3
"""The largest absolute difference from torch that an exported model may have."""


def export(config: ExportConfig) -> CommandResult:
    """Write the model in a format, after checking that it computes the same."""
    began = time.monotonic()
    export_format = _make_format(config.to)
    export_format.check_options(config)
    configure_cpu()  # for the backbone too, which ONNX and torch.export call without the model
    model = load(config.model, img_size=config.img_size, backbone=config.backbone)
    out = Path(config.out or f"{model.name}-{config.to}")
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.resolve() == Path.cwd()):
        raise UserError(f"{out} already exists: choose another folder with --out.")
    settings, meta, scored_at = _read_settings(config.model), model.meta, _scored_size(config, model)
    if scored_at is not None:
        meta = without_scores(meta)  # they are the scores of another input size
    images, source = check_images(model, config.images, settings)
    with torch.inference_mode():
        if not bool(model(images).isfinite().all()):
            raise UserError(nonfinite_message(config.model))
    console.info(f"writing {model.backbone.name} for {config.to}, then checking it on {source}")
    with _staged(out) as folder:
        network, run = export_format.write(ExportJob(config, model, folder, meta, settings, scored_at))
        difference = largest_difference(network, run, images)
        if not difference <= TOLERANCE:
            raise UserError(
                f"The {config.to} export differs from torch by {difference:.2g} (allowed: {TOLERANCE:g}) on "
                f"{source} and was deleted. {advise_on_difference(model.backbone, config.to)}"
            )
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    data = {
        "model": config.model,
        "to": config.to,
        "out": str(out),
        "files": list(files),
        "max_difference": difference,
        "checked_on": source,
        "seconds": round(time.monotonic() - began, 2),
    }
    rows: list[list[object]] = [[name, round(size / 1e6, 3)] for name, size in files.items()]
    notes = [f"equals torch within {difference:.1e} on {source}"]
    if scored_at is not None and meta != model.meta:
        notes.append(f"config.json has no scores: they were measured at {in_pixels(scored_at)}")
    if (Path(config.model) / layout.DENSE_FACTS).exists():
        notes.append("this is the backbone alone: use detectors and segmenters with 'frugalvit detect|segment predict'")
    if not Path(config.model).exists():
        notes.append(f"{config.model} is the name of an architecture: these weights are random")
    return CommandResult(data, [Table(["file", "MB"], rows, str(out))], notes)


def _make_format(name: str) -> ExportFormat:
    module, _, attribute = EXPORTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


def largest_difference(network: nn.Module, run: Run, images: Tensor) -> float:
    """Return max |run(x) - network(x)| over all outputs, for the batch and for its first image alone."""
    largest = 0.0
    for batch in (images, images[:1]):
        with torch.inference_mode():
            expected = network(batch)
        expected = [expected] if isinstance(expected, Tensor) else list(expected)
        for ours, theirs in zip(expected, run(batch), strict=True):
            difference = (ours - theirs).abs().max().item()
            largest = difference if difference != difference else max(largest, difference)  # NaN stays
    return largest


def advise_on_difference(backbone: Backbone, to: str) -> str:
    """Say what to do about an export that computes something else."""
    is_users = type(backbone.model).__module__.partition(".")[0] not in ("frugalvit", "timm")
    if is_users and to in ("timm", "hf"):
        return f"The function that makes {backbone.name} must load timm's pretrained weights (docs/extending.md)."
    return f"Please report this model: {backbone.name}."


def _read_settings(model: str) -> dict[str, Any]:
    """Read config.yaml of a run; empty if the model is not a run."""
    config = (described_by(Path(model)) or Path(model)) / layout.CONFIG
    return read_yaml(config) if config.is_file() else {}


def _scored_size(config: ExportConfig, model: ReadyModel) -> tuple[int, int] | None:
    """Return the input size of the model's scores if the export has another."""
    size = None if config.img_size is None else saved_size(config.model)
    return None if size == model.backbone.img_size else size


@contextlib.contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Yield a working folder that becomes ``out`` at the end, and is removed on an error."""
    make_folder(out.absolute().parent)
    with working_folder(out.absolute()) as folder:
        yield folder
        try:
            folder.rename(out)
        except OSError as error:
            raise UserError(
                f"Cannot move the export to {out} ({error.strerror}): choose another folder with --out."
            ) from None
