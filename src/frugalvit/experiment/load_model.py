"""A MODEL as people name one: a run folder, a checkpoint, an exported folder or the name of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.registry import is_model_name, suggest_names
from frugalvit.backbones.weights.checkpoint_formats import classifier_part
from frugalvit.backbones.weights.load import LoadReport, load_weights
from frugalvit.backbones.weights.model_config import WEIGHT_FILES, find_model_folder
from frugalvit.backbones.weights.model_folder import load_model_folder
from frugalvit.data.augment.transforms import EvalTransform
from frugalvit.errors import UserError, did_you_mean
from frugalvit.experiment.init_weights import backbone_weights
from frugalvit.experiment.resume import verb_of
from frugalvit.runs.run_folder import CHECKPOINTS
from frugalvit.utils import console
from frugalvit.utils.text import truncate_list

_MODELS = "give a run's folder, a checkpoint or an exported folder"
_HOW = f"{_MODELS[0].upper()}{_MODELS[1:]}, or a name of 'frugalvit list models'."


SCORES = ("top1", "top5", "mean_per_class", "knn")
"""What a model folder says of how well its weights do."""


@dataclass
class Model:
    """A backbone ready for use: with its preprocessing, its class names, and where it came from."""

    backbone: Backbone
    transform: EvalTransform
    classes: tuple[str, ...] | None = None
    name: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


def load_model(
    where: str,
    device: str = "cpu",
    *,
    img_size: int | tuple[int, int] | None = None,
    architecture: str | None = None,
    random: bool = False,
) -> Model:
    """The model ``where`` names, in eval mode on ``device``.

    A bare checkpoint does not say what it belongs to; ``architecture`` then does. An architecture's name alone gives
    random weights, which is warned of unless ``random`` says that any will do.
    """
    path, checkpoint = Path(where), None
    meta: dict[str, Any] = {}
    folder = described_by(path)
    if folder is not None and (architecture is None or path.name not in WEIGHT_FILES):
        path, checkpoint = folder, None if path.name in WEIGHT_FILES else path
    if path.is_dir():
        folder = find_model_folder(path)
        if folder is None:
            begun = (path / "config.yaml").exists()
            verb = verb_of(path) if begun else None
            way = f"'frugalvit {verb or 'train'} --resume {console.shell_quote(path)}' goes on"
            hint = f"the run is not finished; {way}" if begun else _MODELS
            raise UserError(f"{path} holds no model (no config.json): {hint}.")
        backbone, meta = load_model_folder(folder, img_size=img_size)
        if architecture not in (None, backbone.name):
            raise UserError(f"{path} holds a {backbone.name} and says so itself: leave out --backbone {architecture}.")
        if img_size is not None:
            _say_all(backbone.notes)
        name = path.resolve().name
        if checkpoint is not None:
            load_weights(backbone, backbone_weights(checkpoint), strict=True)
            name, meta = f"{name}-{checkpoint.stem}", without_scores(meta)  # which are of the weights in the folder
    elif path.is_file():
        if architecture is None:
            way = "say it with --backbone NAME"
            raise UserError(f"{path} is a bare checkpoint, which does not name its network: {way}.")
        backbone = _from_file(path, architecture, img_size or 224)
        name = path.stem
    else:
        if "/" in where or where.endswith((".pt", ".pth", ".safetensors")):
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            hint = did_you_mean(path.name, beside) or f" {_MODELS[0].upper()}{_MODELS[1:]}."
            raise UserError(f"There is no model at {where}.{hint}")
        if not is_model_name(where):
            raise UserError(f"There is no folder, file or network '{where}'.{suggest_names(where)} {_HOW}")
        if not random:
            _weights_by_chance(where)
        backbone = create_backbone(where, img_size=img_size or 224)
        _say_all(backbone.notes)
        name = where
    classes = meta.get("classes")
    transform = EvalTransform(backbone.img_size, mean=backbone.mean, std=backbone.std, **_preparation(meta))
    return Model(backbone.to(device).eval(), transform, tuple(classes) if classes else None, name, meta)


def described_by(path: Path) -> Path | None:
    """The folder that says what a file's weights belong to: the model's, or the finished run's of a checkpoint."""
    if not path.is_file():
        return None
    if path.name in WEIGHT_FILES and (path.parent / "config.json").is_file():
        return path.parent
    run = path.parent.parent
    own = path.parent.name == "checkpoints" and path.name in CHECKPOINTS
    return run if own and (run / "model" / "config.json").is_file() else None


def without_scores(known: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts of a model without how well it does."""
    return {name: value for name, value in known.items() if name not in SCORES}


def _from_file(path: Path, architecture: str, img_size: int | tuple[int, int]) -> Backbone:
    """The network a bare file's weights were trained in: the published one, or the one small images are given.

    Nothing in such a file says which; that into which they go as they are, and the published one where both do.
    """
    backbone = create_backbone(architecture, img_size=img_size, keep_patch_size=True)
    report = load_weights(backbone, path)
    if report.resized and "keep_patch_size" in backbone.keywords:
        finer = create_backbone(architecture, img_size=img_size)
        as_it_is = load_weights(finer, path)
        if not as_it_is.resized:
            backbone, report = finer, as_it_is
    if report.missing:
        lacking = ", ".join(report.missing[:4]) + ("…" if len(report.missing) > 4 else "")
        raise UserError(
            f"{path} lacks {len(report.missing)} tensors of '{architecture}' ({lacking}): is it the right --backbone?"
        )
    if "keep_patch_size" in backbone.keywords:
        console.info(
            f"{path} does not say how its network was made for small images: the published {architecture} is taken. A "
            "run's or an exported folder does."
        )
    else:
        _say_all(backbone.notes)
    _say_report(path, report)
    return backbone


def _say_report(path: Path, report: LoadReport) -> None:
    odd = [name for name in report.left_over if classifier_part(name) is None]
    if odd:
        console.warning(f"{path}: {truncate_list(odd, 4)} found no place in the network; is it the right --backbone?")
    if report.notes:
        console.info(f"{path}: {'; '.join(report.notes)}")


def _weights_by_chance(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if tag:
        raise UserError(
            f"'{name}' names published weights, which are not fetched here: download their folder ('hf download "
            f"timm/{name} --local-dir FOLDER') and give that, or '{architecture}' for random weights."
        )
    console.warning(
        f"'{name}' is a name alone: its weights are random. {_MODELS[0].upper()}{_MODELS[1:]} for trained ones"
    )


def _say_all(notes: list[str]) -> None:
    for note in notes:
        console.info(note)


def _preparation(meta: dict[str, Any]) -> dict[str, Any]:
    """How a folder says its images were cropped and resized, where it says so."""
    known: dict[str, Any] = {}
    if meta.get("crop_pct"):
        known["resize_ratio"] = max(1.0, 1 / float(meta["crop_pct"]))
    if meta.get("interpolation") in ("bilinear", "bicubic"):
        known["interpolation"] = meta["interpolation"]
    return known
