"""A model leaves the house: as a folder for timm or the hub, as an ONNX or torch.export program; ``load`` brings it in.

Whatever is written is loaded again by its own library and compared with the model on images before it is kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from frugalvit.backbones.weights.model_config import model_config, saved_size
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.base import read_yaml
from frugalvit.config.tools import ExportConfig
from frugalvit.engine.hardware import configure_cpu
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import described_by, without_scores
from frugalvit.export.inference_model import ReadyModel, load
from frugalvit.export.model_card import in_pixels, write_card
from frugalvit.export.onnx import Program, Run, write_onnx, write_pt2
from frugalvit.export.verify import check_images
from frugalvit.tasks.classification.predict import nonfinite_message
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, remove_leftovers, working_folder, write_text
from frugalvit.utils.tables import CommandResult, Table

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone

TOLERANCE = 1e-3
"""The largest absolute difference from torch that an exported model may have."""


# The command


def export(config: ExportConfig) -> CommandResult:
    """Write the model in the form asked for, after it has proved to compute the same."""
    began = time.monotonic()
    _check_options(config)
    if config.to == "onnx":
        _need_onnx()
    configure_cpu()  # for the whole command, which also asks the network apart from the model
    model = load(config.model, img_size=config.img_size, backbone=config.backbone)
    out = Path(config.out or f"{model.name}-{config.to}")
    remove_leftovers(out.absolute())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists and is kept; choose another folder with --out.")
    settings, meta, scored_at = _settings(config.model), model.meta, _scored_at(config, model)
    if scored_at is not None:
        meta = without_scores(meta)  # whoever reads them would take them for this network's
    pictures, source = check_images(model, config.images, settings)
    with torch.inference_mode():
        if not bool(model(pictures).isfinite().all()):
            raise UserError(nonfinite_message(config.model))
    console.info(f"writing {model.backbone.name} for {config.to}, then checking it on {source}")
    with _staged(out) as folder:
        if config.to in ("timm", "hf"):
            save_model_folder(model.backbone, folder, classes=model.classes, meta=meta)
            if config.to == "hf":
                summary = read_json(Path(config.model) / "summary.json", dict) or {}
                write_card(folder, model, config.license, summary, settings, scored_at)
            network: nn.Module = model
            run = _timm(folder)
        else:
            network = Program(model.backbone, _output(config, model))
            path = folder / f"model.{config.to}"
            run = (write_onnx if config.to == "onnx" else write_pt2)(network, path, model)
            text = json.dumps(model_config(model.backbone, model.classes, meta), indent=2, ensure_ascii=False)
            write_text(folder / "config.json", text)
        difference = largest_difference(network, run, pictures)
        if not difference <= TOLERANCE:
            raise UserError(
                f"the exported {config.to} model differs from torch by {difference:.2g} (allowed: {TOLERANCE:g}) on "
                f"{source}; nothing was kept. {_what_to_do(model.backbone, config.to)}"
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
        notes.append(f"the model's scores are of {in_pixels(scored_at)}, so config.json is without them")
    if (Path(config.model) / "transfer.json").exists():
        notes.append("the backbone alone: detectors and segmenters are used with 'frugalvit detect|segment predict'")
    if not Path(config.model).exists():
        notes.append(f"{config.model} is a model's name, not a trained model: these weights are random")
    return CommandResult(data, [Table(["file", "MB"], rows, str(out))], notes)


def largest_difference(network: nn.Module, run: Run, pictures: Tensor) -> float:
    """max |run(x) - network(x)| over all outputs, for the whole batch and for its first image alone."""
    worst = 0.0
    for batch in (pictures, pictures[:1]):
        with torch.inference_mode():
            expected = network(batch)
        expected = [expected] if isinstance(expected, Tensor) else list(expected)
        for mine, theirs in zip(expected, run(batch), strict=True):
            gap = (mine - theirs).abs().max().item()
            worst = gap if gap != gap else max(worst, gap)  # not a number stays
    return worst


def _timm(folder: Path) -> Run:
    """The folder as timm loads it."""
    import timm

    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"timm cannot load this model: {' '.join(str(error).split())[:200]}.") from error

    def run(images: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return [model(images)]

    return run


def _need_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'ONNX export needs {" and ".join(missing)}: pip install "frugalvit[export]"')


def _check_options(config: ExportConfig) -> None:
    """An option that this form has no use for is said, not passed over."""
    if config.output != "auto" and config.to in ("timm", "hf"):
        raise UserError(
            f"--output is for programs (--to onnx, --to pt2): a folder for {config.to} holds the whole model, "
            "its classifier and its features. Leave it out."
        )
    if config.license != "unknown" and config.to != "hf":
        raise UserError(f"--license is written into the model card of --to hf; {config.to} has none. Leave it out.")


def _output(config: ExportConfig, model: ReadyModel) -> str:
    if config.output == "logits" and not model.backbone.num_classes:
        raise UserError(f"{config.model} has no classifier, so no logits; export --output features.")
    if config.output != "auto":
        return config.output
    return "logits" if model.backbone.num_classes else "features"


# What a run knows, and where the export goes


def _settings(model: str) -> dict[str, Any]:
    """config.yaml of a run; empty for anything that is no run."""
    config = (described_by(Path(model)) or Path(model)) / "config.yaml"
    return read_yaml(config) if config.is_file() else {}


def _scored_at(config: ExportConfig, model: ReadyModel) -> tuple[int, int] | None:
    """The size of the images that the model was scored on, where it leaves the house for another."""
    own = None if config.img_size is None else saved_size(config.model)
    return None if own == model.backbone.img_size else own


def _what_to_do(backbone: Backbone, to: str) -> str:
    own = type(backbone.model).__module__.partition(".")[0] not in ("frugalvit", "timm")
    if own and to in ("timm", "hf"):
        return (
            f"The function that makes {backbone.name} must load what timm gives it as pretrained (docs/extending.md)."
        )
    return f"Please report this model: {backbone.name}."


@contextlib.contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A folder that takes the place of ``out`` when everything in it is done, and vanishes otherwise.

    It lies beside ``out``, or inside where that is there and empty: a mounted or the current folder stays what it is.
    """
    inside, place = out.is_dir(), out.absolute()
    make_folder(place if inside else place.parent)
    with working_folder(place, inside=inside) as folder:
        yield folder
        whole = folder.rename(folder.parent.with_suffix(""))  # from now on nobody's leftover
    try:
        if inside:
            if any(path.name != whole.name for path in out.iterdir()):
                raise OSError(None, "something else was written there meanwhile")
            for path in whole.iterdir():
                path.rename(out / path.name)
            whole.rmdir()
        else:
            whole.rename(out)
    except OSError as error:  # the work is done and good: it is not thrown away
        raise UserError(
            f"the export is finished, but cannot be moved to {out} ({error.strerror or error}): take it from {whole}."
        ) from None
