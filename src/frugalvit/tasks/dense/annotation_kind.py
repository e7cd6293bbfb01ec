"""Whether a folder holds boxes or masks: for commands that look for classes, and find none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frugalvit.data.formats.folder import are_layout_folders
from frugalvit.errors import UserError
from frugalvit.tasks.dense.image_headers import find_folder
from frugalvit.tasks.detection.coco import about_masks, enough_masks, find_annotations, read
from frugalvit.tasks.detection.coco_schema import has_mask
from frugalvit.tasks.segmentation.dataset import find_pairs
from frugalvit.utils.text import pluralize


@dataclass(frozen=True)
class AnnotationInfo:
    """What is marked in the images of a folder, and the command that learns it."""

    verb: str
    words: str
    splits: dict[str, int]  # images of each
    place: Path | None  # a folder with the training images and none of the others', where there is one
    masks: str = ""  # what of the boxes' masks is learned


def find_annotation_kind(where: str | Path, classes: Sequence[str] | None = None) -> AnnotationInfo | None:
    """Boxes or masks in a folder whose images have no classes, or such as are only the folders of a known layout."""
    root = Path(where)
    if not root.is_dir() or not (classes is None or are_layout_folders(classes)):
        return None
    for look in (_boxes, _masks):
        try:
            return look(root)
        except UserError:  # it is no such data
            continue
    return None


def _boxes(root: Path) -> AnnotationInfo:
    files = find_annotations(root)
    contents = {split: read(path) for split, path in files.items()}
    objects = [entry for content in contents.values() for entry in content["annotations"]]
    categories = {entry.get("name") for content in contents.values() for entry in content["categories"]}
    masks = sum(has_mask(entry.get("segmentation")) for entry in objects)
    what = "boxes and masks" if masks == len(objects) > 0 else "boxes"
    words = f"{what} of {pluralize(len(objects), 'object')} in {pluralize(len(categories), 'category')}"
    words += f", masks of {masks:,} of them" if 0 < masks < len(objects) else ""
    images = {split: _image_paths(root, files[split], content) for split, content in contents.items()}
    splits = {split: len(paths) for split, paths in images.items()}
    return AnnotationInfo("detect", words, splits, _own_folder(images), _learned_masks(contents.get("train")))


def _learned_masks(content: dict[str, Any] | None) -> str:
    """How many of the objects to learn from have a mask, and what a detector makes of it; nothing without such."""
    objects = [entry for entry in content["annotations"] if not entry.get("iscrowd")] if content else []
    if not objects:
        return ""
    drawn, count = sum(has_mask(entry.get("segmentation")) for entry in objects), len(objects)
    if 0 < drawn < count and enough_masks(drawn, count):
        return f"Masks: {about_masks(drawn, count)}: masks are learned from these, boxes from all."
    return f"Masks: {about_masks(drawn, count)}."


def _image_paths(root: Path, path: Path, content: dict[str, Any]) -> list[Path]:
    names = [entry["file_name"] for entry in content["images"]]
    if not names:
        raise UserError(f"{path} names no images.")
    folder = find_folder(root, path, names)
    return [folder / name for name in names]


def _masks(root: Path) -> AnnotationInfo:
    pairs, _ = find_pairs(root)
    images = {split: [image for image, _ in found] for split, found in pairs.items()}
    count = sum(len(paths) for paths in images.values())
    if not count:
        raise UserError(f"{root} has no images with masks.")
    return AnnotationInfo(
        "segment",
        f"masks of {pluralize(count, 'image')}",
        {split: len(paths) for split, paths in images.items()},
        _own_folder(images),
    )


def _own_folder(images: dict[str, list[Path]]) -> Path | None:
    folders = {split: {path.parent.resolve() for path in paths} for split, paths in images.items()}
    train = folders.get("train", set())
    if len(train) != 1:
        return None
    (own,) = train
    others = {folder for split, found in folders.items() if split != "train" for folder in found}
    inside = any(folder == own or own in folder.parents for folder in others)
    return None if inside else next(iter(images["train"])).parent
