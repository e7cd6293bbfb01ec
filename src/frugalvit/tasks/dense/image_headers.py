"""The images of a detection or segmentation dataset: folder, sizes, unreadable files, splits."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from frugalvit.data.decode import known_formats, read_header
from frugalvit.data.splits import hold_out
from frugalvit.data.unreadable import UnreadableImage
from frugalvit.errors import UserError
from frugalvit.runs.data_record import SkippedFile
from frugalvit.utils import console
from frugalvit.utils.system import cores
from frugalvit.utils.text import pluralize

UNREADABLE = (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError)
"""What Pillow raises for a file that is not an image, or too large."""
_ROTATED = range(5, 9)  # EXIF orientations that swap width and height
_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112  # tags of TIFF and EXIF
_MAX_WARNINGS = 10
"""Unreadable images that are named one by one."""


def find_image_folder(where: Path, annotations: Path, names: Sequence[str]) -> Path:
    """Find the folder that holds all images that a JSON file names, in the usual layouts."""
    stem = annotations.stem.removeprefix("instances_")
    folders = [
        annotations.parent,
        where,
        *(base / part for base in (where, where / "images") for part in ("images", stem)),
    ]
    folders += [where / "images" / stem.rstrip("0123456789"), where / stem.rstrip("0123456789")]
    best = max(folders, key=lambda folder: sum((folder / name).is_file() for name in names[:8]))
    absent = [name for name in names if not (best / name).is_file()]
    if absent:
        more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        raise UserError(
            f"{annotations.name} names missing images: {absent[0]}{more} (searched {best} and other folders). Put the "
            f"images beside it, or into {where / 'images'}."
        )
    return best


def read_image_sizes(
    split: str, paths: Sequence[Path], max_bad: float, bad: list[SkippedFile]
) -> list[tuple[int, int] | None]:
    """Read the (height, width) of all upright images; None for an unreadable one.

    max_bad: share of unreadable images above which this is an error
    bad:     list to which unreadable images are added
    """
    with ThreadPoolExecutor(min(16, 4 * cores())) as pool:
        results = pool.map(_size_or_fault, paths, chunksize=32)
        sizes = list(console.progress(results, total=len(paths), label="checking images"))
    faults = [size for size in sizes if isinstance(size, UnreadableImage)]
    warn_unreadable(faults, len(paths), max_bad)
    bad += (SkippedFile(split, fault.name, fault.reason) for fault in faults)
    return [None if isinstance(size, UnreadableImage) else size for size in sizes]


def _size_or_fault(path: Path) -> tuple[int, int] | UnreadableImage:
    try:
        return read_image_size(path)
    except UnreadableImage as fault:
        return fault


def read_image_size(path: Path) -> tuple[int, int]:
    """Read the (height, width) of an upright image from its header, or raise ``UnreadableImage``."""
    try:
        with Image.open(path, formats=known_formats()) as image:
            width, height = image.size
            if isinstance(image, TiffImageFile):  # newer versions of Pillow give the upright size, older the stored one
                width, height = int(image.tag_v2[_WIDTH]), int(image.tag_v2[_HEIGHT])
            is_rotated = _orientation(image) in _ROTATED
    except UNREADABLE as error:
        read_header(path)  # raises with a better reason for most files
        raise UnreadableImage(str(path), " ".join(str(error).replace(str(path), "").split())[:100]) from None
    return (width, height) if is_rotated else (height, width)


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except UNREADABLE:  # a PNG may have EXIF after its pixels; the decoder reports a truncated file
        return 1


def warn_unreadable(faults: Sequence[UnreadableImage], count: int, max_bad: float) -> None:
    """Warn of unreadable images; raise UserError if they are more than this share of ``count``."""
    check_bad(faults, count, max_bad)
    for fault in faults[:_MAX_WARNINGS]:
        console.warning(f"{fault} (left out)")
    if len(faults) > _MAX_WARNINGS:
        console.warning(f"left out as well: {pluralize(len(faults) - _MAX_WARNINGS, 'unreadable image')}")


def check_bad(faults: Sequence[UnreadableImage], count: int, max_bad: float) -> None:
    """Raise UserError if more than this share of ``count`` images is unreadable, or all are."""
    if not faults:
        return
    first = f"the first: {faults[0].name} ({faults[0].reason})"
    if len(faults) == count:
        raise UserError(f"None of the {count} images can be read, {first}.")
    if len(faults) > max_bad * count:
        raise UserError(
            f"{len(faults)} of {count} images cannot be read, {first}. Fix or remove them, or raise --cache.max-bad."
        )


def make_splits(splits: dict[str, list[Any]], mode: str, fraction: float, notes: list[str]) -> dict[str, list[Any]]:
    """Make the splits for --split. Val is chosen by a hash of the file names."""
    splits = dict(splits)
    if mode in ("train+val", "remake") and "train" in splits and "val" in splits:
        splits["train"] = [*splits["train"], *splits.pop("val")]
        notes.append(f"train and val are joined: {len(splits['train']):,} images")
    if mode in ("auto", "remake") and "train" in splits and "val" not in splits:
        items = splits["train"]
        held_out = hold_out([item.path.name for item in items], None, fraction, 0)
        if held_out.any():  # there are at least two images
            splits["train"] = [item for item, out in zip(items, held_out, strict=True) if not out]
            splits["val"] = [item for item, out in zip(items, held_out, strict=True) if out]
            notes.append(f"val is made from train: {int(held_out.sum()):,} of {len(items):,} images, at random")
    return splits
