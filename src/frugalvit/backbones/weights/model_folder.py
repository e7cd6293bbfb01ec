"""A model as a folder: ``model.safetensors`` and ``config.json``, the form timm and the Hugging Face hub use.

``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads it; where the architecture is timm's own, without
frugalvit. Beside timm's fields, ``config.json`` has a section "frugalvit" with everything needed to make the same
backbone again and whatever is known about its training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from frugalvit import __version__
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_config import (
    WEIGHT_FILES,
    _architecture,
    _checked_crop,
    _checked_labels,
    _read_config,
    file_in,
    model_config,
)
from frugalvit.backbones.weights.timm_config import timm_state_dict
from frugalvit.errors import UserError
from frugalvit.utils.files import make_folder, write_atomically, write_text

if TYPE_CHECKING:
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
        keywords["keep_patch_size"] = True
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


def _own_tensors(backbone: Backbone) -> dict[str, Tensor]:
    """The model's tensors on the CPU, each in memory of its own, as safetensors wants them."""
    return {name: tensor.cpu().contiguous().clone() for name, tensor in timm_state_dict(backbone).items()}
