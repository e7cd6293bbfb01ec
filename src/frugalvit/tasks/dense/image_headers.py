"""Where the pictures of a dataset lie, whether they are all there, how large they are, and which are held out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from frugalvit.data.decode import UnreadableImage, known_formats, read_header
from frugalvit.data.splits import hold_out_files
from frugalvit.errors import UserError
from frugalvit.runs.data_record import SkippedFile
from frugalvit.utils import console
from frugalvit.utils.system import cores
from frugalvit.utils.text import pluralize

_TURNED = range(5, 9)  # EXIF orientations that swap width and height
_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112  # tags of TIFF and EXIF
UNREADABLE = (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError)
"""What opening a file that is no picture, or too large a one, raises."""
_NAMED = 10
"""Unreadable images that are named one by one."""


class ImageHeader(NamedTuple):
    """What a picture's header says: (height, width) as it is decoded, upright, and as it is stored."""

    size: tuple[int, int]
    stored: tuple[int, int]
    orientation: int  # EXIF's: 1 upright, 3 upside down, 5 to 8 on its side

    def is_turned_unseen(self) -> bool:
        """Whether EXIF turns or mirrors it and its size does not show it."""
        return self.orientation in range(2, 9) and self.size == self.stored


def find_folder(where: Path, annotations: Path, names: Sequence[str]) -> Path:
    """The folder in which the files a JSON names lie: the likeliest places, in order; all files must be in it."""
    stem = annotations.stem.removeprefix("instances_")
    places = [
        annotations.parent,
        where,
        *(base / part for base in (where, where / "images") for part in ("images", stem)),
    ]
    places += [where / "images" / stem.rstrip("0123456789"), where / stem.rstrip("0123456789")]
    best = max(places, key=lambda place: sum((place / name).is_file() for name in names[:8]))
    absent = [name for name in names if not (best / name).is_file()]
    if absent:
        more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        raise UserError(
            f"{annotations.name} names images that are not there: {absent[0]}{more} (looked in {best} and other "
            f"folders of {where}). Put the images beside it, or into {where / 'images'}."
        )
    return best


def look_at_images(
    part: str, paths: Sequence[Path], max_bad: float, bad: list[SkippedFile]
) -> list[ImageHeader | None]:
    """What the headers of all images of a part say; None for what is no picture, which is named, and too many an error.

    bad: where those are added
    """
    found = _look_at_all(paths)
    faults = [entry for entry in found if isinstance(entry, UnreadableImage)]
    warn_unreadable(faults, len(paths), max_bad)
    bad += (SkippedFile(part, fault.name, fault.reason) for fault in faults)
    return [None if isinstance(entry, UnreadableImage) else entry for entry in found]


def look_at_masks(paths: Sequence[Path]) -> list[ImageHeader]:
    """The same of masks, of which each must be a picture."""
    found = _look_at_all(paths)
    bad = next((entry for entry in found if isinstance(entry, UnreadableImage)), None)
    if bad is not None:
        raise UserError(f"{bad.name} is not a readable mask ({bad.reason}).")
    return [entry for entry in found if isinstance(entry, ImageHeader)]


def warn_unreadable(faults: Sequence[UnreadableImage], count: int, max_bad: float) -> None:
    """Say which of ``count`` images cannot be read and are left out; more than this share of them is an error."""
    check_bad(faults, count, max_bad)
    for fault in faults[:_NAMED]:
        console.warning(f"{fault} (left out)")
    if len(faults) > _NAMED:
        console.warning(f"left out likewise: {pluralize(len(faults) - _NAMED, 'image')} more")


def check_bad(faults: Sequence[UnreadableImage], count: int, max_bad: float) -> None:
    """Raise UserError where more than this share of ``count`` images cannot be read, or none can."""
    if not faults:
        return
    first = f"{faults[0].name} ({faults[0].reason})"
    if len(faults) == count:
        raise UserError(f"None of the {count} images can be read, the first of them {first}.")
    if len(faults) > max_bad * count:
        which, them = (first, "it") if len(faults) == 1 else (f"the first of them {first}", "them")
        raise UserError(
            f"{len(faults)} of {count} images cannot be read, {which}; mend or remove {them}, or raise --cache.max-bad."
        )


def _look_at_all(paths: Sequence[Path]) -> list[ImageHeader | UnreadableImage]:
    with ThreadPoolExecutor(min(16, 4 * cores())) as pool:
        found = pool.map(_look_or_fault, paths, chunksize=32)
        return list(console.progress(found, total=len(paths), label="checking images"))


def _look_or_fault(path: Path) -> ImageHeader | UnreadableImage:
    try:
        return read_image_header(path)
    except UnreadableImage as fault:
        return fault


def read_image_header(path: Path) -> ImageHeader:
    """What a picture's header says, or ``UnreadableImage``."""
    try:
        with Image.open(path, formats=known_formats()) as picture:
            width, height = picture.size
            if isinstance(picture, TiffImageFile):  # newer Pillows give the turned size, older ones the stored one
                width, height = int(picture.tag_v2[_WIDTH]), int(picture.tag_v2[_HEIGHT])
            orientation = _orientation(picture) or 1
    except UNREADABLE as error:
        read_header(path)  # knows what is wrong in better words
        raise UnreadableImage(str(path), " ".join(str(error).replace(str(path), "").split())[:100]) from None
    return ImageHeader((width, height) if orientation in _TURNED else (height, width), (height, width), orientation)


def turned_by_exif(seen: ImageHeader, said: tuple[int, int]) -> str:
    """What EXIF does to a picture of which the stored size was said, and what to do; nothing if that is not it."""
    if said != seen.stored:
        return ""
    height, width = seen.size
    return (
        f"but EXIF turns it to {width}×{height}: remove EXIF's orientation from the images "
        "(exiftool -Orientation= FILE), and they lie as they were marked."
    )


def note_turned(where: str, truth: str, seen: Sequence[tuple[Path, ImageHeader]]) -> list[str]:
    """A note on the images that EXIF turns without their sizes showing whether whoever marked them saw it."""
    paths = [path for path, entry in seen if entry.is_turned_unseen()]
    if not paths:
        return []
    return [
        f"{where}: EXIF turns or mirrors {pluralize(len(paths), 'image')}, such as {paths[0].name}: {truth} must fit the "
        "turned image"
    ]


def _orientation(picture: Image.Image) -> int | None:
    """What EXIF says; a PNG may say it behind its pixels, and one that is cut short is for the decoder to leave out."""
    try:
        return picture.getexif().get(_ORIENTATION)
    except UNREADABLE:
        return None


def make_splits(splits: dict[str, list[Any]], mode: str, fraction: float, notes: list[str]) -> dict[str, list[Any]]:
    """The splits a training wants (see --split), images held out by a hash of their names; one named twice as one."""
    splits = dict(splits)
    if mode in ("train+val", "remake") and "train" in splits and "val" in splits:
        splits["train"] = [*splits["train"], *splits.pop("val")]
        notes.append(f"train and val are joined: {len(splits['train']):,} images")
    if mode in ("auto", "remake") and "train" in splits and "val" not in splits:
        whole = splits["train"]
        names, keys = [str(item.path) for item in whole], [item.path.name for item in whole]
        held = hold_out_files(names, keys, None, fraction, 0)
        if held.any():  # there are two images
            splits["train"] = [item for item, out in zip(whole, held, strict=True) if not out]
            splits["val"] = [item for item, out in zip(whole, held, strict=True) if out]
            notes.append(f"val is made from train: {int(held.sum()):,} of {len(whole):,} images, at random")
    return splits
