"""Where the pictures of a dataset lie, whether they are all there, how large they are, and which are held out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from frugalvit import console
from frugalvit.data.decode import known_formats
from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError

_TURNED = range(5, 9)  # EXIF orientations that swap width and height
_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112  # tags of TIFF and EXIF
UNREADABLE = (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError)
"""What opening a file that is no picture, or too large a one, raises."""


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


def check_sizes(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """(height, width) of every picture as it is decoded, upright; one that is no picture ends here by name."""
    with ThreadPoolExecutor(min(16, 4 * (os.cpu_count() or 1))) as pool:
        sizes = pool.map(upright_size, paths, chunksize=32)
        return list(console.progress(sizes, total=len(paths), label="checking images"))


def upright_size(path: Path) -> tuple[int, int]:
    """(height, width) from a picture's header, as EXIF turns it."""
    try:
        with Image.open(path, formats=known_formats()) as picture:
            width, height = picture.size
            if isinstance(picture, TiffImageFile):  # newer Pillows give the turned size, older ones the stored one
                width, height = int(picture.tag_v2[_WIDTH]), int(picture.tag_v2[_HEIGHT])
            turned = _orientation(picture) in _TURNED
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable image ({' '.join(str(error).split())[:100]}).") from None
    return (width, height) if turned else (height, width)


def _orientation(picture: Image.Image) -> int | None:
    """What EXIF says; a PNG may say it behind its pixels, and one that is cut short is for the decoder to leave out."""
    try:
        return picture.getexif().get(_ORIENTATION)
    except UNREADABLE:
        return None


def arrange(splits: dict[str, list[Any]], mode: str, fraction: float, notes: list[str]) -> dict[str, list[Any]]:
    """The splits a training wants (see --split), images held out by a hash of their names."""
    splits = dict(splits)
    if mode in ("train+val", "remake") and "train" in splits and "val" in splits:
        splits["train"] = [*splits["train"], *splits.pop("val")]
        notes.append(f"train and val are joined: {len(splits['train']):,} images")
    if mode in ("auto", "remake") and "train" in splits and "val" not in splits and len(splits["train"]) > 1:
        held = hold_out([item.path.name for item in splits["train"]], None, fraction, 0)
        whole = splits["train"]
        splits["train"] = [item for item, out in zip(whole, held, strict=True) if not out]
        splits["val"] = [item for item, out in zip(whole, held, strict=True) if out]
        notes.append(f"val is made from train: {int(held.sum()):,} of {len(whole):,} images, at random")
    return splits
