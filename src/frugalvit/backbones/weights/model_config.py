"""config.json of a model folder: write it, and read the network that the folder's weights belong to."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from frugalvit import __version__
from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS, Backbone
from frugalvit.backbones.factory import build_meta, to_size
from frugalvit.backbones.weights.fit import classifier_name
from frugalvit.backbones.weights.timm_config import timm_config
from frugalvit.errors import UserError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""Names of the weights file in a model folder: ours, timm's and the hub's."""


def weights_in(path: Path) -> Path:
    """Return the weights file of a run or model folder; any other path is returned unchanged."""
    return weights_file(path / "model") or weights_file(path) or path


def weights_file(folder: Path) -> Path | None:
    """Return the weights file in a model folder, or None."""
    return next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)


def model_config(
    backbone: Backbone, classes: Sequence[str] | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of ``config.json``: timm's fields, then ours."""
    config = timm_config(backbone)
    labels = {"label_names": list(classes)} if classes else {}
    ours = {"interpolation": "bicubic", "crop_pct": crop_share(backbone.img_size), "crop_mode": "center"}
    ours |= {name: value for name, value in (meta or {}).items() if name in ours and value}  # of a loaded model
    ours["classifier"] = classifier_name(backbone.model)
    if backbone.in_chans != 3:
        # With a name here, timm would convert the stored weights from three channels once more.
        ours["first_conv"] = None
    return {
        **config,
        **labels,
        "pretrained_cfg": {**config["pretrained_cfg"], **ours, **labels},
        "frugalvit": {"version": __version__, **backbone.spec(), "meta": dict(meta or {})},
    }


def crop_share(img_size: tuple[int, int]) -> float:
    """Return the share of the shorter edge that evaluation crops: 224 of 256, and all of it up to 64 pixels."""
    return 1.0 if max(img_size) <= 64 else 0.875


def find_model_folder(path: str | Path) -> Path | None:
    """Return the model folder at ``path``: a run's ``model/`` or the folder itself; None without config.json."""
    folders = (Path(path) / "model", Path(path))
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def saved_size(path: str | Path) -> tuple[int, int] | None:
    """Return the image size of the model in a folder; None without config.json."""
    folder = _folder_of(path)
    if folder is None:
        return None
    _, keywords = read_architecture(read_config(folder), folder)
    return to_size(keywords["img_size"])


def class_names(path: str | Path) -> list[str] | None:
    """Return the class names of the model in a folder, in order, or None."""
    folder = _folder_of(path)
    try:
        return None if folder is None else read_labels(read_config(folder))
    except UserError:  # a config.json of another program
        return None


def _folder_of(path: str | Path) -> Path | None:
    """``find_model_folder``, also for the path of a weights file in the folder."""
    path = Path(path)
    return find_model_folder(path.parent if path.name in WEIGHT_FILES else path)


def saved_network(folder: Path, backbone: Backbone | nn.Module) -> nn.Module | None:
    """Return the network of a folder's weights on the meta device: it has the shapes of their tables.

    This is ``backbone`` itself if it is the same network for the same image size, and None without a config.json of
    ours or timm's.
    """
    if not (folder / "config.json").is_file():
        return None
    try:
        name, keywords = read_architecture(read_config(folder), folder)
        size = keywords.pop("img_size")
        if isinstance(backbone, Backbone) and (backbone.name, backbone.img_size) == (name, to_size(size)):
            shape = backbone.keywords | {"num_classes": backbone.num_classes, "in_chans": backbone.in_chans}
            if all(shape.get(key) == value for key, value in keywords.items() if key not in BACKBONE_ONLY_KWARGS):
                return backbone.model
        return build_meta(name, size, **{"num_classes": 0, "in_chans": 3} | keywords)
    except UserError:  # a config.json of another program; the weights are loaded without it
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder, ours or timm's."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} contains no model (no config.json).") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON file ({' '.join(str(error).split())}).") from None
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise UserError(f"{path} has no 'architecture'; it was not written by frugalvit or timm.")
    pretrained = config.get("pretrained_cfg") or {}
    if not isinstance(pretrained, dict) or len(pretrained.get("input_size") or (3, 224, 224)) != 3:
        raise UserError(f"{path} has a damaged 'pretrained_cfg'; it was not written by frugalvit or timm.")
    return config | {"pretrained_cfg": pretrained}


def read_labels(config: dict[str, Any]) -> list[str] | None:
    """Return the class names of a config, or None."""
    labels = config.get("label_names") or config["pretrained_cfg"].get("label_names")
    return [str(label) for label in labels] if isinstance(labels, list) else None


def read_architecture(config: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the model's name and the keywords of ``create_backbone``."""
    ours = config.get("frugalvit")
    if isinstance(ours, dict) and "name" in ours:
        name, keywords = str(ours["name"]), dict(ours["keywords"])
        keywords |= {key: ours[key] for key in ("num_classes", "in_chans")}
        keywords["img_size"] = to_size(ours["img_size"])
    else:
        pretrained = config["pretrained_cfg"]
        name, keywords = config["architecture"], dict(config.get("model_args") or {})
        channels, height, width = pretrained.get("input_size") or (3, 224, 224)
        keywords.setdefault("in_chans", channels)
        keywords.setdefault("img_size", (height, width))
        keywords.setdefault("num_classes", config.get("num_classes", pretrained.get("num_classes", 0)))
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{folder / 'config.json'} has an impossible architecture: {name!r}.")
    return name, keywords
