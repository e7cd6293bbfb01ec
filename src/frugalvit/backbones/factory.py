"""``create_backbone``: build a Backbone by name, ours or any timm network with a final grid."""

import math
import numbers
import re
from collections.abc import Sequence
from typing import Any

import timm
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS, Backbone, default_crop
from frugalvit.backbones.conv_stem import set_conv_stem
from frugalvit.backbones.knn_head import KnnHead
from frugalvit.backbones.registry import architecture_keywords, get_architecture, get_family
from frugalvit.backbones.small_images import adapt, format_keywords, note_small_grid, set_stem_stride
from frugalvit.backbones.timm_features import Size, build_on_meta, classifier_name
from frugalvit.backbones.weights.published import crop_settings, read_published
from frugalvit.errors import UserError, to_count
from frugalvit.utils.text import short_message

# Tried with every network, and dropped if it lacks the keyword. With them one object takes every image size.
_FLEXIBLE = {"dynamic_img_size": True, "strict_img_size": False}

# Keywords that every network is tried with; the network itself refuses those it does not have.
_COMMON = {"num_classes", "in_chans", "img_size", "drop_path_rate", *_FLEXIBLE}


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
    eval_crop: dict[str, Any] | None = None,
    pixel_type: str = "uint8",
    keep_patch_size: bool = False,
    knn_head: dict[str, Any] | None = None,
    **keywords: Any,
) -> Backbone:
    """Create a network by name, ready for images of any size.

    name        a name of ``frugalvit list models`` or of timm (a tag such as ``.augreg_in1k`` selects its weights)
    img_size    pixels, or (height, width): the size the network is built for; it takes other sizes too
    num_classes 0 for no classifier
    grid_norm   False returns the tokens before the final norm as grid (the released Drloc's Swin)
    drop_path   the rate of stochastic depth; None keeps the network's default
    mean, std   of the pixels; None for ImageNet's, or for those of the pretrained weights
    eval_crop   ``{"crop_pct": 0.9, "interpolation": "bicubic", "squash": False}``; None: the weights' or the size's
    pixel_type  uint8 for photos; float32 for images that keep the values of their files (with mean and std)
    keep_patch_size  True keeps patches, windows and strides (for trained weights); False may make them smaller
    knn_head    a k-NN classifier instead of a linear one: ``{"images": 100, "k": 20, "temperature": 0.07}``
    keywords    go to the network: ``embed_dim=24``, ``patch_size=2``, ``padding="zeros"`` … ``stem_stride=1`` sets the
                stride of the stem of a convolutional network, ``stem="conv"`` makes convolutions of its patches
    """
    size = to_size(img_size)
    num_classes, in_chans = to_count("num_classes", num_classes, 0), to_count("in_chans", in_chans)
    keywords = {key: value for key, value in keywords.items() if value is not None}
    # drop_path_rate is timm's name. In the keywords it would override the drop_path of a teacher.
    rate = keywords.pop("drop_path_rate", None)
    if rate is not None and drop_path not in (None, rate):
        raise UserError(f"drop_path={drop_path!r} and drop_path_rate={rate!r} are the same option: use one of them")
    drop_path = rate if drop_path is None else drop_path
    if drop_path is not None and not (isinstance(drop_path, int | float) and 0 <= drop_path < 1):
        raise UserError(f"drop_path={drop_path!r} is not a rate; use a number from 0 to below 1, or None")
    architecture = get_architecture(name)
    fixed: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    if drop_path is not None:
        fixed["drop_path_rate"] = drop_path

    def build(extra: dict[str, Any], *, device: str = "meta", weights: bool = False) -> nn.Module:
        def make() -> nn.Module:
            return build_timm(name, architecture, {**fixed, **keywords, **extra}, size, weights)

        if device == "meta":
            return build_on_meta(make)
        with torch.device(device):
            return make()

    with torch.random.fork_rng(devices=[]):  # trial builds may draw weights: final weights depend only on the seed
        extra, notes = adapt(name, size, keywords, build)
        resolved = {**keywords, **extra}
        if keep_patch_size and extra:
            resolved = {**keywords, "keep_patch_size": True}
            extra, notes = {}, note_small_grid(name, size, build)
    model = build(extra, device="cpu", weights=pretrained)
    pixel_mean, pixel_std = _resolve_statistics(model, in_chans, pretrained, mean, std)
    if (pixel_mean, pixel_std) != _default_statistics(in_chans):
        resolved |= {"mean": list(pixel_mean), "std": list(pixel_std)}
    if pretrained and eval_crop is None:
        eval_crop = crop_settings(getattr(model, "pretrained_cfg", None) or {})
    if unknown := sorted(set(eval_crop or ()) - set(default_crop(size))):
        raise UserError(f"eval_crop has no {unknown[0]!r}; use {', '.join(default_crop(size))}")
    if eval_crop and default_crop(size) | eval_crop != default_crop(size):
        resolved["eval_crop"] = eval_crop
    if pixel_type != "uint8":
        if pixel_type != "float32" or mean is None or std is None:
            raise UserError(f"pixel_type={pixel_type!r}: use uint8, or float32 with mean and std")
        resolved["pixel_type"] = pixel_type
    chosen = {"grid_norm": None if grid_norm else False, "drop_path": drop_path, "knn_head": knn_head}
    resolved |= {key: value for key, value in chosen.items() if value is not None}
    if knn_head is not None:
        _set_knn_head(model, num_classes, **knn_head)
    return Backbone(
        model,
        name=name,
        architecture=architecture,
        family=get_family(model),
        img_size=size,
        in_chans=in_chans,
        num_classes=num_classes,
        keywords={key: _to_json(value) for key, value in resolved.items()},
        mean=pixel_mean,
        std=pixel_std,
        pixel_type=pixel_type,
        grid_norm=grid_norm,
        notes=notes,
    )


