"""What a COCO file may hold, checked entry by entry before anything uses it: a mistake is one line with its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faster_coco_eval.core import mask as run_length

from frugalvit.errors import UserError
from frugalvit.utils.text import pluralize

LEAST = 1e-3  # pixels that a box must be wide and high
Check = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_side(value: Any) -> bool:
    return value is None or (_is_number(value) and value > 0)


def _is_identity(value: Any) -> bool:
    return isinstance(value, int | str)


def _is_segmentation(value: Any) -> bool:
    if value is None or isinstance(value, list):
        return True
    counts = value.get("counts") if isinstance(value, dict) else None
    runs = isinstance(counts, list) and all(isinstance(run, int) and run >= 0 for run in counts)
    return (runs or isinstance(counts, str)) and isinstance(value.get("size"), list)


_CHECKS: dict[str, dict[str, Check]] = {
    "images": {
        "id": (_is_identity, "a number"),
        "file_name": (lambda value: isinstance(value, str) and "\0" not in value, "a path"),
        "height": (_is_side, "a number of pixels"),
        "width": (_is_side, "a number of pixels"),
    },
    "annotations": {
        "image_id": (_is_identity, "the id of an image"),
        "category_id": (lambda value: isinstance(value, int), "the id of a category"),
        "bbox": (
            lambda value: not value or (isinstance(value, list) and all(map(_is_number, value))),
            "[left, top, width, height]",
        ),
        "segmentation": (_is_segmentation, "polygons or run lengths"),
        "area": (lambda value: value is None or _is_number(value), "a number"),
        "iscrowd": (lambda value: value is None or value in (0, 1), "0 or 1"),
    },
    "categories": {"id": (lambda value: isinstance(value, int), "a number")},
}


def check_entries(content: dict[str, Any], path: Path) -> None:
    """Every image, annotation and category is a mapping whose values are of the right kind."""
    for group, checks in _CHECKS.items():
        for number, entry in enumerate(content[group]):
            if not isinstance(entry, dict):
                raise UserError(f"{path}: entry {number} of '{group}' is {entry!r:.40}, not a mapping.")
            for key, (fits, wanted) in checks.items():
                if not fits(entry.get(key)):
                    raise UserError(
                        f"{path}: '{key}' of {group}[{number}] should be {wanted}, not {entry.get(key)!r:.50}."
                    )


def has_mask(segmentation: Any) -> bool:
    """Whether there are run lengths or a polygon: tools write ``[[]]`` or two corners where there is only a box."""
    if isinstance(segmentation, list):
        return any(_has_corners(part) for part in segmentation)
    return bool(segmentation)


def say_bare(path: Path, bare: list[dict[str, Any]], count: int) -> list[str]:
    """Notes on those of a file's ``count`` objects that have no usable mask; what somebody has drawn can be mended."""
    if not bare:
        return []
    notes = [f"{path.name}: {len(bare):,} of {pluralize(count, 'object')} without a mask: their boxes alone count"]
    outlines = [
        (entry.get("id"), entry["segmentation"]) for entry in bare if isinstance(entry.get("segmentation"), list)
    ]
    odd = [(number, part) for number, parts in outlines for part in parts if part and not _has_corners(part)]
    if odd:
        first, part = odd[0]
        what = f"{len(part)} numbers" if isinstance(part, list) else "no list of numbers"
        notes.append(
            f"{path.name}: {len({number for number, _ in odd}):,} of them with an outline that is no polygon "
            f"(annotation {first} has {what}; three corners are six): mended, they are masks"
        )
    empty = [entry.get("id") for entry in bare if has_mask(entry.get("segmentation"))]
    if empty:
        first = f"annotation {empty[0]}" + (" is the first" if len(empty) > 1 else "")
        notes.append(f"{path.name}: {len(empty):,} of them with a mask that holds no pixel of the image ({first})")
    return notes


def _has_corners(part: Any) -> bool:
    """Three of them or more."""
    return isinstance(part, list) and len(part) >= 6 and len(part) % 2 == 0


def is_polygon(part: Any, height: int, width: int) -> bool:
    """Three corners or more, none further outside than the image is large.

    Rasterising walks along the outline pixel by pixel: one corner at 1e9 would take all the memory there is.
    """
    if not _has_corners(part):
        return False
    inside = zip(part, (width, height) * (len(part) // 2), strict=True)
    return all(_is_number(value) and -side <= value <= 2 * side for value, side in inside)


def check_runs(segmentation: dict[str, Any], height: int, width: int, where: str) -> None:
    """Run lengths must cover the image exactly; the library says so only when it decodes them."""
    try:
        encoded = segmentation
        if isinstance(segmentation["counts"], list):
            encoded = run_length.frPyObjects(segmentation, height, width)  # type: ignore[assignment]
        run_length.decode(encoded)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        raise UserError(f"{where} has a damaged mask: {' '.join(str(error).split())[:120]}.") from None
