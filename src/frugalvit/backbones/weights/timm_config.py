"""What a config.json must say so that timm alone builds and loads a backbone: ``timm.create_model("local-dir:…")``.

A network of our own that a stock timm network equals (our Swin, where windows divide every map) is described as that
network, so that whoever receives the folder needs timm only. Equality is not assumed but computed, with the weights at
hand. Otherwise the name under which we register it is written, and the receiver needs ``import frugalvit`` too. So it
is where timm's loader would not take the weights: its tables of relative positions are those of square windows, and an
oblong image makes oblong ones.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import timm
import torch
from torch import Tensor, nn

from frugalvit.backbones.architectures.swin import SwinTransformer
from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS
from frugalvit.backbones.small_images import accepts
from frugalvit.backbones.weights.resample import quiet_tables

if TYPE_CHECKING:
    from frugalvit.backbones.base import Backbone

STOCK_SWIN = "swin_tiny_patch4_window7_224"
TOLERANCE = 1e-4
"""Ours may have LayerNorm eps 1e-6, timm's Swin is fixed to 1e-5: the outputs differ by about 1e-5 of their size."""

# What create_backbone takes for itself or asks only to be flexible; timm's constructor must not see it.
_NOT_FOR_OURS = (*BACKBONE_ONLY_KWARGS, "stem_stride")
_NOT_FOR_TIMM = (*_NOT_FOR_OURS, "padding", "norm_eps")


def timm_config(backbone: Backbone) -> dict[str, Any]:
    """{"architecture", "num_classes", "num_features", "model_args", "pretrained_cfg"}, plain values throughout."""
    architecture, arguments = _architecture(backbone)
    source = getattr(backbone.model, "pretrained_cfg", None) or {}
    pretrained_cfg: dict[str, Any] = {
        "num_classes": backbone.num_classes,
        "input_size": [backbone.in_chans, *backbone.img_size],
        "pool_size": list(backbone.grid_size(backbone.img_size)),
        "fixed_input_size": "img_size" in arguments,
        "interpolation": source.get("interpolation", "bicubic"),
        "crop_pct": source.get("crop_pct", 0.875),
        "crop_mode": "center",
        "mean": list(backbone.mean),
        "std": list(backbone.std),
    }
    for key in ("first_conv", "classifier"):
        if source.get(key):
            pretrained_cfg[key] = source[key]
    return {
        "architecture": architecture,
        "num_classes": backbone.num_classes,
        "num_features": backbone.pooled_dim,
        # The number of classes stands above and in pretrained_cfg, where timm finds it; transformers' TimmWrapper
        # passes its own, and would stumble over a second one here.
        "model_args": {key: value for key, value in arguments.items() if key != "num_classes"},
        "pretrained_cfg": pretrained_cfg,
    }


def timm_state_dict(backbone: Backbone) -> dict[str, Tensor]:
    """The network's weights under the names timm's loader expects.

    They are the network's own names but for one case: timm takes a Swin without classifier for Microsoft's file, in
    which the merging of a stage is numbered one stage earlier, and renames it. Such a file must be numbered so.
    """
    state = {name: tensor.detach() for name, tensor in backbone.model.state_dict().items()}
    if "head.fc.weight" in state or not _loaded_as_swin(backbone) or _spoilt_by_loader(backbone.model):
        return state
    renamed = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) - 1)
        renamed[".".join(parts)] = tensor
    return renamed


def _loaded_as_swin(backbone: Backbone) -> bool:
    kind = type(backbone.model)
    return isinstance(backbone.model, SwinTransformer) or kind.__module__ == "timm.models.swin_transformer"


def _architecture(backbone: Backbone) -> tuple[str, dict[str, Any]]:
    common = {"num_classes": backbone.num_classes, "in_chans": backbone.in_chans}
    if isinstance(backbone.model, SwinTransformer):
        return _swin_architecture(backbone, backbone.model, common)
    given = {key: value for key, value in backbone.keywords.items() if key not in _NOT_FOR_TIMM}
    if backbone.is_grid_model:
        own = {key: value for key, value in backbone.keywords.items() if key not in _NOT_FOR_OURS}
        return backbone.architecture, {**own, **common, "img_size": list(backbone.img_size)}
    arguments = {**given, **common}
    if accepts(backbone.model, "img_size"):
        arguments["img_size"] = list(backbone.img_size)
    architecture = backbone.architecture.split(".")[0]
    if "stem_stride" in backbone.keywords:
        stem = {"architecture": architecture, "stem_stride": backbone.keywords["stem_stride"]}
        return "frugalvit_small_stem", {**stem, **arguments}
    if _spoilt_by_loader(backbone.model):
        return "frugalvit_raw_weights", {"architecture": architecture, **arguments}
    return architecture, arguments


def _spoilt_by_loader(model: nn.Module) -> bool:
    """Whether timm's filter for a network changes or refuses its own tables, as some do for oblong windows."""
    theirs = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    tables = {
        name: table for name, table in model.state_dict().items() if name.endswith("relative_position_bias_table")
    }
    if theirs is None or not _oblong_windows(model):
        return False
    try:
        with quiet_tables():
            loaded = theirs(dict(tables), model)
    except RuntimeError:
        return True
    return any(not torch.equal(loaded[name], table) for name, table in tables.items())


def _oblong_windows(model: nn.Module) -> bool:
    windows = (getattr(module, "window_size", None) for module in model.modules())
    return any(isinstance(window, tuple) and window[0] != window[1] for window in windows)


def _swin_architecture(
    backbone: Backbone, model: SwinTransformer, common: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    shape = {**common, "img_size": list(backbone.img_size), **model.shape()}
    stock = {key: value for key, value in shape.items() if key not in ("padding", "norm_eps")}
    # Ours pads an image to its patch, timm's cannot.
    patch_exceeds_image = min(backbone.img_size) < model.shape()["patch_size"]
    if not patch_exceeds_image and not _oblong_windows(model) and _computes_the_same(backbone, STOCK_SWIN, stock):
        return STOCK_SWIN, stock
    return backbone.architecture, shape


def _computes_the_same(backbone: Backbone, architecture: str, arguments: dict[str, Any]) -> bool:
    """Whether timm's network, given our weights, gives our output for a random image: in float32, whatever the caller
    computes in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image = torch.randn(1, backbone.in_chans, *backbone.img_size, dtype=torch.float32, device="cpu")
        stock = timm.create_model(architecture, **arguments).float().eval()
    state = {name: tensor.detach().float().cpu() for name, tensor in backbone.model.state_dict().items()}
    theirs = stock.state_dict()
    if state.keys() != theirs.keys() or any(state[name].shape != theirs[name].shape for name in state):
        return False
    stock.load_state_dict(state)
    parameter = next(backbone.model.parameters())
    training = backbone.model.training
    backbone.model.eval()
    try:
        with torch.no_grad(), contextlib.ExitStack() as exact:
            for kind in {"cpu", parameter.device.type}:
                exact.enter_context(torch.autocast(kind, enabled=False))
            ours = backbone.model(image.to(parameter.device, parameter.dtype)).float().cpu()
            return bool(torch.allclose(ours, stock(image), rtol=TOLERANCE, atol=TOLERANCE))
    finally:
        backbone.model.train(training)
