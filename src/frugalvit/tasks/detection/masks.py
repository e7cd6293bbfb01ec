"""Masks of boxes: small grids that a head learns from masks of pictures, and that are laid into pictures again.

Both ways a box is a rectangle in the plane, not a set of pixels: pixel i covers i to i + 1, and its centre is i + 1/2.
torchvision takes i itself for the centre of what is learnt, which moves it by half a pixel, and rounds the corners of
boxes where it draws, which makes masks up to two pixels wider than their boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import roi_align


def mask_loss(
    logits: Tensor, regions: Sequence[Tensor], owners: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]
) -> Tensor:
    """He et al. 2017, §3: the mean binary cross-entropy of the masks of the regions' classes.

    logits (R, classes + 1, m, m) of all images' regions (r, 4), whose objects are ``owners`` (r,) in ``targets``; each
    of these has a mask (see ``on_masks``).
    """
    if not len(logits):  # a mean of nothing is undefined
        return logits.sum() * 0
    labels = torch.cat([target["labels"][owner] for target, owner in zip(targets, owners, strict=True)])
    wanted = torch.cat(
        [
            cut_masks(target["masks"], _places(target, owner), region, logits.shape[-1])
            for target, owner, region in zip(targets, owners, regions, strict=True)
        ]
    )
    places = torch.arange(len(labels), device=labels.device)
    return F.binary_cross_entropy_with_logits(logits[places, labels], wanted)


def on_masks(
    regions: Sequence[Tensor], owners: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Of the regions (r, 4) and their objects (r,) those whose object has a mask: the others teach boxes alone.

    They are left out before the mask head, so that they cost it nothing, and the mean is over masks that are known.
    """
    if "mask_of" not in targets[0]:
        return list(regions), list(owners)
    known = [_places(target, owner) >= 0 for target, owner in zip(targets, owners, strict=True)]
    counts = torch.stack([part.sum() for part in known]).tolist()
    places = torch.where(torch.cat(known))[0]
    return tuple(list(torch.cat(list(part))[places].split(counts)) for part in (regions, owners))  # type: ignore[return-value]


def _places(target: dict[str, Tensor], owners: Tensor) -> Tensor:
    """Where among an image's masks those of these objects are, -1 for none."""
    return target["mask_of"][owners] if "mask_of" in target else owners


def cut_masks(masks: Tensor, owners: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Of the masks (n, H, W) that ``owners`` (r,) names what lies in the boxes (r, 4): (r, side, side) from 0 to 1."""
    placed = torch.cat([owners[:, None].to(boxes), boxes], 1)
    return roi_align(masks[:, None].to(boxes), placed, (side, side), aligned=True)[:, 0]


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks (n, 1, m, m) of boxes (n, 4) in a picture of this (height, width) -> (n, *size), whether they hold it.

    A pixel is inside where the mask, interpolated at the pixel's centre between its cells' centres and zeros around
    them, is at least a half; that is never so outside the box. Bilinear interpolation is two matrix products,
    Wy · mask · Wxᵀ, for the pixels in one box at a time.
    """
    whole = masks.new_zeros((len(masks), *size), dtype=torch.bool)
    with torch.autocast(masks.device.type, enabled=False):
        for place, (left, top, right, bottom) in enumerate(boxes.tolist()):
            rows, columns = _centres_in(top, bottom, size[0]), _centres_in(left, right, size[1])
            if rows and columns:
                down = _weights(rows, top, bottom, masks)
                across = _weights(columns, left, right, masks)
                inside = down @ masks[place, 0].float() @ across.T >= 0.5
                whole[place, rows.start : rows.stop, columns.start : columns.stop] = inside
    return whole


def _centres_in(low: float, high: float, side: int) -> range:
    """The pixels whose centres lie between two places."""
    return range(max(0, math.ceil(low - 0.5)), min(side, math.floor(high - 0.5) + 1))


def _weights(pixels: range, low: float, high: float, masks: Tensor) -> Tensor:
    """(pixels, cells): how much of each cell of a mask from ``low`` to ``high`` a pixel's centre sees."""
    cells = torch.arange(masks.shape[-1], device=masks.device)
    centres = torch.arange(pixels.start, pixels.stop, device=masks.device) + 0.5
    places = (centres - low) / max(high - low, 1e-6) * len(cells) - 0.5
    return (1 - (places[:, None] - cells).abs()).clamp(min=0)
