"""``create_backbone``: a name to a Backbone, for our own networks and every timm network with a final grid."""

from __future__ import annotations

import fnmatch
import inspect
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import is_model, load_pretrained, register_model
from torch import nn

from frugalvit.backbones.architectures import cvt, cvt_windowed, swin, t2t, vil  # noqa: F401  importing registers them with timm
from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS, Backbone, GridModel
from frugalvit.backbones.published import check_within_reach, first_line, why
from frugalvit.backbones.small_images import Build, adapt, final_grid, kept_shape, set_stem_stride
from frugalvit.backbones.timm_features import Size, reduction
from frugalvit.errors import UserError, did_you_mean

OWN = {
    "swin_nano": "swin_nano",
    "swin_mini": "swin_mini",
    "swin_tiny_w7": "swin_tiny_w7",
    "swin_small_w7": "swin_small_w7",
    "swin_base_w7": "swin_base_w7",
    "swin_tiny_w14": "swin_tiny_w14",
    "swin_small_w14": "swin_small_w14",
    "swin_base_w14": "swin_base_w14",
    "cvt_tiny_w7": "cvt_tiny_w7",
    "vil_tiny_w7": "vil_tiny_w7",
    "cvt_13": "cvt_13",
    "t2t_vit_14": "t2t_vit_14",
    "deit_small": "deit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "resnet50": "resnet50",
}
"""The papers' names -> timm's registry, where our own networks are too."""

# Asked of every network and dropped for those that do not know them: they let one object take every image size.
_FLEXIBLE = {"dynamic_img_size": True, "strict_img_size": False}

_FAMILIES = {
    "vision_transformer": "vit",
    "deit": "vit",
    "swin_transformer": "swin",
    "swin_transformer_v2": "swinv2",
    "swin_transformer_v2_cr": "swinv2",
    "maxxvit": "maxvit",
}


def create_backbone(
    name: str,
    img_size: int | Sequence[int] = 224,
    num_classes: int = 0,
    in_chans: int = 3,
    pretrained: bool = False,
    grid_norm: bool = True,
    drop_path: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    keep_patch_size: bool = False,
    **keywords: Any,
) -> Backbone:
    """A network by name, ready for images of any size.

    name        one of :data:`OWN` or any timm name (a tag such as ``.augreg_in1k`` chooses pretrained weights)
    img_size    pixels, or (height, width): what the network is made for; it takes other sizes too
    num_classes 0 for no classifier
    grid_norm   False gives the tokens before the final norm as grid (the released Drloc's Swin)
    drop_path   the rate of stochastic depth; None keeps the network's own
    mean, std   of the pixels; None for ImageNet's, or for those the pretrained weights were made with
    keep_patch_size  True keeps patches, windows and strides as published or given, however small the images: what weights
                that were trained so want. False makes a new network finer where its grid would be too small.
    keywords    reach the network: ``embed_dim=24``, ``patch_size=2``, ``padding="zeros"`` … ``stem_stride=1`` slows the
                stem of a convolutional network
    """
    size = to_size(img_size)
    num_classes, in_chans = _count("num_classes", num_classes, 0), _count("in_chans", in_chans, 1)
    keywords = {key: value for key, value in keywords.items() if value is not None}
    # timm's word for it. Among the keywords it would win over drop_path, and a teacher would have stochastic depth.
    rate = keywords.pop("drop_path_rate", None)
    if rate is not None and drop_path not in (None, rate):
        raise UserError("drop_path and drop_path_rate are the same thing; give drop_path alone")
    drop_path = rate if drop_path is None else drop_path
    if drop_path is not None and not (isinstance(drop_path, int | float) and 0 <= drop_path < 1):
        raise UserError(f"drop_path={drop_path!r} is no rate; give a number from 0 to below 1, or None")
    architecture = architecture_of(name)
    fixed: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    if drop_path is not None:
        fixed["drop_path_rate"] = drop_path

    def build(extra: dict[str, Any], *, device: str = "meta", weights: bool = False) -> nn.Module:
        def make() -> nn.Module:
            return build_timm(name, architecture, {**fixed, **keywords, **extra}, size, weights)

        if device == "meta":
            return on_meta_device(make)
        with torch.device(device):
            return make()

    with torch.random.fork_rng(devices=[]):  # some are tried with weights: those drawn then follow from the seed alone
        if keywords or rate is not None:
            _refuse_unknown(name, keywords if rate is None else {**keywords, "drop_path_rate": rate}, build)
        extra, notes = adapt(name, size, keywords, build)
        resolved = {**keywords, **extra}
        if keep_patch_size and extra:
            resolved = {**keywords, "keep_patch_size": True}
            extra, notes = {}, kept_shape(name, size, build)
    if pretrained:
        check_within_reach(name, getattr(build(extra), "pretrained_cfg", None) or {}, keywords.get("cache_dir"))
    model = build(extra, device="cpu", weights=pretrained)
    pixel_mean, pixel_std = _statistics(model, in_chans, pretrained, mean, std)
    if (pixel_mean, pixel_std) != _default_statistics(in_chans):
        resolved |= {"mean": list(pixel_mean), "std": list(pixel_std)}
    if not grid_norm:
        resolved["grid_norm"] = False
    if drop_path is not None:
        resolved["drop_path"] = drop_path
    return Backbone(
        model,
        name=name,
        architecture=architecture,
        family=_family(model),
        img_size=size,
        in_chans=in_chans,
        num_classes=num_classes,
        keywords={key: _plain(value) for key, value in resolved.items()},
        mean=pixel_mean,
        std=pixel_std,
        grid_norm=grid_norm,
        notes=notes,
    )