def _set_knn_head(model: nn.Module, classes: int, images: int, k: int, temperature: float) -> None:
    name = classifier_name(model)
    linear = None if name is None else model.get_submodule(name)
    if name is None or not isinstance(linear, nn.Linear):
        raise UserError(f"{type(model).__name__} has no single linear classifier, which a k-NN classifier replaces.")
    model.set_submodule(name, KnnHead(images, linear.in_features, classes, k, temperature))


def from_spec(spec: dict[str, Any], **changes: Any) -> Backbone:
    """Create the network of ``Backbone.spec`` with new weights; ``changes`` override its options."""
    options = {key: spec[key] for key in ("img_size", "num_classes", "in_chans")}
    return create_backbone(spec["name"], **options | spec["keywords"] | changes)


def build_meta(name: str, img_size: int | Sequence[int], num_classes: int, in_chans: int, **keywords: Any) -> nn.Module:
    """Build the network of a backbone's ``spec()`` on the meta device: shapes without weights."""
    architecture, size = get_architecture(name), to_size(img_size)
    shape = {key: value for key, value in keywords.items() if key not in BACKBONE_ONLY_KWARGS}
    shape |= {"num_classes": num_classes, "in_chans": in_chans}
    return build_on_meta(lambda: build_timm(name, architecture, shape, size))


