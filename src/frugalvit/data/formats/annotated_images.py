"""The images of a detection or segmentation dataset: folder, sizes, unreadable files, splits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image, UnidentifiedImageError

from frugalvit.data.bad_images import SkippedFile, UnreadableImage, check_unreadable, read_all
from frugalvit.data.dataset import FileExamples
from frugalvit.data.decode import decode, known_formats
from frugalvit.data.duplicates import group_copies
from frugalvit.data.preprocessing import exif_orientation
from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import open_regular
from frugalvit.utils.system import cores
from frugalvit.utils.text import pluralize, truncate_list

UNREADABLE = (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError)
"""What Pillow raises for a file that is not an image, or too large."""
T = TypeVar("T")


def find_image_folder(where: Path, annotations: Path, names: Sequence[str]) -> Path:
    """Find the folder that holds all images that a JSON file names, in the usual layouts."""
    stem = annotations.stem.removeprefix("instances_")
    parts = ("", "images", stem, f"images/{stem}", stem.rstrip("0123456789"), f"images/{stem.rstrip('0123456789')}")
    folders = [annotations.parent, *(where / part for part in parts)]
    best = max(folders, key=lambda folder: sum((folder / name).is_file() for name in names[:8]))
    absent = [name for name in names if not (best / name).is_file()]
    if absent:
        raise UserError(
            f"{annotations.name} names missing images: {truncate_list(absent)} (searched {best} and other folders). "
            f"Put the images beside it, or into {where / 'images'}."
        )
    return best


def read_image_sizes(
    split: str, paths: Sequence[Path], max_bad: float, bad: list[SkippedFile]
) -> list[tuple[int, int] | None]:
    """Read the (height, width) of all upright images; None for an unreadable one, at most a share of ``max_bad``."""
    threads = min(16, 4 * cores())
    sizes = list(read_all(lambda i: read_image_size(paths[i]), range(len(paths)), "checking images", threads))
    faults = [size for size in sizes if isinstance(size, UnreadableImage)]
    warn_unreadable(faults, len(paths), max_bad)
    bad += (SkippedFile(split, fault.name, fault.reason) for fault in faults)
    return [None if isinstance(size, UnreadableImage) else size for size in sizes]


def read_image_size(path: Path) -> tuple[int, int]:
    """Read the (height, width) of an upright image. Raises ``UnreadableImage``.

    The header is enough, unless EXIF rotates the image: versions of Pillow disagree about the size of a rotated TIFF.
    """
    try:
        with open_regular(path) as file, Image.open(file, formats=known_formats()) as image:
            if exif_orientation(image) == 1:
                return image.height, image.width
    except UNREADABLE:
        pass  # decoding names the reason
    height, width, _ = decode(path).shape
    return height, width


def warn_unreadable(faults: Sequence[UnreadableImage], count: int, max_bad: float) -> None:
    """Warn of unreadable images; raise UserError if they are more than this share of ``count``."""
    check_bad(faults, count, max_bad)
    if faults:
        console.warning(
            f"left out {pluralize(len(faults), 'unreadable image')}: {truncate_list([str(fault) for fault in faults])}"
        )


def check_bad(faults: Sequence[UnreadableImage], count: int, max_bad: float) -> None:
    """Raise UserError if more than this share of ``count`` images is unreadable, or all are."""
    limit = max(0, min(count - 1, int(max_bad * count)))
    check_unreadable([(fault.name, fault.reason) for fault in faults], limit, count)


def select_split(splits: dict[str, T], only: str | None, where: str | Path, mode: str = "given") -> dict[str, T]:
    """Return one split; all if ``only`` is None, or if the mode makes this split from train."""
    if only is None or (only not in splits and only == "val" and mode == "auto"):
        return splits
    if only not in splits:
        made = ", val (made from train)" if mode == "auto" and "val" not in splits else ""
        raise UserError(f"{where} has no split '{only}'. It has: {', '.join(splits)}{made}. Choose one with --split.")
    return {only: splits[only]}


def make_splits(splits: dict[str, list[Any]], mode: str, fraction: float, notes: list[str]) -> dict[str, list[Any]]:
    """Make the splits for --split. Val is chosen by a hash of the file names."""
    splits = dict(splits)
    if mode == "train+val" and "train" in splits and "val" in splits:
        splits["train"] = [*splits["train"], *splits.pop("val")]
        notes.append(f"train and val are joined: {len(splits['train']):,} images")
    if mode == "auto" and "train" in splits and "val" not in splits:
        items = splits["train"]
        copies, copies_note = group_copies(FileExamples([str(item.path) for item in items], None), None)
        held_out = hold_out([item.path.name for item in items], None, fraction, 0, copies)
        if held_out.any():  # there are at least two images
            splits["train"] = [item for item, out in zip(items, held_out, strict=True) if not out]
            splits["val"] = [item for item, out in zip(items, held_out, strict=True) if out]
            counts = f"{int(held_out.sum()):,} of {len(items):,} images"
            notes.append(f"val is made from train: {counts}, at random{copies_note}")
    return splits
