"""A model as a folder: ``model.safetensors`` and ``config.json``, the form timm and the Hugging Face hub use.

``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads it; where the architecture is timm's own, without
frugalvit. Beside timm's fields, ``config.json`` has a section "frugalvit" with everything needed to make the same
backbone again and whatever is known about its training.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from frugalvit import __version__
from frugalvit.backbones.fitting import classifier_name
from frugalvit.backbones.weights import WEIGHT_FILES, file_in, load_weights
from frugalvit.errors import UserError
from frugalvit.files import make_folder, write_atomically, write_text

if TYPE_CHECKING:
    from torch import nn

    from frugalvit.backbones import Backbone


def save_model_folder(
    backbone: Backbone,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write the backbone, with its classifier, as a folder. Each file is replaced as a whole; a kill harms neither.

    classes: names of the classifier's outputs, in order
    meta:    anything JSON can hold about the training (data, recipe, scores); ``load_model_folder`` gives it back
    """
    if classes is not None and backbone.num_classes and len(classes) != backbone.num_classes:
        raise UserError(f"{len(classes)} class names were given for a classifier of {backbone.num_classes} classes.")
    folder = make_folder(Path(folder))
    metadata = {"format": "pt", "frugalvit": __version__}
    content = _in_order(safetensors_bytes(_own_tensors(backbone), metadata=metadata))
    write_atomically(folder / "model.safetensors", lambda handle: handle.write(content))
    write_text(folder / "config.json", json.dumps(model_config(backbone, classes, meta), indent=2, ensure_ascii=False))
    return folder


def _in_order(content: bytes) -> bytes:
    """The same safetensors file with its metadata sorted: the library writes them in a random order.

    A file is eight bytes of length, a JSON header of that length, and the tensors.
    """
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def model_config(
    backbone: Backbone, classes: Sequence[str] | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of ``config.json``: timm's fields, then ours."""
    config = backbone.timm_config()
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


def load_model_folder(
    folder: str | Path, *, img_size: int | tuple[int, int] | None = None
) -> tuple[Backbone, dict[str, Any]]:
    """The backbone in a folder written here, by timm or downloaded from the hub, in eval mode, and what is known of it.

    At another ``img_size`` it stays the network it is, patches, windows and strides; its ``notes`` say where a small
    size then ends in a small grid.

    The second value holds "classes" (names or None), "interpolation", "crop_pct" and whatever was saved as ``meta``.
    """
    from frugalvit.backbones import create_backbone

    folder = Path(folder)
    config = _read_config(folder / "config.json")
    crop = _checked_crop(config, folder)
    weights = file_in(folder)
    if weights is None:
        for file, words in (("model.onnx", "an ONNX program"), ("model.pt2", "a pt2 program")):
            if (folder / file).is_file():
                raise UserError(
                    f"{folder} holds {words}, which runs without frugalvit; give the run, or a timm or hf export."
                )
        raise UserError(f"{folder} has a config.json but no weights ({WEIGHT_FILES[0]}).")
    name, keywords = _architecture(config, folder)
    if img_size is not None:
        keywords["img_size"] = img_size
    pretrained = config.get("pretrained_cfg") or {}
    statistics = {key: pretrained[key] for key in ("mean", "std") if pretrained.get(key)}
    if {len(values) for values in statistics.values()} == {keywords.get("in_chans", 3)}:
        keywords |= statistics
    try:
        keywords["keep_shape"] = True
        backbone = create_backbone(name, **keywords)
    except TypeError as error:
        raise UserError(f"{folder / 'config.json'} has options that '{name}' does not know: {error}.") from None
    report = load_weights(backbone, weights)
    if report.missing:
        why = f" ({'; '.join(report.notes)})" if report.notes else ""
        raise UserError(
            f"{weights} does not fit '{name}' at {backbone.img_size[0]}x{backbone.img_size[1]} pixels: "
            f"{len(report.missing)} of its tensors, {report.missing[0]} for one, find nothing in it{why}."
        )
    meta = {
        **(config.get("frugalvit") or {}).get("meta", {}),
        "classes": _checked_labels(config, backbone.num_classes, folder),
        "interpolation": pretrained.get("interpolation", "bicubic"),
        "crop_pct": crop,
    }
    return backbone.eval(), meta


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
    from frugalvit.backbones.base import NOT_THE_NETWORKS, Backbone
    from frugalvit.backbones.factory import outline, to_size

    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        name, keywords = _architecture(_read_config(path), folder)
        size = keywords.pop("img_size", 224)
        if isinstance(backbone, Backbone) and (backbone.name, backbone.img_size) == (name, to_size(size)):
            shape = backbone.keywords | {"num_classes": backbone.num_classes, "in_chans": backbone.in_chans}
            if all(shape.get(key) == value for key, value in keywords.items() if key not in NOT_THE_NETWORKS):
                return backbone.model
        return outline(name, size, **{"num_classes": 0, "in_chans": 3} | keywords)
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


def _own_tensors(backbone: Backbone) -> dict[str, Tensor]:
    """The model's tensors on the CPU, each in memory of its own, as safetensors wants them."""
    return {name: tensor.cpu().contiguous().clone() for name, tensor in backbone.timm_state_dict().items()}
