"""A MODEL as people name one: a run folder, a checkpoint, an exported folder or the name of an architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.factory import close_names, is_name
from frugalvit.backbones.folder import find_model_folder, load_model_folder
from frugalvit.backbones.weights import load_weights
from frugalvit.data.augment import EvalTransform
from frugalvit.errors import UserError, nearest

_MODELS = "give a run's folder, a checkpoint or an exported folder"
_HOW = f"{_MODELS[0].upper()}{_MODELS[1:]}, or a name of 'frugalvit list models'."


@dataclass
class Model:
    """A backbone ready for use: with its preprocessing, its class names, and where it came from."""

    backbone: Backbone
    transform: EvalTransform
    classes: tuple[str, ...] | None = None
    name: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


def load_model(
    where: str, device: str = "cpu", *, img_size: int | tuple[int, int] | None = None, architecture: str | None = None
) -> Model:
    """The model ``where`` names, in eval mode on ``device``.

    A bare checkpoint does not say what it belongs to; ``architecture`` then does. An architecture's name alone gives
    random weights.
    """
    path = Path(where)
    meta: dict[str, Any] = {}
    if path.is_dir():
        folder = find_model_folder(path)
        if folder is None:
            begun = (path / "config.yaml").exists()
            hint = f"the run is not finished; 'frugalvit … --resume {path}' goes on" if begun else _MODELS
            raise UserError(f"{path} holds no model (no config.json): {hint}.")
        backbone, meta = load_model_folder(folder, img_size=img_size)
        if architecture not in (None, backbone.name):
            raise UserError(f"{path} holds a {backbone.name} and says so itself: leave out --backbone {architecture}.")
        name = path.resolve().name
    elif path.is_file():
        if architecture is None:
            raise UserError(f"{path} is a bare checkpoint: say what it belongs to with --backbone NAME.")
        backbone = create_backbone(architecture, img_size=img_size or 224)
        load_weights(backbone, path)
        name = path.stem
    else:
        if "/" in where or where.endswith((".pt", ".pth", ".safetensors")):
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            hint = nearest(path.name, beside) or f" {_MODELS[0].upper()}{_MODELS[1:]}."
            raise UserError(f"There is no model at {where}.{hint}")
        if not is_name(where):
            raise UserError(f"There is no folder, file or network '{where}'.{close_names(where)} {_HOW}")
        backbone = create_backbone(where, img_size=img_size or 224)
        name = where
    classes = meta.get("classes")
    transform = EvalTransform(backbone.img_size, mean=backbone.mean, std=backbone.std, **_preparation(meta))
    return Model(backbone.to(device).eval(), transform, tuple(classes) if classes else None, name, meta)


def _preparation(meta: dict[str, Any]) -> dict[str, Any]:
    """How a folder says its images were cropped and resized, where it says so."""
    known: dict[str, Any] = {}
    if meta.get("crop_pct"):
        known["resize_ratio"] = max(1.0, 1 / float(meta["crop_pct"]))
    if meta.get("interpolation") in ("bilinear", "bicubic"):
        known["interpolation"] = meta["interpolation"]
    return known
