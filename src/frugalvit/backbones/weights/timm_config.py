"""config.json fields with which timm builds and loads a backbone: ``timm.create_model("local-dir:…")``.

If a standard timm network computes the same as ours (our Swin, if windows divide every map), the config names that
network, and the folder needs only timm. A forward pass with the actual weights compares them. Otherwise the config
names our network, and the receiver also needs ``import frugalvit``. Networks with non-square windows always do: timm's
loader resamples their tables of relative positions as if the windows were square.
"""

import contextlib
from typing import Any

import timm
import torch
from torch import Tensor, nn

from frugalvit.backbones.architectures.swin import SwinTransformer
from frugalvit.backbones.base import BACKBONE_ONLY_KWARGS, Backbone
from frugalvit.backbones.small_images import accepts

TIMM_SWIN = "swin_tiny_patch4_window7_224"
TOLERANCE = 1e-4
"""Our LayerNorm eps may be 1e-6 while timm's Swin has 1e-5: outputs differ by about 1e-5, relatively."""

# Keywords of create_backbone that timm's constructor does not have.
_NOT_FOR_OURS = (*BACKBONE_ONLY_KWARGS, "stem_stride")
_NOT_FOR_TIMM = (*_NOT_FOR_OURS, "padding", "norm_eps")


def timm_config(backbone: Backbone) -> dict[str, Any]:
    """Return {"architecture", "num_classes", "num_features", "model_args", "pretrained_cfg"} as JSON values."""
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
        # timm reads num_classes from pretrained_cfg. transformers' TimmWrapper passes it too and fails on a second one.
        "model_args": {key: value for key, value in arguments.items() if key != "num_classes"},
        "pretrained_cfg": pretrained_cfg,
    }


def timm_state_dict(backbone: Backbone) -> dict[str, Tensor]:
    """Return the network's weights under the names that timm's loader expects.

    These are the network's names with one exception: timm takes a Swin without classifier for Microsoft's file, which
    numbers patch merging one stage earlier, and renames it. So such a file must be numbered like Microsoft's.
    """
    model = backbone.model
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    is_ours = isinstance(model, SwinTransformer)
    is_timm = type(model).__module__ == "timm.models.swin_transformer"
    if "head.fc.weight" in state or not (is_ours or (is_timm and not _has_oblong_windows(model))):
        return state
    renamed = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) - 1)
        renamed[".".join(parts)] = tensor
    return renamed


def _architecture(backbone: Backbone) -> tuple[str, dict[str, Any]]:
    common = {"num_classes": backbone.num_classes, "in_chans": backbone.in_chans}
    if isinstance(backbone.model, SwinTransformer):
        return _swin_architecture(backbone, backbone.model, common)
    if backbone.is_grid_model:
        ours = {key: value for key, value in backbone.keywords.items() if key not in _NOT_FOR_OURS}
        return backbone.architecture, {**ours, **common, "img_size": list(backbone.img_size)}
    arguments = {key: value for key, value in backbone.keywords.items() if key not in _NOT_FOR_TIMM} | common
    if accepts(backbone.model, "img_size"):
        arguments["img_size"] = list(backbone.img_size)
    architecture = backbone.architecture.split(".")[0]
    if "stem_stride" in backbone.keywords:
        stem = {"architecture": architecture, "stem_stride": backbone.keywords["stem_stride"]}
        return "frugalvit_small_stem", {**stem, **arguments}
    if _has_oblong_windows(backbone.model):
        return "frugalvit_raw_weights", {"architecture": architecture, **arguments}
    return architecture, arguments


def _has_oblong_windows(model: nn.Module) -> bool:
    windows = (getattr(module, "window_size", None) for module in model.modules())
    return any(isinstance(window, tuple) and window[0] != window[1] for window in windows)


def _swin_architecture(
    backbone: Backbone, model: SwinTransformer, common: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    shape = {**common, "img_size": list(backbone.img_size), **model.shape()}
    timm_shape = {key: value for key, value in shape.items() if key not in ("padding", "norm_eps")}
    # Our Swin pads an image to its patch, timm's cannot.
    patch_exceeds_image = min(backbone.img_size) < model.shape()["patch_size"]
    if not patch_exceeds_image and not _has_oblong_windows(model) and _is_equal(backbone, TIMM_SWIN, timm_shape):
        return TIMM_SWIN, timm_shape
    return backbone.architecture, shape


def _is_equal(backbone: Backbone, architecture: str, arguments: dict[str, Any]) -> bool:
    """Whether timm's network with our weights gives our output for a random image, in float32 even under autocast."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image = torch.randn(1, backbone.in_chans, *backbone.img_size, dtype=torch.float32, device="cpu")
        other = timm.create_model(architecture, **arguments).float().eval()
    state = {name: tensor.detach().float().cpu() for name, tensor in backbone.model.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in other.state_dict().items()}
    if {name: tensor.shape for name, tensor in state.items()} != shapes:
        return False
    other.load_state_dict(state)
    parameter = next(backbone.model.parameters())
    training = backbone.model.training
    backbone.model.eval()
    try:
        with torch.no_grad(), contextlib.ExitStack() as exact:
            for kind in {"cpu", parameter.device.type}:
                exact.enter_context(torch.autocast(kind, enabled=False))
            ours = backbone.model(image.to(parameter.device, parameter.dtype)).float().cpu()
            return bool(torch.allclose(ours, other(image), rtol=TOLERANCE, atol=TOLERANCE))
    finally:
        backbone.model.train(training)
