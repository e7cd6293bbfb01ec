"""Write config.json of a model folder, and read from it the network of the folder's weights.

timm builds and loads the network from the same file: ``timm.create_model("local-dir:…")``. If a standard timm network
computes the same as ours (our Swin, if square windows divide every map), the config names that network, and the folder
needs only timm. Otherwise the config names our network, and the user also needs ``import frugalvit``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from torch import Tensor, nn

from frugalvit import __version__
from frugalvit.backbones.architectures.swin import VARIANTS, SwinTransformer
from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS, Backbone
from frugalvit.backbones.factory import build_meta, to_size
from frugalvit.backbones.small_images import accepts
from frugalvit.backbones.timm_features import classifier_name
from frugalvit.errors import UserError
from frugalvit.utils.files import check_stored, read_json

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""Names of the weights file in a model folder: ours, timm's and the hub's."""

TIMM_SWIN = "swin_tiny_patch4_window7_224"
"""Its LayerNorm eps is 1e-5; if ours is 1e-6, outputs differ by a relative 1e-5."""

# Keywords of create_backbone that the constructors of our and of timm's networks do not have.
_STEM = ("stem_stride", "stem")
_NOT_FOR_OURS = (*BACKBONE_ONLY_KWARGS, *_STEM)
_NOT_FOR_TIMM = (*_NOT_FOR_OURS, "padding", "norm_eps")


_Side = Annotated[int, pydantic.Field(ge=1, le=20_000)]
_Count = Annotated[int, pydantic.Field(ge=0, le=10_000_000)]
_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]


def _check_sizes(keywords: dict[str, Any]) -> dict[str, Any]:
    """Refuse sizes beyond every network: building one of a million layers would never end."""
    for name, value in keywords.items():
        numbers = [] if name in ("mean", "std") else list(_numbers(value))  # those of 16-bit pixels are large
        if any(abs(number) > 20_000 for number in numbers) or ("depth" in name and sum(numbers) > 1000):
            raise ValueError(f"{name} is too large")
    return keywords


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value


_Keywords = Annotated[dict[str, Any], pydantic.AfterValidator(_check_sizes)]


class _Checked(pydantic.BaseModel):
    """The fields of config.json that are read, with their types; other fields may hold anything."""

    model_config = pydantic.ConfigDict(strict=True)


class _StoredPreprocessing(_Checked):
    input_size: Annotated[list[_Side], pydantic.Field(min_length=3, max_length=3)] | None = None
    num_classes: _Count | None = None
    mean: list[_Number] | None = None
    std: list[Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]] | None = None
    crop_pct: Annotated[float, pydantic.Field(gt=0.01, le=1)] | None = None
    interpolation: str | None = None
    crop_mode: Literal["center", "squash"] | None = None


class _StoredBackbone(_Checked):
    name: str
    keywords: _Keywords
    num_classes: _Count
    in_chans: _Side
    img_size: _Side | Annotated[list[_Side], pydantic.Field(min_length=2, max_length=2)]
    meta: dict[str, Any] = {}


class _StoredConfig(_Checked):
    num_classes: _Count | None = None
    model_args: _Keywords | None = None
    pretrained_cfg: _StoredPreprocessing
    frugalvit: _StoredBackbone | None = None


def weights_in(path: Path) -> Path:
    """Return the weights file of a run or model folder; any other path is returned unchanged."""
    return weights_file(path / "model") or weights_file(path) or path


def weights_file(folder: Path) -> Path | None:
    return next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)


