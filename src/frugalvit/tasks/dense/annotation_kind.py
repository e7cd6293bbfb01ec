"""Recognise folders with boxes or masks, for commands that expect classes."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from frugalvit.data.formats.coco import read_contents
from frugalvit.data.formats.image_folder import are_layout_folders
from frugalvit.data.formats.masks import find_pairs
from frugalvit.errors import UserError
from frugalvit.utils.text import pluralize


class AnnotationInfo(NamedTuple):
    """Annotations: the command for them ("detect" or "segment"), a text, and the number of images per split."""

    verb: str
    text: str
    splits: dict[str, int]


def find_annotation_kind(where: str | Path, classes: Sequence[str] | None = None) -> AnnotationInfo | None:
    """Find boxes or masks in a folder without classes, or with those of a known layout (train, …); None without any."""
    root = Path(where)
    if not root.is_dir() or not (classes is None or are_layout_folders(classes)):
        return None
    with contextlib.suppress(UserError):  # not this kind of data
        contents = read_contents(root)[1]
        objects = sum(len(content["annotations"]) for content in contents.values())
        categories = {entry["name"] for content in contents.values() for entry in content["categories"]}
        text = f"boxes of {pluralize(objects, 'object')} in {pluralize(len(categories), 'category')}"
        return AnnotationInfo("detect", text, {split: len(content["images"]) for split, content in contents.items()})
    with contextlib.suppress(UserError):
        splits = {split: len(pairs) for split, pairs in find_pairs(root)[0].items()}
        return AnnotationInfo("segment", f"masks of {pluralize(sum(splits.values()), 'image')}", splits)
    return None