def build_timm(
    name: str, architecture: str, keywords: dict[str, Any], img_size: Size, pretrained: bool = False
) -> nn.Module:
    """Call timm.create_model with the size options that the network accepts. Errors become UserError.

    A model folder may come from a stranger: only keywords that shape the network reach timm, none that loads.
    """
    keywords = dict(keywords)
    stem_stride, stem = keywords.pop("stem_stride", None), keywords.pop("stem", "patch")
    if stem not in ("patch", "conv") or (stem == "conv" and pretrained):
        wrong = (
            "needs random weights: published ones have patches" if stem == "conv" else "is unknown: use patch or conv"
        )
        raise UserError(f"stem={stem} {wrong}")
    allowed = _COMMON | architecture_keywords(architecture)
    if "architecture" in keywords and "architecture" in allowed:  # the network inside frugalvit_small_stem
        allowed |= architecture_keywords(get_architecture(keywords["architecture"]))
    if refused := sorted(set(keywords) - allowed):
        raise UserError(_unknown_keyword(name, refused[0]))
    weights: dict[str, Any] = {"pretrained_cfg_overlay": {"state_dict": read_published(name)}} if pretrained else {}
    square = img_size[0] == img_size[1]  # some networks take only one number
    optional: dict[str, Any] = {"img_size": img_size[0] if square else img_size, **_FLEXIBLE}
    optional = {key: value for key, value in optional.items() if key not in keywords}
    while True:
        try:
            model = timm.create_model(architecture, pretrained=pretrained, **keywords, **optional, **weights)
            break
        except UserError:
            raise
        except Exception as error:
            unknown = _unexpected_keywords(str(error)) if isinstance(error, TypeError) else []
            if not optional.keys().isdisjoint(unknown):
                optional = {key: value for key, value in optional.items() if key not in unknown}
                continue
            if wrong := [keyword for keyword in keywords if keyword in unknown]:
                raise UserError(_unknown_keyword(name, wrong[0])) from error
            if pretrained:
                raise UserError(f"The published weights of {name} do not fit: {short_message(error)}.") from error
            options = format_keywords({**keywords, "img_size": img_size})
            raise UserError(f"{name} cannot be built with {options}: {short_message(error)}") from error
    if stem_stride is not None:
        set_stem_stride(model, to_count("stem_stride", stem_stride))
    if stem == "conv":
        set_conv_stem(model)
    return model


def to_size(img_size: int | Sequence[int]) -> Size:
    """Return (height, width) from a number of pixels or a pair."""
    try:
        pair: Any = img_size if hasattr(img_size, "__len__") else (img_size, img_size)
        height, width = (to_count("img_size", side) for side in pair)
    except (TypeError, ValueError, UserError):
        raise UserError(f"img_size={img_size!r} is not a size; use pixels, or (height, width)") from None
    return height, width


def _default_statistics(in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ImageNet's mean and std for 3 channels, their average for 1, else 0.5 and 0.25."""
    if in_chans == 3:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if in_chans == 1:
        return (round(sum(IMAGENET_DEFAULT_MEAN) / 3, 4),), (round(sum(IMAGENET_DEFAULT_STD) / 3, 4),)
    return (0.5,) * in_chans, (0.25,) * in_chans


def _resolve_statistics(
    model: nn.Module, in_chans: int, pretrained: bool, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std: the caller's, else those of the pretrained weights, else the defaults."""
    default_mean, default_std = _default_statistics(in_chans)
    configuration = getattr(model, "pretrained_cfg", None) or {}
    if pretrained and in_chans == 3 and configuration.get("mean"):
        default_mean, default_std = tuple(configuration["mean"]), tuple(configuration["std"])
    result = tuple(mean) if mean is not None else default_mean, tuple(std) if std is not None else default_std
    for option, values in zip(("mean", "std"), result, strict=True):
        if len(values) != in_chans:
            raise UserError(f"{option} has {len(values)} numbers for {in_chans} channels; use one per channel")
        if not all(isinstance(value, numbers.Real) and math.isfinite(value) for value in values):
            raise UserError(f"{option}={values!r:.40}: use one finite number per channel")
    return result


def _unexpected_keywords(message: str) -> list[str]:
    """Return the keywords that a TypeError names: Python names one, timm may name a list."""
    named = re.search(r"unexpected keyword argument(?:\(s\): \[(.*)\]| ('\w+'))", message)
    return re.findall(r"'(\w+)'", named[1] or named[2]) if named else []


def _unknown_keyword(name: str, keyword: str) -> str:
    if keyword == "drop_path_rate":
        return f"{name} has no stochastic depth; leave drop_path out"
    return f"{name} has no keyword {keyword!r}; see its class in timm or frugalvit.backbones.architectures"


def _to_json(value: Any) -> Any:
    return [_to_json(item) for item in value] if isinstance(value, tuple | list) else value
