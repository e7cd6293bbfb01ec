"""Names of networks: ours and timm's, one registry for both.

Our networks are registered with timm, so ``timm.create_model`` builds them too. A new one needs its module in the
import below and its name in :data:`MODEL_NAMES`.
"""

import fnmatch
import inspect
import sys
from dataclasses import dataclass, is_dataclass
from typing import Any

import timm
from timm.models import build_model_with_cfg, get_deprecated_models, is_model, model_entrypoint, register_model
from torch import nn

from frugalvit.backbones.architectures import cvt, cvt_windowed, hybrid, swin, t2t, vil  # noqa: F401  registers them
from frugalvit.backbones.base import GridModel
from frugalvit.backbones.conv_stem import set_conv_stem
from frugalvit.backbones.small_images import final_grid, set_stem_stride
from frugalvit.backbones.timm_features import Size, build_on_meta, reduction
from frugalvit.errors import UserError, did_you_mean

_OURS = ("cvt_tiny_w7", "vil_tiny_w7", "hybrid_nano", "hybrid_tiny", "hybrid_small", "cvt_13", "t2t_vit_14")
MODEL_NAMES = {name: name for name in (*swin.VARIANTS, *_OURS)} | {
    "deit_small": "deit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "resnet50": "resnet50",
}
"""The names used in the papers, each with its name in timm's registry."""

_FAMILIES = {
    "vision_transformer": "vit",
    "deit": "vit",
    "swin_transformer": "swin",
    "swin_transformer_v2": "swinv2",
    "swin_transformer_v2_cr": "swinv2",
    "maxxvit": "maxvit",
}


@dataclass(frozen=True)
class ModelInfo:
    """One line of ``frugalvit list models``. ``grid`` is the final grid at ``img_size``; None without a grid."""

    name: str
    family: str
    params: int
    grid: Size | None
    img_size: Size
    source: str


def list_models(pattern: str = "") -> list[ModelInfo]:
    """List the papers' networks; with a ``pattern`` (part of a name, or with * and ?) timm's networks too."""
    wildcard = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = [name for name in MODEL_NAMES if fnmatch.fnmatch(name, wildcard)]
    if pattern:
        ours = {*MODEL_NAMES, "frugalvit_small_stem"}
        names += [name for name in timm.list_models(wildcard) if name not in ours]
    return [describe_model(name) for name in names]


def describe_model(name: str) -> ModelInfo:
    """Return parameters (without classifier), family and final grid of a network, without allocating it."""
    architecture = get_architecture(name)
    model = build_on_meta(lambda: timm.create_model(architecture, num_classes=0))
    configuration: Any = model.pretrained_cfg
    size: Size = tuple(configuration["input_size"][-2:])
    if isinstance(model, GridModel):  # no forward pass: their feature_info states the exact reduction
        step = reduction(model) or 1
        grid: Size = (-(-size[0] // step), -(-size[1] // step))
    else:
        grid = final_grid(model, size)
    return ModelInfo(
        name=name,
        family=get_family(model),
        params=sum(parameter.numel() for parameter in model.parameters()),
        grid=grid if min(grid) else None,
        img_size=size,
        source="frugalvit" if isinstance(model, GridModel) else "timm",
    )


def get_architecture(name: str) -> str:
    """Return timm's name of a network, including a weights tag such as ``.augreg_in1k``."""
    if not isinstance(name, str):
        raise UserError(
            f"the name of a network must be a string, not {type(name).__name__}. See: frugalvit list models"
        )
    if not is_model_name(name):
        raise UserError(f"network {name!r} is unknown.{suggest_names(name)} See: frugalvit list models")
    return MODEL_NAMES.get(name, name)


def is_model_name(name: str) -> bool:
    return name in MODEL_NAMES or (is_model(name.split(".")[0]) and not set(name) & set("/\\:"))


def architecture_keywords(architecture: str) -> set[str]:
    """Return the keywords that shape a network: those of its function, and of the classes in its file.

    The keywords with which timm loads weights, opens files or reaches a hub are not among them.
    """
    name = architecture.partition(".")[0]
    function = model_entrypoint((get_deprecated_models().get(name) or name).partition(".")[0])
    classes = {part for part in vars(sys.modules[function.__module__]).values() if isinstance(part, type)}
    shapes = [part for part in classes if issubclass(part, nn.Module) or is_dataclass(part)]
    loaders = (timm.create_model, build_model_with_cfg)
    allowed, refused = (
        {name for part in parts for name in inspect.signature(part).parameters}
        for parts in ([function, *shapes], loaders)
    )
    return allowed - refused


def suggest_names(name: str) -> str:
    """Return `` Did you mean …?`` with up to three similar names, or an empty string."""
    return did_you_mean(name, [*MODEL_NAMES, *timm.list_models()], 3)


def get_family(model: nn.Module) -> str:
    """Return the family of a network ("swin", "vit", "resnet" …), which selects its default options."""
    if isinstance(model, GridModel):
        return model.family
    module = type(model).__module__.rsplit(".", 1)[-1]
    return _FAMILIES.get(module, module)


@register_model
def frugalvit_small_stem(
    pretrained: bool = False,
    architecture: str = "resnet50",
    stem_stride: int | None = None,
    stem: str = "patch",
    **keywords: Any,
) -> nn.Module:
    """A timm network with another stem. Exported folders use this name, so that timm can build it."""
    model = timm.create_model(get_architecture(architecture), pretrained=pretrained, **keywords)
    if stem_stride is not None:
        set_stem_stride(model, stem_stride)
    if stem == "conv":
        set_conv_stem(model)
    return model
