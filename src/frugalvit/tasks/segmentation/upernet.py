"""UperNet (Xiao et al. 2018, "Unified perceptual parsing for scene understanding") on any of our pyramids.

    the coarsest map, pooled to 1, 2, 3 and 6 cells and back (PPM)  ->  top-down sums (FPN)  ->  all levels fused at the
    finest resolution  ->  classes; an auxiliary FCN on the second coarsest map helps the backbone in training

Norms use batch statistics, as published, or groups of channels (``SegmenterSpec.norm``): few images are too few for
batch statistics.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import Conv2dNormActivation

from frugalvit.backbones.architectures.common import MapNorm
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation.metrics import IGNORED

POOLED = (1, 2, 3, 6)
_MAX_PROBABILITIES = 2**26  # probabilities in memory at once at an image's full resolution: 256 MB


@dataclass(frozen=True)
class SegmenterSpec:
    """All sizes of a segmenter: enough to build it again."""

    classes: int
    channels: int = 512
    dropout: float = 0.1
    auxiliary: float = 0.4
    norm: Literal["batch", "group"] = "group"

    def convolve(self, inputs: int, outputs: int, kernel: int, single: bool = False) -> nn.Module:
        """Return convolution, norm, ReLU. Groups have 16 channels; with ``single`` all channels of a cell are one."""

        def group_norm(width: int) -> nn.Module:
            return MapNorm(width) if single else nn.GroupNorm(math.gcd(max(1, width // 16), width), width)

        norm = nn.BatchNorm2d if self.norm == "batch" else group_norm
        return Conv2dNormActivation(inputs, outputs, kernel, norm_layer=norm)


class PyramidPooling(nn.Module):
    """Add means over the image, its halves, thirds and sixths to each cell: C -> ``channels`` channels."""

    def __init__(self, inputs: int, spec: SegmenterSpec) -> None:
        super().__init__()
        self.views = nn.ModuleList(spec.convolve(inputs, spec.channels, 1, single=True) for _ in POOLED)
        self.fuse = spec.convolve(inputs + len(POOLED) * spec.channels, spec.channels, 3)

    def forward(self, grid: Tensor) -> Tensor:
        size = (grid.shape[2], grid.shape[3])
        views = [view(F.adaptive_avg_pool2d(grid, cells)) for view, cells in zip(self.views, POOLED, strict=True)]
        return self.fuse(torch.cat([grid, *(_resized(view, size) for view in views)], 1))


class Segmenter(nn.Module):
    """images (B, 3, H, W) -> logits (B, classes, h, w) at the finest map's resolution."""

    def __init__(self, pyramid: Pyramid, spec: SegmenterSpec) -> None:
        super().__init__()
        self.pyramid, self.spec = pyramid, spec
        *finer, coarsest = pyramid.channels
        width = spec.channels
        self.pooling = PyramidPooling(coarsest, spec)
        self.lateral = nn.ModuleList(spec.convolve(inputs, width, 1) for inputs in finer)
        self.smooth = nn.ModuleList(spec.convolve(width, width, 3) for _ in finer)
        self.fuse = spec.convolve(width * len(pyramid.channels), width, 3)
        self.classify = nn.Sequential(nn.Dropout2d(spec.dropout), nn.Conv2d(width, spec.classes, 1))
        self.helper: nn.Module | None = None
        if spec.auxiliary > 0 and finer:
            narrow = max(8, width // 2)
            self.helper = nn.Sequential(
                spec.convolve(finer[-1], narrow, 3), nn.Dropout2d(spec.dropout), nn.Conv2d(narrow, spec.classes, 1)
            )

    def forward(self, images: Tensor) -> Tensor:
        return self._decode(self.pyramid(images))

    def losses(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropy of both heads; ``labels`` (B, H, W)."""
        maps = self.pyramid(images)
        strides = self.pyramid.strides
        losses = {"loss_main": pixel_loss(self._decode(maps), labels, strides[0])}
        if self.helper is not None:
            losses["loss_auxiliary"] = self.spec.auxiliary * pixel_loss(self.helper(maps[-2]), labels, strides[-2])
        return losses

    def _decode(self, maps: Sequence[Tensor]) -> Tensor:
        *finer, coarsest = maps
        *strides, stride = self.pyramid.strides
        level = self.pooling(coarsest)
        levels = [(level, stride)]
        for grid, lateral, smooth, own in reversed(list(zip(finer, self.lateral, self.smooth, strides, strict=True))):
            level = lateral(grid) + _to_scale(level, stride / own, (grid.shape[2], grid.shape[3]))
            stride = own
            levels.append((smooth(level), stride))
        size = (level.shape[2], level.shape[3])
        return self.classify(self.fuse(torch.cat([_to_scale(part, own / stride, size) for part, own in levels], 1)))


def pixel_loss(logits: Tensor, labels: Tensor, stride: float) -> Tensor:
    """Return the cross-entropy at full resolution, sum over counted / all pixels: a batch is the mean of its images."""
    full = _to_scale(logits.float(), stride, (labels.shape[1], labels.shape[2]))
    return F.cross_entropy(full, labels, ignore_index=IGNORED, reduction="sum") / labels.numel()


# -- inference on full images


def probabilities(
    net: Segmenter, images: Tensor, size: tuple[int, int], *, window: int = 0, flip: bool = False
) -> Tensor:
    """Return class probabilities (B, classes, *size) of normalized images. ``window`` 0 uses the full image."""
    probability = _slide(net, images, window).softmax(1)
    if flip:
        probability += _slide(net, images.flip(3), window).softmax(1).flip(3)
        probability /= 2
    return _resized(probability, size)


def most_probable(views: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Return the class (H, W) with the largest sum over views (classes, h, w) of one image.

    Full-resolution probabilities are computed for a few classes at a time: all 150 of a 12-megapixel photograph would
    take 7 GB.
    """
    chunk = max(1, _MAX_PROBABILITIES // math.prod(size))
    classes = most = None
    for start in range(0, len(views[0]), chunk):
        parts = (_resized(view[None, start : start + chunk], size)[0] for view in views)
        values, indices = sum(parts, 0.0).max(0)  # type: ignore[union-attr]
        if classes is None or most is None:
            classes, most = indices, values
            continue
        larger = values > most
        classes = torch.where(larger, indices + start, classes)
        most = torch.where(larger, values, most)
    assert classes is not None
    return classes


def _slide(net: Segmenter, images: Tensor, window: int) -> Tensor:
    """Return the mean logits (B, classes, H, W) of overlapping windows."""
    height, width = images.shape[2], images.shape[3]
    if not window or (height <= window and width <= window):
        return _to_scale(net(images).float(), net.pyramid.strides[0], (height, width))
    total = images.new_zeros((len(images), net.spec.classes, height, width), dtype=torch.float32)
    counts = images.new_zeros((1, 1, height, width), dtype=torch.float32)
    for top in window_starts(height, window):
        for left in window_starts(width, window):
            part = images[:, :, top : top + window, left : left + window]
            region = (..., slice(top, top + window), slice(left, left + window))
            total[region] += _to_scale(net(part).float(), net.pyramid.strides[0], (part.shape[2], part.shape[3]))
            counts[region] += 1
    total /= counts
    return total


def window_starts(length: int, window: int) -> list[int]:
    """Return the starts of windows along a side, at most two thirds of a window apart. The last ends at the edge."""
    last = max(0, length - window)
    count = math.ceil(last / max(1, window * 2 // 3)) + 1
    return sorted({round(last * number / max(1, count - 1)) for number in range(count)})


def _to_scale(grid: Tensor, stride: float, size: tuple[int, int]) -> Tensor:
    """Resize a map to the finer ``size``: each of its cells becomes ``stride`` × ``stride`` cells.

    A map starts where the image does, but may end elsewhere, because image sides need not be multiples of the stride.
    Stretching it to the image would shift it by half a cell or more. So a last cell that extends past the edge is cut,
    and the last cell is repeated if the network dropped a remainder. If convolutions without padding lost a wider
    border on both sides, the map is stretched.
    """
    for axis, length in zip((2, 3), size, strict=True):
        cells = grid.shape[axis]
        if round(cells * stride) < length < (cells + 1) * stride:
            grid = torch.cat([grid, grid.narrow(axis, cells - 1, 1)], axis)
    height, width = (max(length, round(cells * stride)) for cells, length in zip(grid.shape[2:], size, strict=True))
    return _resized(grid, (height, width))[:, :, : size[0], : size[1]]


def _resized(grid: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(grid.shape[2:]) == tuple(size):
        return grid
    return F.interpolate(grid, size=size, mode="bilinear", align_corners=False)
