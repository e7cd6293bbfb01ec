"""Mixup, cutmix and soft targets.

One blend per step, as in timm's batch mode: with λ ~ Beta(α, α),

    mixup:   x_i ← λ·x_i + (1-λ)·x_j                 cutmix:   a box of area 1-λ of x_i is taken from x_j
    y_i ← λ·smooth(y_i) + (1-λ)·smooth(y_j)          smooth(y) = (1-ε)·onehot(y) + ε/K

The partner of image i is its neighbour j = i^1. So the pairs stay within any even slice of a batch, and two processes
with half a batch each compute the same as one. In an odd batch the partner of the last image is the first.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.data import MixingConfig


class Blend(NamedTuple):
    """The mix of one step: the share λ of the image itself, and cutmix's box or None."""

    share: float
    box: tuple[int, int, int, int] | None = None  # top, bottom, left, right


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Turn class numbers (B,) into smoothed distributions (B, K).

    Of several labels (B, K) -1 = unknown becomes NaN, which mixing keeps. Numbers (B, 1) stay.
    """
    if labels.ndim == 2:
        return labels if labels.is_floating_point() else labels.float().masked_fill(labels < 0, torch.nan)
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


def partners(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the neighbour that each image is mixed with: (count,)."""
    neighbour = torch.arange(count, device=device) ^ 1
    return neighbour % count if count else neighbour  # the last image of an odd batch wraps to the first


class Mixing:
    """Mixup and cutmix on a batch of normalized images.

    ``experiment/resolve.py`` resolves prob "auto" for a run; otherwise "auto" is 1.

    >>> mixing = Mixing(MixingConfig(), classes=100)
    >>> mixed, targets = mixing(images, labels, generator)     # does not change ``images``
    """

    def __init__(self, config: MixingConfig, classes: int) -> None:
        self.config, self.classes = config, classes
        self.prob = 1.0 if config.prob == "auto" else config.prob
        self.smoothing = config.label_smoothing()

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.apply(images, labels, self.draw((images.shape[-2], images.shape[-1]), generator))

    def draw(self, size: tuple[int, int], generator: torch.Generator) -> Blend:
        """Draw the blend of one step for images of (height, width)."""
        config = self.config
        rng = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
        applied, switch, row, column = rng.random(4)
        if applied >= self.prob or (config.mixup == 0 and config.cutmix == 0):
            return Blend(1.0)
        if config.cutmix == 0 or (config.mixup > 0 and switch >= config.switch_prob):
            return Blend(float(rng.beta(config.mixup, config.mixup)))
        height, width = size
        side = math.sqrt(1 - rng.beta(config.cutmix, config.cutmix))
        tall, wide = int(height * side), int(width * side)
        middle_row, middle_column = int(row * height), int(column * width)
        top, bottom = max(middle_row - tall // 2, 0), min(middle_row + (tall + 1) // 2, height)
        left, right = max(middle_column - wide // 2, 0), min(middle_column + (wide + 1) // 2, width)
        share = 1 - (bottom - top) * (right - left) / (height * width)  # the border may have cut the box
        return Blend(share, (top, bottom, left, right))

    def apply(self, images: Tensor, labels: Tensor, blend: Blend) -> tuple[Tensor, Tensor]:
        """Mix images and labels (B,); return images (a new tensor if mixed) and targets (B, K)."""
        targets = soft_targets(labels, self.classes, self.smoothing)
        if blend.share == 1:
            return images, targets
        partner = partners(len(images), images.device)
        return mix_images(images, blend), torch.lerp(targets[partner], targets, blend.share)


def mix_images(images: Tensor, blend: Blend) -> Tensor:
    """Mix each image with its partner; return a new tensor if something is mixed."""
    if blend.share == 1:
        return images
    partner = partners(len(images), images.device)
    if blend.box is None:
        return torch.lerp(images[partner], images, blend.share)
    top, bottom, left, right = blend.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right][partner]
    return mixed
