"""UperNet (Xiao et al. 2018, "Unified perceptual parsing for scene understanding") on any of our pyramids.

    the coarsest map, pooled to 1, 2, 3 and 6 cells and back (PPM)  ->  top-down sums (FPN)  ->  all levels fused at the
    finest resolution  ->  classes; a small FCN on the second coarsest map helps the backbone while training

segmentation-models-pytorch has a UperNet, for encoders of its own kind that take the input's stride-2 map and fixed
channel lists; ours would need a wrapper as long as the network itself, and everybody one more dependency.
Norms are over groups of channels: batches of two images are too small for batch statistics, and two processes with half
the batch each equal one with the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frugalvit.backbones.architectures.common import MapNorm
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.metrics import IGNORED

POOLED = (1, 2, 3, 6)
_AT_ONCE = 2**26
"""Probabilities made at once at an image's own resolution: 256 MB."""


@dataclass(frozen=True)
class SegmenterSpec:
    """All sizes of a segmenter: what it takes to build the same one again."""

    classes: int
    channels: int = 512
    dropout: float = 0.1
    auxiliary: float = 0.4


class ConvNorm(nn.Sequential):
    """Convolution, norm, ReLU. The norm is over groups of 16 channels, or of ``single`` places over all channels."""

    def __init__(self, inputs: int, outputs: int, kernel: int, single: bool = False) -> None:
        norm = MapNorm(outputs) if single else nn.GroupNorm(math.gcd(max(1, outputs // 16), outputs), outputs)
        convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        super().__init__(convolution, norm, nn.ReLU(inplace=True))


class PyramidPooling(nn.Module):
    """What is in the whole picture, its halves, thirds and sixths, beside each place: C -> ``channels`` channels."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.views = nn.ModuleList(ConvNorm(inputs, channels, 1, single=True) for _ in POOLED)
        self.fuse = ConvNorm(inputs + len(POOLED) * channels, channels, 3)

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
        self.pooling = PyramidPooling(coarsest, width)
        self.lateral = nn.ModuleList(ConvNorm(inputs, width, 1) for inputs in finer)
        self.smooth = nn.ModuleList(ConvNorm(width, width, 3) for _ in finer)
        self.fuse = ConvNorm(width * len(pyramid.channels), width, 3)
        self.classify = nn.Sequential(nn.Dropout2d(spec.dropout), nn.Conv2d(width, spec.classes, 1))
        self.helper: nn.Module | None = None
        if spec.auxiliary > 0 and finer:
            narrow = max(8, width // 2)
            self.helper = nn.Sequential(
                ConvNorm(finer[-1], narrow, 3), nn.Dropout2d(spec.dropout), nn.Conv2d(narrow, spec.classes, 1)
            )

    def forward(self, images: Tensor) -> Tensor:
        return self._decode(self.pyramid(images))

    def losses(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of both heads; ``labels`` (B, H, W)."""
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
    """Cross-entropy at full resolution; ignored pixels add nothing, and the mean is over all pixels.

    So a batch's loss is the mean of its images' losses, however many of their pixels count.
    """
    full = _to_scale(logits.float(), stride, (labels.shape[1], labels.shape[2]))
    return F.cross_entropy(full, labels, ignore_index=IGNORED, reduction="sum") / labels.numel()


# -- looking at whole images


def probabilities(
    net: Segmenter, images: Tensor, size: tuple[int, int], *, window: int = 0, flip: bool = False
) -> Tensor:
    """Class probabilities (B, classes, *size) of normalised images, in one look or by a sliding window."""
    chances = _slide(net, images, window).softmax(1)
    if flip:
        chances += _slide(net, images.flip(3), window).softmax(1).flip(3)
        chances /= 2
    return _resized(chances, size)


def most_probable(views: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """The class (H, W) with the largest sum over views of one image, each of them (classes, h, w) of any resolution.

    Probabilities at the image's own resolution are made of some classes at a time: all 150 of a photograph of 12
    megapixels would take 7 GB.
    """
    together = max(1, _AT_ONCE // math.prod(size))
    classes = most = None
    for start in range(0, len(views[0]), together):
        parts = (_resized(view[None, start : start + together], size)[0] for view in views)
        values, places = sum(parts, 0.0).max(0)  # type: ignore[union-attr]
        if classes is None or most is None:
            classes, most = places, values
            continue
        larger = values > most
        classes = torch.where(larger, places + start, classes)
        most = torch.where(larger, values, most)
    assert classes is not None
    return classes


def _slide(net: Segmenter, images: Tensor, window: int) -> Tensor:
    """Mean logits (B, classes, H, W) of windows two thirds of their side apart; the last ones end with the image."""
    height, width = images.shape[2], images.shape[3]
    if not window or (height <= window and width <= window):
        return _to_scale(net(images).float(), net.pyramid.strides[0], (height, width))
    total = images.new_zeros((len(images), net.spec.classes, height, width), dtype=torch.float32)
    seen = images.new_zeros((1, 1, height, width), dtype=torch.float32)
    for top in window_starts(height, window):
        for left in window_starts(width, window):
            part = images[:, :, top : top + window, left : left + window]
            place = (..., slice(top, top + window), slice(left, left + window))
            total[place] += _to_scale(net(part).float(), net.pyramid.strides[0], (part.shape[2], part.shape[3]))
            seen[place] += 1
    total /= seen
    return total


def window_starts(length: int, window: int) -> list[int]:
    """Where windows begin along one side: at most two thirds of a window apart, the last one flush with the end."""
    last = max(0, length - window)
    count = math.ceil(last / max(1, window * 2 // 3)) + 1
    return sorted({round(last * number / max(1, count - 1)) for number in range(count)})


def _to_scale(grid: Tensor, stride: float, size: tuple[int, int]) -> Tensor:
    """A map at a finer resolution, that of an image or of another map; ``stride`` finer cells for each of its own.

    Maps begin where the image does, but may not end there: an image need not be a multiple of the cells. Stretched to
    its length, they would lie beside what they saw, by half a cell and more. So cells that hang over the edge, as the
    last patch of a ViT may, are cut there, and where a network leaves a remainder out, the last cell goes on. A border
    wider than that was lost on both sides, by convolutions without padding, and the map is stretched over it.
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
