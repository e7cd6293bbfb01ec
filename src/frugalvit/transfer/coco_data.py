"""A COCO dataset in memory: images with their objects, by split, and what can be learnt from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugalvit.training.used import LeftOut

_ENOUGH_MASKS = 10
"""Objects with a mask from which on masks are learnt unasked, or half of the objects where those are fewer: a smaller
number is rather a slip of whoever drew boxes, and too little to learn outlines from."""


@dataclass
class CocoImage:
    """One image and its objects, as annotated; ``objects`` are cleaned annotations of the JSON file ``truth``."""

    id: Any
    path: Path
    height: int
    width: int
    truth: Path
    objects: list[dict[str, Any]] = field(default_factory=list)

    def learnable(self) -> list[dict[str, Any]]:
        """The objects a detector learns from: everything but crowds."""
        return [entry for entry in self.objects if not entry["iscrowd"]]

    def drawn(self) -> list[dict[str, Any]]:
        """Those of them that have a mask."""
        return [entry for entry in self.learnable() if "segmentation" in entry]


@dataclass
class CocoData:
    """Images by split. Class k = 1, 2, … (0 is the background) stands for ``category_ids[k - 1]``."""

    name: str
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    splits: dict[str, list[CocoImage]]
    notes: list[str]
    bad: list[LeftOut] = field(default_factory=list)

    def class_of(self) -> dict[int, int]:
        return {identity: number for number, identity in enumerate(self.category_ids, 1)}

    def masks(self) -> tuple[int, int]:
        """How many of the objects to learn from have one, and how many there are."""
        images = self.splits.get("train", [])
        return sum(len(image.drawn()) for image in images), sum(len(image.learnable()) for image in images)

    def has_masks(self) -> bool:
        """Whether so many of them do that masks are worth learning."""
        return are_enough(*self.masks())

    def about_masks(self) -> str:
        """Why masks are learnt, or are not."""
        return about_masks(*self.masks())

    def maskless(self) -> tuple[int, ...]:
        """The classes to learn that have no object with a mask."""
        images, classes = self.splits.get("train", []), self.class_of()
        known, drawn = (
            {classes[entry["category_id"]] for image in images for entry in part(image)}
            for part in (CocoImage.learnable, CocoImage.drawn)
        )
        return tuple(sorted(known - drawn))


def are_enough(drawn: int, count: int) -> bool:
    """Whether masks are worth learning, where ``drawn`` of ``count`` training objects have one."""
    return 0 < drawn >= min(_ENOUGH_MASKS, count / 2)


def about_masks(drawn: int, count: int) -> str:
    """Why they are learnt then, or are not."""
    if drawn in (0, count):
        return "every training object has one" if drawn else "no training object has one"
    words = f"{drawn:,} of {count:,} training objects {'has' if drawn == 1 else 'have'} one"
    return words if are_enough(drawn, count) else f"{words}: too few to learn from, unless --masks true asks for it"
