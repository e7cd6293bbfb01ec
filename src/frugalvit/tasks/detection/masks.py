"""Masks of boxes: crop training masks to small grids, and paste predicted grids into images.

A box is a rectangle in the plane: pixel i covers i to i + 1, and its centre is i + 1/2. torchvision differs twice. It
uses i as the centre of a target, which shifts the target by half a pixel. It rounds box corners when it pastes, which
makes masks up to two pixels wider than their boxes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import roi_align


def mask_loss(
    logits: Tensor, regions: Sequence[Tensor], owners: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]
) -> Tensor:
    """Return the mean binary cross-entropy of the masks of the regions' classes (He et al. 2017, §3).

    logits:  (R, classes + 1, m, m) of the regions of all images
    regions: (r, 4) per image
    owners:  (r,) per image, the index of each region's object
    """
    if not len(logits):  # the mean of an empty tensor is NaN
        return logits.sum() * 0
    labels = torch.cat([target["labels"][owner] for target, owner in zip(targets, owners, strict=True)])
    wanted = torch.cat(
        [
            crop_masks(target["masks"], owner, region, logits.shape[-1])
            for target, owner, region in zip(targets, owners, regions, strict=True)
        ]
    )
    rows = torch.arange(len(labels), device=labels.device)
    return F.binary_cross_entropy_with_logits(logits[rows, labels], wanted)


def crop_masks(masks: Tensor, owners: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Crop masks (n, H, W) with indices ``owners`` (r,) to boxes (r, 4): (r, side, side) from 0 to 1."""
    indexed = torch.cat([owners[:, None].to(boxes), boxes], 1)
    return roi_align(masks[:, None].to(boxes), indexed, (side, side), aligned=True)[:, 0]


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks (n, 1, m, m) of boxes (n, 4) into an image of this (height, width): bool (n, *size).

    A pixel is inside if its centre is in the box and the mask there is at least 0.5. The mask is interpolated
    bilinearly, with zeros around it, by two matrix products, Wy · mask · Wxᵀ, for one box at a time.
    """
    pasted = masks.new_zeros((len(masks), *size), dtype=torch.bool)
    with torch.autocast(masks.device.type, enabled=False):
        for index, (left, top, right, bottom) in enumerate(boxes.tolist()):
            rows, columns = _centres_in(top, bottom, size[0]), _centres_in(left, right, size[1])
            if rows and columns:
                down = _weights(rows, top, bottom, masks)
                across = _weights(columns, left, right, masks)
                inside = down @ masks[index, 0].float() @ across.T >= 0.5
                pasted[index, rows.start : rows.stop, columns.start : columns.stop] = inside
    return pasted


def _centres_in(low: float, high: float, side: int) -> range:
    """Return the pixels whose centres are between ``low`` and ``high``."""
    return range(max(0, math.ceil(low - 0.5)), min(side, math.floor(high - 0.5) + 1))


def _weights(pixels: range, low: float, high: float, masks: Tensor) -> Tensor:
    """Return the bilinear weights (pixels, cells) of a mask that extends from ``low`` to ``high``."""
    cells = torch.arange(masks.shape[-1], device=masks.device)
    centres = torch.arange(pixels.start, pixels.stop, device=masks.device) + 0.5
    positions = (centres - low) / max(high - low, 1e-6) * len(cells) - 0.5
    return (1 - (positions[:, None] - cells).abs()).clamp(min=0)
