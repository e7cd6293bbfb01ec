"""Does a folder hold boxes or masks? For commands that expect classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frugalvit.data.formats.folder import are_layout_folders
from frugalvit.errors import UserError
from frugalvit.tasks.dense.image_headers import find_image_folder
from frugalvit.tasks.detection.coco import describe_masks, find_annotations, has_enough_masks
from frugalvit.tasks.detection.coco_schema import has_mask, read_coco_file
from frugalvit.tasks.segmentation.dataset import find_pairs
from frugalvit.utils.text import pluralize


@dataclass(frozen=True)
class AnnotationInfo:
    """The annotations of a folder, and the command that trains on them.

    verb:   "detect" or "segment"
    text:   the annotations in words
    splits: number of images per split
    folder: a folder with the training images and no others; None if there is none
    masks:  whether a detector learns masks, in words
    """

    verb: str
    text: str
    splits: dict[str, int]
    folder: Path | None
    masks: str = ""


def find_annotation_kind(where: str | Path, classes: Sequence[str] | None = None) -> AnnotationInfo | None:
    """Find boxes or masks in a folder whose images have no classes; None if there are none.

    classes: class folders; they count as none if they are only the folders of a known layout (train, JPEGImages, …)
    """
    root = Path(where)
    if not root.is_dir() or not (classes is None or are_layout_folders(classes)):
        return None
    for find in (_find_boxes, _find_masks):
        try:
            return find(root)
        except UserError:  # not this kind of data
            continue
    return None


def _find_boxes(root: Path) -> AnnotationInfo:
    files = find_annotations(root)
    contents = {split: read_coco_file(path) for split, path in files.items()}
    objects = [entry for content in contents.values() for entry in content["annotations"]]
    categories = {entry["name"] for content in contents.values() for entry in content["categories"]}
    masks = sum(has_mask(entry.get("segmentation")) for entry in objects)
    kinds = "boxes and masks" if masks == len(objects) > 0 else "boxes"
    text = f"{kinds} of {pluralize(len(objects), 'object')} in {pluralize(len(categories), 'category')}"
    text += f", masks of {masks:,} of them" if 0 < masks < len(objects) else ""
    images = {split: _image_paths(root, files[split], content) for split, content in contents.items()}
    splits = {split: len(paths) for split, paths in images.items()}
    return AnnotationInfo("detect", text, splits, _training_folder(images), _describe_masks(contents.get("train")))


def _describe_masks(content: dict[str, Any] | None) -> str:
    """Say whether masks are learned from a training file; empty without objects."""
    objects = [entry for entry in content["annotations"] if not entry.get("iscrowd")] if content else []
    if not objects:
        return ""
    masked, count = sum(has_mask(entry.get("segmentation")) for entry in objects), len(objects)
    if 0 < masked < count and has_enough_masks(masked, count):
        return f"Masks: {describe_masks(masked, count)}: masks are learned from these, boxes from all."
    return f"Masks: {describe_masks(masked, count)}."


def _image_paths(root: Path, path: Path, content: dict[str, Any]) -> list[Path]:
    names = [entry["file_name"] for entry in content["images"]]
    if not names:
        raise UserError(f"{path} has no images.")
    folder = find_image_folder(root, path, names)
    return [folder / name for name in names]


def _find_masks(root: Path) -> AnnotationInfo:
    images = {split: [image for image, _ in pairs] for split, pairs in find_pairs(root)[0].items()}
    splits = {split: len(paths) for split, paths in images.items()}
    return AnnotationInfo(
        "segment", f"masks of {pluralize(sum(splits.values()), 'image')}", splits, _training_folder(images)
    )


def _training_folder(images: dict[str, list[Path]]) -> Path | None:
    """Return the folder of the training images if no image of another split is in it."""
    folders = {split: {path.parent.resolve() for path in paths} for split, paths in images.items()}
    train = folders.pop("train", set())
    if len(train) != 1:
        return None
    (folder,) = train
    shared = any(other == folder or folder in other.parents for others in folders.values() for other in others)
    return None if shared else images["train"][0].parent
