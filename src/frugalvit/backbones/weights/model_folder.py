"""A model as a folder with ``model.safetensors`` and ``config.json``, as timm and the hub use it.

``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads it, without frugalvit if the architecture is timm's.
Besides timm's fields, ``config.json`` has a section "frugalvit" that describes the backbone and its training.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes

from frugalvit import __version__
from frugalvit.backbones.base import Backbone
from frugalvit.backbones.factory import build_meta, create_backbone
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_config import (
    WEIGHT_FILES,
    model_config,
    read_architecture,
    read_config,
    read_labels,
    timm_state_dict,
    weights_file,
)
from frugalvit.backbones.weights.published import crop_settings
from frugalvit.errors import UserError
from frugalvit.utils.files import make_folder, write_atomically, write_text


def save_model_folder(
    backbone: Backbone,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write the backbone, with its classifier, as a folder. Each file is written atomically.

    classes: names of the classifier's outputs, in order
    meta:    JSON values about the training (data, recipe, scores); ``load_model_folder`` returns them
    """
    if classes is not None and backbone.num_classes and len(classes) != backbone.num_classes:
        raise UserError(f"{len(classes)} class names do not fit a classifier of {backbone.num_classes} classes.")
    folder = make_folder(Path(folder))
    metadata = {"format": "pt", "frugalvit": __version__}
    # safetensors needs each tensor in its own memory.
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in timm_state_dict(backbone).items()}
    content = _sort_metadata(safetensors_bytes(tensors, metadata=metadata))
    write_atomically(folder / "model.safetensors", lambda handle: handle.write(content))
    write_text(folder / "config.json", json.dumps(model_config(backbone, classes, meta), indent=2, ensure_ascii=False))
    return folder


def _sort_metadata(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file, because the library writes them in a random order.

    A file consists of the header's length (eight bytes), the JSON header and the tensors.
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
    """Load the backbone, in eval mode, and the metadata of a folder of ours, of timm or of the hub.

    At another ``img_size`` the network keeps its patches, windows and strides; its ``notes`` warn about a small grid.
    The metadata are "classes" (names or None) and the values saved as ``meta``.
    """
    folder = Path(folder)
    config = read_config(folder)
    weights = weights_file(folder)
    if weights is None:
        raise UserError(f"{folder} has no weights ({WEIGHT_FILES[0]}); ONNX and pt2 programs cannot be loaded.")
    name, keywords = read_architecture(config, folder)
    described = sum(parameter.numel() for parameter in build_meta(name, **keywords).parameters())
    if described > weights.stat().st_size:
        raise UserError(
            f"{folder / 'config.json'} describes a network of {described:,} parameters, but {weights.name} has only "
            f"{weights.stat().st_size:,} bytes. It is damaged, or of another architecture."
        )
    if img_size is not None:
        keywords["img_size"] = img_size
    pretrained = config["pretrained_cfg"]
    statistics = {key: pretrained[key] for key in ("mean", "std") if pretrained.get(key)}
    if {len(values) for values in statistics.values()} == {keywords["in_chans"]}:
        keywords |= statistics
    keywords |= {"keep_patch_size": True, "eval_crop": crop_settings(pretrained)}
    backbone = create_backbone(name, **keywords)
    classes = read_labels(config)
    if classes is not None and backbone.num_classes and len(classes) != backbone.num_classes:
        raise UserError(
            f"{folder / 'config.json'} has {len(classes)} label_names for a classifier of {backbone.num_classes} "
            "classes; list one per class, or remove them."
        )
    report = load_weights(backbone, weights)
    if report.missing:
        notes = f" ({'; '.join(report.notes)})" if report.notes else ""
        raise UserError(
            f"{weights} does not fit '{name}' at {backbone.img_size[0]}x{backbone.img_size[1]} pixels: "
            f"{len(report.missing)} tensors are missing, such as {report.missing[0]}{notes}."
        )
    meta = {**(config.get("frugalvit") or {}).get("meta", {}), "classes": classes}
    return backbone.eval(), meta
