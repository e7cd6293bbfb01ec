"""config.json of a model folder: write it, check it, and read what network its weights belong to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from frugalvit import __version__
from frugalvit.backbones.base import Backbone
from frugalvit.backbones.weights.fit import classifier_name
from frugalvit.backbones.weights.timm_config import timm_config
from frugalvit.errors import UserError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""What the weights in a model's folder may be called, here, by timm and on the hub."""


def weights_in(path: Path) -> Path:
    """The weights of a run's or an exported folder; any other path is itself."""
    return file_in(path / "model") or file_in(path) or path


def file_in(folder: Path) -> Path | None:
    """The file of weights that lies in a model's folder."""
    return next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)


def model_config(
    backbone: Backbone, classes: Sequence[str] | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of ``config.json``: timm's fields, then ours."""
    config = timm_config(backbone)
    labels = {"label_names": list(classes)} if classes else {}
    ours = {"interpolation": "bicubic", "crop_pct": crop_share(backbone.img_size), "crop_mode": "center"}
    ours |= {name: value for name, value in (meta or {}).items() if name in ours and value}  # as it was loaded
    ours["classifier"] = classifier_name(backbone.model)
    if backbone.in_chans != 3:
        # Named, timm would convert the stored weights from three channels to ours once more.
        ours["first_conv"] = None
    return {
        **config,
        **labels,
        "pretrained_cfg": {**config["pretrained_cfg"], **ours, **labels},
        "frugalvit": {"version": __version__, **backbone.spec(), "meta": dict(meta or {})},
    }


def crop_share(img_size: tuple[int, int]) -> float:
    """The share of the shorter edge that evaluation looks at: 224 of 256, and all of it up to 64 pixels."""
    return 1.0 if max(img_size) <= 64 else 0.875


def find_model_folder(where: str | Path) -> Path | None:
    """The folder of a model that ``where`` names: a run's ``model/`` or the folder itself; None where there is none."""
    places = (Path(where) / "model", Path(where))
    return next((place for place in places if (place / "config.json").is_file()), None)


def saved_size(where: str | Path) -> tuple[int, int] | None:
    """The size of the images that the model in a folder was saved for; None where no configuration says it."""
    from frugalvit.backbones.factory import to_size

    folder = _folder_of(where)
    if folder is None:
        return None
    _, keywords = _architecture(_read_config(folder / "config.json"), folder)
    return to_size(keywords["img_size"]) if "img_size" in keywords else None


def class_names(where: str | Path) -> list[str] | None:
    """The names of the classes that the model in a folder tells apart, in order; None where nothing names them."""
    folder = _folder_of(where)
    try:
        return None if folder is None else _labels(_read_config(folder / "config.json"))
    except UserError:  # somebody else's configuration
        return None


def _folder_of(where: str | Path) -> Path | None:
    """``find_model_folder``, also by the file of weights that lies in it."""
    place = Path(where)
    return find_model_folder(place.parent if place.name in WEIGHT_FILES else place)


def saved_network(folder: Path, backbone: Backbone | nn.Module) -> nn.Module | None:
    """The network whose weights lie in a folder, by its shapes alone: it says which grid a table belongs to.

    That of ``backbone`` itself where it is the same for the same images; None where no configuration of ours or timm's
    says.
    """
    from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS, Backbone
    from frugalvit.backbones.factory import build_meta, to_size

    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        name, keywords = _architecture(_read_config(path), folder)
        size = keywords.pop("img_size", 224)
        if isinstance(backbone, Backbone) and (backbone.name, backbone.img_size) == (name, to_size(size)):
            shape = backbone.keywords | {"num_classes": backbone.num_classes, "in_chans": backbone.in_chans}
            if all(shape.get(key) == value for key, value in keywords.items() if key not in BACKBONE_ONLY_KWARGS):
                return backbone.model
        return build_meta(name, size, **{"num_classes": 0, "in_chans": 3} | keywords)
    except UserError:  # somebody else's configuration; the weights beside it stand for themselves
        return None


def _labels(config: dict[str, Any]) -> list[str] | None:
    labels = config.get("label_names") or config.get("pretrained_cfg", {}).get("label_names")
    return [str(label) for label in labels] if isinstance(labels, list) else None


def _checked_labels(config: dict[str, Any], classes: int, folder: Path) -> list[str] | None:
    """The names of the classes, one for each: answers are looked up in them."""
    labels = _labels(config)
    if labels is not None and classes and len(labels) != classes:
        raise UserError(
            f"{folder / 'config.json'} names {len(labels)} classes (label_names) for a classifier of {classes}: give "
            "one name for each class, or leave the names out."
        )
    return labels


def _checked_crop(config: dict[str, Any], folder: Path) -> float | None:
    crop = config["pretrained_cfg"].get("crop_pct", 0.875)
    number = isinstance(crop, int | float) and not isinstance(crop, bool)
    if crop is not None and not (number and 0 < crop < math.inf):
        raise UserError(f"{folder / 'config.json'} has crop_pct = {crop!r}: it must be a number above 0, e.g. 0.875.")
    return crop


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no model (no config.json).") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON file ({' '.join(str(error).split())}).") from None
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise UserError(f"{path} names no architecture; it was not written by frugalvit or timm.")
    pretrained = config.get("pretrained_cfg") or {}
    if not isinstance(pretrained, dict) or len(pretrained.get("input_size") or (3, 224, 224)) != 3:
        raise UserError(f"{path} is damaged: 'pretrained_cfg' is not as timm writes it.")
    return config | {"pretrained_cfg": pretrained}


def _architecture(config: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """The model's name and the keywords of ``create_backbone``."""
    ours = config.get("frugalvit")
    if isinstance(ours, dict) and "name" in ours:
        name, keywords = str(ours["name"]), dict(ours.get("keywords") or {})
        keywords |= {key: ours[key] for key in ("num_classes", "in_chans") if key in ours}
        if "img_size" in ours:
            size = ours["img_size"]
            keywords["img_size"] = tuple(size) if isinstance(size, list) else size
    else:
        pretrained = config.get("pretrained_cfg") or {}
        name, keywords = config["architecture"], dict(config.get("model_args") or {})
        channels, height, width = pretrained.get("input_size") or (3, 224, 224)
        keywords.setdefault("in_chans", channels)
        keywords.setdefault("img_size", (height, width))
        keywords.setdefault("num_classes", config.get("num_classes", pretrained.get("num_classes", 0)))
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{folder / 'config.json'} names an architecture that cannot be one: {name!r}.")
    return name, keywords