def build_meta(name: str, img_size: int | Sequence[int], num_classes: int, in_chans: int, **keywords: Any) -> nn.Module:
    """The network of a backbone's ``spec()`` without its weights, to look at shapes."""
    architecture, size = architecture_of(name), to_size(img_size)
    shape = {key: value for key, value in keywords.items() if key not in BACKBONE_ONLY_KWARGS}
    shape |= {"num_classes": num_classes, "in_chans": in_chans}
    return on_meta_device(lambda: build_timm(name, architecture, shape, size))


def on_meta_device(make: Callable[[], nn.Module]) -> nn.Module:
    """A network without memory for its weights; with it where its construction computes with tensors (RegNet's does)
    and the installed torch cannot do that without values."""
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, UserError) as error:
        if not isinstance(error if isinstance(error, NotImplementedError) else error.__cause__, NotImplementedError):
            raise
        with torch.device("cpu"):
            return make()


def build_timm(
    name: str, architecture: str, keywords: dict[str, Any], img_size: Size, pretrained: bool = False
) -> nn.Module:
    """timm.create_model with the size and flexibility each network can take, and errors for people."""
    keywords = dict(keywords)
    stem_stride = keywords.pop("stem_stride", None)
    square = img_size[0] == img_size[1]  # some networks know square images only
    optional: dict[str, Any] = {"img_size": img_size[0] if square else img_size, **_FLEXIBLE}
    optional = {key: value for key, value in optional.items() if key not in keywords}
    while True:
        try:
            model = timm.create_model(architecture, pretrained=pretrained, **keywords, **optional)
            break
        except UserError:
            raise
        except TypeError as error:
            unknown = _refused_in(str(error))
            if not optional.keys().isdisjoint(unknown):
                optional = {key: value for key, value in optional.items() if key not in unknown}
                continue
            if given := [keyword for keyword in keywords if keyword in unknown]:
                raise UserError(_no_such_keyword(name, given[0], _keywords_in(architecture, str(error)))) from error
            if twice := re.search(r"multiple values for keyword argument '(\w+)'", str(error)):
                raise UserError(f"timm fixes {twice[1]!r} for {name}; leave it out") from error
            raise UserError(f"{name} cannot be built with {_shown(keywords)}: {first_line(error)}") from error
        except Exception as error:
            if pretrained:
                raise UserError(
                    f"pretrained weights of {name} could not be had ({why(error)}); "
                    "check the network, or give a file of weights (--init, load_weights)"
                ) from error
            shown = _shown({**keywords, "img_size": img_size})
            raise UserError(f"{name} cannot be built with {shown}: {first_line(error)}") from error
    if stem_stride is not None:
        set_stem_stride(model, int(stem_stride))
    return model


