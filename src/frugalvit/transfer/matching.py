"""Which detection has found which object, by their boxes."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.ops import box_convert, box_iou

_LEAST = 0.5
"""The overlap from which on COCO calls a box found."""


def take_objects(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[int, int]:
    """Place of a detection -> place of the object it has found.

    The surest detection first takes the object of its class (``label``) that it overlaps most and nobody has taken.
    """
    if not truth or not found:
        return {}
    guesses, objects = (
        box_convert(torch.tensor([entry["bbox"] for entry in part]).float(), "xywh", "xyxy") for part in (found, truth)
    )
    overlaps = box_iou(guesses, objects).tolist()
    free, taken = set(range(len(truth))), {}
    for place in sorted(range(len(found)), key=lambda place: -found[place]["score"]):
        same = [other for other in free if truth[other]["label"] == found[place]["label"]]
        best = max(same, key=lambda other: overlaps[place][other], default=None)
        if best is not None and overlaps[place][best] >= _LEAST:
            free.remove(best)
            taken[place] = best
    return taken


def agreement(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """F1 of detections against objects."""
    if not truth or not found:
        return 0.0
    return 2 * len(take_objects(truth, found)) / (len(truth) + len(found))
