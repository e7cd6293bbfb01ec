"""Feature maps at several resolutions from any backbone.

A backbone with stages (Swin, CvT, ResNet, …) gives one map per stage, normalized over channels as in Swin's detection
and segmentation. The single map of a plain ViT becomes four (Li et al. 2022, "Exploring plain vision transformer
backbones for object detection", §3): upsampled four times and twice by transposed convolutions, unchanged, and halved.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from frugalvit.backbones import Backbone
from frugalvit.backbones.architectures.common import MapNorm
from frugalvit.backbones.timm_features import eval_no_grad


class Pyramid(nn.Module):
    """images (B, 3, H, W) -> maps (B, ``channels[i]``, H / ``strides[i]``, W / ``strides[i]``), fine to coarse."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        sizes = _shapes(backbone)
        self.plain = len(sizes) == 1
        self.channels = [width for width, _ in sizes]
        self.strides = _strides(sizes)
        self.steps = nn.ModuleList()
        if self.plain:
            width = sizes[0][0]
            self.steps = nn.ModuleList(
                [_upsample(width, 2), _upsample(width, 1), nn.Identity(), nn.MaxPool2d(2, ceil_mode=True)]
            )
            self.channels = [width // 4, width // 2, width, width]
        self.norms = nn.ModuleList(MapNorm(width) for width in self.channels)
        freeze_unused(backbone)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.backbone.stages(images)
        if self.plain:
            maps = [step(maps[0]) for step in self.steps]
        return [norm(grid) for norm, grid in zip(self.norms, maps, strict=True)]


class FeaturePyramid(nn.Module):
    """Feature pyramid network: equal channels on every level, top-down sums, one coarser level on top."""

    def __init__(self, pyramid: Pyramid, channels: int) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.fpn = FeaturePyramidNetwork(pyramid.channels, channels, extra_blocks=LastLevelMaxPool())
        self.strides = with_top(pyramid.strides)
        self.names = [str(level) for level in range(len(pyramid.strides))]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict(zip(self.names, self.pyramid(images), strict=True)))


def with_top(strides: list[float]) -> list[float]:
    """Return a pyramid's strides and that of the coarser level that detectors add."""
    return [*strides, strides[-1] * 2]


def pyramid_strides(backbone: Backbone) -> list[float]:
    """Return the strides that a :class:`Pyramid` of this backbone has, without building one."""
    return _strides(_shapes(backbone))


def _strides(sizes: list[tuple[int, float]]) -> list[float]:
    """Return the strides of the levels from (channels, stride) of the stages. One stage makes four levels."""
    strides = [stride for _, stride in sizes]
    return [strides[0] * factor for factor in (0.25, 0.5, 1, 2)] if len(strides) == 1 else strides


def _upsample(width: int, times: int) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(times):
        layers.append(nn.ConvTranspose2d(width >> number, width >> number + 1, 2, stride=2))
        if number + 1 < times:
            layers += [MapNorm(width >> number + 1), nn.GELU()]
    return nn.Sequential(*layers)


def _shapes(backbone: Backbone) -> list[tuple[int, float]]:
    """Measure (channels, stride) of every stage with one blank image."""
    side = _probe_side(backbone)
    with eval_no_grad(backbone):
        maps = backbone.stages(torch.zeros(1, backbone.in_chans, side, side))
    known = [entry["reduction"] for entry in getattr(backbone.model, "feature_info", None) or []]
    return [(grid.shape[1], _stride(side, grid.shape[2], known)) for grid in maps]


def _stride(side: int, cells: int, known: list[int]) -> float:
    """Return the known stride nearest to side / cells; side / cells if none is near.

    The quotient alone is wrong if the last cell extends past the edge, as with patches of 12 pixels, or if convolutions
    without padding lose their borders.
    """

    def distance(stride: float) -> float:
        return abs(math.log2(side / cells / stride))

    nearest = min(known, key=distance, default=side / cells)
    return float(nearest if distance(nearest) <= 0.5 else side / cells)


def _probe_side(backbone: Backbone) -> int:
    """Return an image side that reaches every stage and costs little."""
    return max(128, min(224, min(backbone.img_size) // 32 * 32))


def freeze_unused(backbone: Backbone) -> None:
    """Freeze what no stage uses (classifier, final norm): distributed training would wait for its gradients forever."""
    was_training = backbone.training
    backbone.eval()
    with torch.enable_grad():
        images = torch.zeros(1, backbone.in_chans, _probe_side(backbone), _probe_side(backbone))
        sum(grid.float().sum() for grid in backbone.stages(images)).backward()  # type: ignore[union-attr]
    for parameter in backbone.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
        parameter.grad = None
    backbone.train(was_training)