@register_model
def frugalvit_small_stem(
    pretrained: bool = False, architecture: str = "resnet50", stem_stride: int = 1, **keywords: Any
) -> nn.Module:
    """A timm network with a slower stem (small images): how such a network is found again by ``timm.create_model``."""
    model = timm.create_model(architecture, pretrained=pretrained, **keywords)
    set_stem_stride(model, stem_stride)
    return model


@register_model
def frugalvit_raw_weights(pretrained: bool = False, architecture: str = "resnet50", **keywords: Any) -> nn.Module:
    """A timm network whose weights are loaded as they are, where timm's own loader would spoil or refuse them."""
    model: Any = timm.create_model(architecture, **keywords)
    if pretrained:
        load_pretrained(model, model.pretrained_cfg, num_classes=model.num_classes, in_chans=keywords["in_chans"])
    return model


@dataclass(frozen=True)
class ModelInfo:
    """One line of ``frugalvit list models``. ``grid`` is the final grid at ``img_size``, None where there is none."""

    name: str
    family: str
    params: int
    grid: Size | None
    img_size: Size
    source: str


def list_models(pattern: str = "") -> list[ModelInfo]:
    """Our own names, filtered by ``pattern`` (a part of the name, or with * and ?); with a pattern timm's names too."""
    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = [name for name in OWN if fnmatch.fnmatch(name, wanted)]
    if pattern:
        ours = set(OWN) | {"frugalvit_small_stem", "frugalvit_raw_weights"}
        names += [name for name in timm.list_models(wanted) if name not in ours]
    return [describe(name) for name in names]