def model_config(
    backbone: Backbone, classes: Sequence[str] | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of ``config.json``: timm's fields, then ours."""
    meta = dict(meta or {})
    architecture, arguments = timm_architecture(backbone)
    labels = {"label_names": list(classes)} if classes else {}
    crop = backbone.eval_crop
    first_convolution = (getattr(backbone.model, "pretrained_cfg", None) or {}).get("first_conv")
    pretrained_cfg = {
        "num_classes": backbone.num_classes,
        "input_size": [backbone.in_chans, *backbone.img_size],
        "pool_size": list(backbone.grid_size(backbone.img_size)),
        "fixed_input_size": "img_size" in arguments,
        "interpolation": crop["interpolation"],
        "crop_pct": crop["crop_pct"],
        "crop_mode": "squash" if crop["squash"] else "center",
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        # With a name here, timm would convert the stored weights from three channels again.
        "first_conv": first_convolution if backbone.in_chans == 3 else None,
        "classifier": classifier_name(backbone.model),
    }
    return {
        "architecture": architecture,
        "num_classes": backbone.num_classes,
        "num_features": backbone.pooled_dim,
        # timm reads num_classes from pretrained_cfg. transformers' TimmWrapper passes it too and fails on a second one.
        "model_args": {key: value for key, value in arguments.items() if key != "num_classes"},
        "pretrained_cfg": pretrained_cfg | labels,
        **labels,
        "frugalvit": {"version": __version__, **backbone.spec(), "meta": meta},
    }


def find_model_folder(path: str | Path) -> Path | None:
    """Return the model folder: ``path/model`` of a run, or ``path`` itself; None without config.json."""
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
    """As ``find_model_folder``, but also for the path of a weights file in the folder."""
    path = Path(path)
    return find_model_folder(path.parent if path.name in WEIGHT_FILES else path)


def saved_network(folder: Path) -> nn.Module | None:
    """Return the network of a folder's weights on the meta device: it has the shapes of their tables.

    Returns None without a config.json of ours or timm's; the weights are then loaded without it.
    """
    try:
        name, keywords = read_architecture(read_config(folder), folder)
        return build_meta(name, **{"num_classes": 0, "in_chans": 3} | keywords)
    except UserError:
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder, ours or timm's."""
    path = folder / "config.json"
    config = read_json(path, dict)
    if config is None:
        raise UserError(f"{folder} contains no model (no config.json).")
    if not isinstance(config.get("architecture"), str):
        raise UserError(f"{path} has no 'architecture'; it was not written by frugalvit or timm.")
    config["pretrained_cfg"] = config.get("pretrained_cfg") or {}
    check_stored(_StoredConfig, config, path)
    return config


def read_labels(config: dict[str, Any]) -> list[str] | None:
    labels = config.get("label_names") or config["pretrained_cfg"].get("label_names")
    return [str(label) for label in labels] if isinstance(labels, list) else None


def read_architecture(config: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the model's name and the keywords of ``create_backbone``."""
    ours = config.get("frugalvit")
    if ours:
        name, keywords = ours["name"], dict(ours["keywords"])
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
    if refused := sorted(keywords.keys() & {"name", "pretrained"}):  # of create_backbone, not of a network
        raise UserError(f"{folder / 'config.json'} has the keyword {refused[0]!r}, which no network has: remove it.")
    return name, keywords


def timm_state_dict(backbone: Backbone) -> dict[str, Tensor]:
    """Return the network's weights under the names that timm's loader expects.

    These are the network's names with one exception. timm treats a Swin without classifier as Microsoft's file, which
    numbers patch merging one stage earlier, and renames it. So such a file must have Microsoft's numbers.
    """
    model = backbone.model
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    is_swin = isinstance(model, SwinTransformer) or type(model).__module__ == "timm.models.swin_transformer"
    if "head.fc.weight" in state or not is_swin:
        return state
    renamed = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) - 1)
        renamed[".".join(parts)] = tensor
    return renamed


def timm_architecture(backbone: Backbone) -> tuple[str, dict[str, Any]]:
    """Return the name and the keywords with which ``timm.create_model`` builds the network."""
    common = {"num_classes": backbone.num_classes, "in_chans": backbone.in_chans}
    stem = {key: backbone.keywords[key] for key in _STEM if key in backbone.keywords}
    if isinstance(backbone.model, SwinTransformer) and not stem and _equals_timm(backbone, backbone.model):
        shape, window = VARIANTS[backbone.architecture]
        shape = {**shape, "window_size": window, **backbone.keywords}
        shape = {key: value for key, value in shape.items() if key not in (*_NOT_FOR_TIMM, "drop_path_rate")}
        return TIMM_SWIN, {**shape, **common, "img_size": list(backbone.img_size)}
    if backbone.is_grid_model:
        ours = {key: value for key, value in backbone.keywords.items() if key not in _NOT_FOR_OURS}
        ours |= {**common, "img_size": list(backbone.img_size)}
        return _with_stem(backbone.architecture, ours, stem)
    arguments = {key: value for key, value in backbone.keywords.items() if key not in _NOT_FOR_TIMM} | common
    if accepts(backbone.model, "img_size"):
        arguments["img_size"] = list(backbone.img_size)
    return _with_stem(backbone.architecture.split(".")[0], arguments, stem)


def _with_stem(architecture: str, arguments: dict[str, Any], stem: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if stem:
        return "frugalvit_small_stem", {"architecture": architecture, **stem, **arguments}
    return architecture, arguments


def _equals_timm(backbone: Backbone, model: SwinTransformer) -> bool:
    """Whether timm's Swin computes the same: square windows divide every map, so that nothing is padded."""
    for stage, layer in enumerate(model.layers):
        (rows, columns), step = layer.blocks[0].attn.window_size, model.patch_size * 2**stage  # type: ignore
        height, width = (-(-side // step) for side in backbone.img_size)
        if rows != columns or height % rows or width % columns:
            return False
    padded = any(side % model.patch_size for side in backbone.img_size)
    return not padded and backbone.architecture in VARIANTS
