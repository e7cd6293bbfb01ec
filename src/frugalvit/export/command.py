"""``frugalvit export``: write a model for other programs.

The export is loaded again by its own library and compared with the model on images before it is moved to its folder.
"""

import contextlib
import pkgutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.backbones.weights.model_config import saved_size
from frugalvit.backbones.weights.published import is_published
from frugalvit.config.tools import EXPORTS, ExportConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.data import open_data, preprocessing
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.decode import PHOTO, PixelFormat, read_pixels
from frugalvit.data.formats.csv import is_table
from frugalvit.data.formats.registry import find_format
from frugalvit.data.paths import local
from frugalvit.engine.hardware import configure_cpu
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import described_by, without_scores
from frugalvit.export.format import ExportFormat, ExportJob, Run
from frugalvit.export.hub import push_folder
from frugalvit.export.inference_model import ReadyModel, load
from frugalvit.export.int8 import NOTE, open_scored_images, write_int8
from frugalvit.runs import layout
from frugalvit.tasks.classification.predict import nonfinite_message
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, working_folder, write_text
from frugalvit.utils.tables import CommandResult, Table

TOLERANCE = 1e-3
"""The largest absolute difference from torch that an exported model may have."""
CHECKED = 5  # images


def export(config: ExportConfig) -> CommandResult:
    """Write the model in a format, after checking that it computes the same."""
    began = time.monotonic()
    export_format: ExportFormat = pkgutil.resolve_name(EXPORTS[config.to])()
    export_format.check_options(config)
    if config.push:
        push_folder(config.push)  # only checks
    configure_cpu()  # for the backbone too, which ONNX and torch.export call without the model
    model = load(config.model, img_size=config.img_size, backbone=config.backbone)
    out = Path(config.out or f"{model.name}-{config.to}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists: choose another folder with --out.")
    run, size = described_by(Path(config.model)) or Path(config.model), saved_size(config.model)
    settings = read_yaml(run / layout.CONFIG) if (run / layout.CONFIG).is_file() else {}
    facts = read_json(run / layout.DATA, dict) or {}  # a saved probe has no config.yaml
    resized = config.img_size is not None and size not in (None, model.backbone.img_size)
    meta = without_scores(model.meta) if resized else model.meta
    run_data = settings.get("data") or facts.get("data")
    images, source = check_images(model, config.images, run_data)
    with torch.inference_mode():
        if not bool(model(images).isfinite().all()):
            raise UserError(nonfinite_message(config.model))
    scored = open_scored_images(model, config, run_data) if config.int8 else None
    console.info(f"writing {model.backbone.name} for {config.to}, then checking it on {source}")
    with _staged(out) as folder:
        network, exported = export_format.write(ExportJob(config, model, folder, meta, settings, resized))
        write_text(folder / "preprocessing.py", Path(preprocessing.__file__).read_text(encoding="utf-8"))
        difference = largest_difference(network, exported, images)
        if not difference <= TOLERANCE:
            raise UserError(
                f"The {config.to} export differs from torch by {difference:.2g} (allowed: {TOLERANCE:g}) on "
                f"{source} and was deleted. A network of your own must load timm's weights (docs/extending.md). "
                f"Otherwise please report this model: {model.backbone.name}."
            )
        loss = write_int8(folder / "model.onnx", model, scored) if scored is not None else None
    address = push_folder(config.push, out, config.private) if config.push else None
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    data = {
        "model": config.model,
        "to": config.to,
        "out": str(out),
        "files": list(files),
        "max_difference": difference,
        "checked_on": source,
        "seconds": round(time.monotonic() - began, 2),
        "int8": loss,
        "pushed": address,
    }
    rows: list[list[object]] = [[name, round(size / 1e6, 3)] for name, size in files.items()]
    notes = [f"checked on {source}: the largest difference from PyTorch is {difference:.2g}"]
    if loss is not None:
        notes.append(NOTE.format(**loss))
    if address is not None:
        notes.append(f"on the hub: {address}")
    if config.to == "timm":
        notes.append(f"next  timm.create_model({f'local-dir:{out}'!r}, pretrained=True)")
    if meta != model.meta:
        notes.append("config.json has no scores: they were measured at another image size")
    if (Path(config.model) / layout.DENSE_FACTS).exists():
        notes.append("this is the backbone alone: use detectors and segmenters with 'frugalvit detect|segment predict'")
    if not Path(config.model).exists() and not is_published(config.model):
        notes.append(f"{config.model} is the name of an architecture: these weights are random")
    return CommandResult(data, [Table(["file", "MB"], rows, str(out))], notes)


def check_images(model: ReadyModel, images: str | None, run_data: str | None) -> tuple[Tensor, str]:
    """Return a batch of preprocessed images and a description of them.

    images:   the user's choice, which may be remote
    run_data: the data of the model's run; used if it is a local path, never downloaded
    """
    backbone = model.backbone
    data = images or run_data
    if data and (images or local(data).exists() or is_table(data)):
        try:
            pixels = model.transform(read_images(data, model.pixels))
        except UserError as error:
            if images:
                raise
            console.warning(f"cannot read the run's data ({error}); checking the export on noise")
        else:
            return pixels, f"{len(pixels)} images of {data}"
    noise = torch.randn(CHECKED, backbone.in_chans, *backbone.img_size, generator=torch.Generator().manual_seed(0))
    return noise, f"{CHECKED} images of noise"


def read_images(data: str, pixels: PixelFormat = PHOTO) -> list[Any]:
    """Read the first readable images of a file, a folder or a dataset."""
    if Path(data).is_file() and find_format(data) is None:
        return [read_pixels(data, pixels)]
    splits = open_data(data, split="given").splits
    examples: Any = next((splits[name] for name in ("test", "val", "train") if len(splits.get(name, ()))), [])
    examples = examples.with_pixels(pixels) if len(examples) else examples
    images: list[Any] = []
    for index in range(len(examples)):
        with contextlib.suppress(UnreadableImage):
            images.append(examples.read(index))
        if len(images) == CHECKED:
            break
    if not images:
        raise UserError(f"{data} has no readable image.")
    return images


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
                f"The export cannot be moved to {out} ({error.strerror}): choose another folder with --out."
            ) from None
