"""The part of the COCO format that detection reads, and how a file is checked against it."""

import codecs
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from faster_coco_eval.core import mask as run_length
from pydantic import Field, FiniteFloat, NonNegativeInt
from typing_extensions import TypedDict

from frugalvit.errors import UserError

Pixels = Annotated[FiniteFloat, Field(gt=0)]


class CocoImageEntry(TypedDict):
    id: int | str
    file_name: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    height: NotRequired[Pixels | None]
    width: NotRequired[Pixels | None]


class RunLengths(TypedDict):
    counts: list[NonNegativeInt] | str
    size: Annotated[list[int], Field(min_length=2, max_length=2)]  # height, width


class CocoAnnotation(TypedDict):
    id: NotRequired[Any]
    image_id: int | str
    category_id: int
    bbox: NotRequired[list[FiniteFloat] | None]  # left, top, width, height
    segmentation: NotRequired[list[list[FiniteFloat]] | RunLengths | None]
    area: NotRequired[FiniteFloat | None]
    iscrowd: NotRequired[Literal[0, 1] | None]


class CocoCategory(TypedDict):
    id: int
    name: str | int
    supercategory: NotRequired[str | None]


class CocoFile(TypedDict):
    images: list[CocoImageEntry]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]


_SCHEMA = pydantic.TypeAdapter(CocoFile)


def read_coco_file(path: Path) -> dict[str, Any]:
    """Read and check a COCO file; the error names its first wrong entry."""
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        return dict(_SCHEMA.validate_json(content, strict=True))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except pydantic.ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise UserError(f"{path} is not a readable JSON file ({first['msg']}).") from None
        group, index, key = (*first["loc"][:3], "", "", "")[:3]
        entry = (
            f"{group}[{index}]" + (f".{key}" if key else "") if isinstance(index, int) else f"'{group or path.name}'"
        )
        value = "" if first["type"] == "missing" else f", not {first['input']!r:.50}"
        raise UserError(f"{path} is not in COCO format: {entry}: {first['msg']}{value}.") from None


def has_mask(segmentation: Any) -> bool:
    """True for run lengths or a polygon. Tools write ``[[]]`` or two corners for an object with only a box."""
    if isinstance(segmentation, list):
        return any(_has_corners(part) for part in segmentation)
    return bool(segmentation)


def is_polygon(part: list[float], height: int, width: int) -> bool:
    """True for three or more corners, none further outside the image than the image is large.

    Rasterizing follows the outline pixel by pixel: one corner at 1e9 would fill the memory.
    """
    inside = zip(part, (width, height) * (len(part) // 2), strict=False)
    return _has_corners(part) and all(-side <= value <= 2 * side for value, side in inside)


def check_run_lengths(segmentation: dict[str, Any], height: int, width: int, where: str) -> None:
    """Raise UserError unless the run lengths cover the image. The library checks this only when it decodes."""
    try:
        encoded = segmentation
        if isinstance(segmentation["counts"], list):
            encoded = run_length.frPyObjects(segmentation, height, width)  # type: ignore[assignment]
        run_length.decode(encoded)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"{where} has a damaged mask: {' '.join(str(error).split())[:120]}.") from None


def _has_corners(part: list[float]) -> bool:
    return len(part) >= 6 and len(part) % 2 == 0