def describe(name: str) -> ModelInfo:
    """Parameters (without classifier), family and final grid of a network, without allocating it."""
    architecture = architecture_of(name)
    model = on_meta_device(lambda: timm.create_model(architecture, num_classes=0))
    configuration: Any = model.pretrained_cfg
    size: Size = tuple(configuration["input_size"][-2:])
    if isinstance(model, GridModel):  # ours state their reduction truly; a test holds it
        step = reduction(model) or 1
        grid: Size = (-(-size[0] // step), -(-size[1] // step))
    else:
        grid = final_grid(model, size)
    return ModelInfo(
        name=name,
        family=_family(model),
        params=sum(parameter.numel() for parameter in model.parameters()),
        grid=grid if min(grid) else None,
        img_size=size,
        source="frugalvit" if isinstance(model, GridModel) else "timm",
    )


def architecture_of(name: str) -> str:
    """timm's name of a network, with the tag of its weights where there is one."""
    if not isinstance(name, str):
        raise UserError(f"a network is chosen by its name, not by {type(name).__name__}. See: frugalvit list models")
    if not is_name(name):
        raise UserError(f"no network is named {name!r}.{close_names(name)} See: frugalvit list models")
    return OWN.get(name, name)


def is_name(name: str) -> bool:
    """Whether a network is called so, here or in timm."""
    return name in OWN or (is_model(name.split(".")[0]) and "/" not in name)


def from_spec(spec: dict[str, Any], **changes: Any) -> Backbone:
    """The network that ``Backbone.spec`` describes, with new weights; ``changes`` as ``create_backbone`` takes them."""
    known = {key: spec[key] for key in ("img_size", "num_classes", "in_chans")}
    return create_backbone(spec["name"], **known | spec["keywords"] | changes)


def close_names(name: str) -> str:
    """`` Did you mean …?`` where networks have similar names."""
    return did_you_mean(name, [*OWN, *timm.list_models()], 3)


def _family(model: nn.Module) -> str:
    if isinstance(model, GridModel):
        return model.family
    module = type(model).__module__.rsplit(".", 1)[-1]
    return _FAMILIES.get(module, module)


def to_size(img_size: int | Sequence[int]) -> Size:
    """(height, width) of pixels, or of a pair."""
    try:
        pair: Any = img_size if hasattr(img_size, "__len__") else (img_size, img_size)
        height, width = (_count("img_size", side, 1) for side in pair)
    except (TypeError, ValueError, UserError):
        raise UserError(f"img_size={img_size!r} is not a size; give pixels, or (height, width)") from None
    return height, width


def _count(name: str, value: Any, least: int) -> int:
    """``value`` where it is an integer, numpy's too, and not too small."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < least:
        raise UserError(f"{name}={value!r}: give a whole number, at least {least}")
    return number


def _default_statistics(in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ImageNet's; their average for grey images; the middle of the range for anything else."""
    if in_chans == 3:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if in_chans == 1:
        return (round(sum(IMAGENET_DEFAULT_MEAN) / 3, 4),), (round(sum(IMAGENET_DEFAULT_STD) / 3, 4),)
    return (0.5,) * in_chans, (0.25,) * in_chans


def _statistics(
    model: nn.Module, in_chans: int, pretrained: bool, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    found_mean, found_std = _default_statistics(in_chans)
    configuration = getattr(model, "pretrained_cfg", None) or {}
    if pretrained and in_chans == 3 and configuration.get("mean"):
        found_mean, found_std = tuple(configuration["mean"]), tuple(configuration["std"])
    result = tuple(mean) if mean is not None else found_mean, tuple(std) if std is not None else found_std
    for what, values in zip(("mean", "std"), result, strict=True):
        if len(values) != in_chans:
            raise UserError(f"{what} has {len(values)} numbers for {in_chans} channels; give one for each")
    return result


def _refuse_unknown(name: str, keywords: dict[str, Any], build: Build) -> None:
    """Some timm networks swallow any keyword in silence: ask with one that cannot exist, and check names if so."""
    marker = "keyword_that_does_not_exist"
    try:
        model = build({marker: 1})
    except UserError:
        return  # this network checks its keywords itself
    known = _keywords_of(model)
    for keyword in keywords:
        if keyword not in known:
            raise UserError(_no_such_keyword(name, keyword, known))


def _keywords_of(model: nn.Module) -> set[str]:
    names = {"stem_stride", "global_pool", "drop_rate"}
    for kind in type(model).__mro__:
        if "__init__" in vars(kind):
            names |= set(inspect.signature(kind.__init__).parameters)
    return names - {"self", "args", "kwargs", "keywords"}


def _refused_in(complaint: str) -> list[str]:
    """The keywords a constructor does not know: Python names one, some of timm's own checks a list of them."""
    named = re.search(r"unexpected keyword argument(?:\(s\): \[(.*)\]| ('\w+'))", complaint)
    return re.findall(r"'(\w+)'", named[1] or named[2]) if named else []


def _keywords_in(architecture: str, complaint: str) -> set[str]:
    """The keywords of the class that refused one (``SwinTransformer.__init__() got an unexpected …``)."""
    refusing = complaint.partition(".__init__()")[0]
    module = sys.modules[timm.models.model_entrypoint(architecture.partition(".")[0]).__module__]
    kind = getattr(module, refusing, None)
    return set(inspect.signature(kind).parameters) if inspect.isclass(kind) else set()


def _no_such_keyword(name: str, keyword: str, known: set[str] | None = None) -> str:
    if keyword == "drop_path_rate":
        return f"{name} has no stochastic depth; leave drop_path out"
    return f"{name} has no keyword {keyword!r}.{did_you_mean(keyword, known or set())}"


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _shown(keywords: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in keywords.items()) or "its defaults"


__all__ = ["Backbone", "ModelInfo", "create_backbone", "describe", "list_models"]
