"""A folder of images -> splits and classes, in whatever way people lay folders out.

With ``train`` / ``val`` / ``test`` folders or without; class folders below them, or loose images without labels.
Where a layout can be read in two ways, one is chosen and said in the notes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.decode import EXTENSIONS, has_image_signature
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils import console
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.text import pluralize, truncate_list

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
_BESIDE_IMAGES = frozenset({"masks", "mask", "annotations", "labels", "segmentation", "segmentationclass", "bboxes"})
_IMAGE_FOLDERS = frozenset({"images", "image", "img", "imgs", "jpegimages", "jpg"})
_VOC_FOLDERS = frozenset({"JPEGImages", "SegmentationClass", "SegmentationObject"})


def only_layout(classes: Sequence[str]) -> bool:
    """Whether what looks like classes is nobody's: train2017 beside val2017 is COCO, JPEGImages beside others VOC."""
    return _VOC_FOLDERS.issuperset(classes) or all(name.rstrip("0123456789") in SPLIT_NAMES for name in classes)


@dataclass
class _Tree:
    """A folder read as class folders: images by class folder, loose ones, and what else lies there."""

    path: str
    classes: dict[str, Listing] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def in_folders(self) -> int:
        return sum(len(listing.images) for listing in self.classes.values())

    def all_images(self) -> list[str]:
        return self.loose + [path for listing in self.classes.values() for path in listing.images]


def open_folder(
    where: str, labels: str = "auto", classes: Sequence[str] | None = None, classes_from: Sequence[str] = ("train",)
) -> DatasetSplits:
    """Splits as they lie on disk.

    Args:
        labels: "auto" decides, "folders" insists on class folders, "ignore" reads none.
        classes: keep only these class folders.
        classes_from: the splits whose folders define the classes; another split may not have more.
    """
    notes: list[str] = []
    root = where if labels == "folders" else descend(where, notes)
    split_paths = split_folders(root)
    if split_paths:
        trees = {split: _read_tree(path) for split, path in split_paths.items()}
        beside = sorted(set(open_root(root).folders) - set(split_paths.values()))
        if beside:
            notes.append(f"Beside the splits and not read: {truncate_list([base(path) for path in beside])}.")
    else:
        trees = {"train": _read_tree(root)}
    if not any(tree.all_images() for tree in trees.values()):
        if locked := [path for tree in trees.values() for path in tree.unreadable]:
            raise may_not_read(where, locked)
        raise UserError(
            f"{where} holds no images. Put class folders of images into it, or loose images without labels."
        )
    for split, tree in trees.items():
        if split != "train" and "train" in trees:
            _read_unsorted(tree, trees["train"])
        _note_leftovers(tree, notes)
    labelled = labels == "folders" or (labels == "auto" and _has_class_folders(trees, root, notes))
    if not labelled:
        splits: dict[str, ImageDataset] = {
            split: FileExamples(tree.all_images(), None, root) for split, tree in trees.items()
        }
        return DatasetSplits(Path(where).resolve().name, where, "unlabelled images", None, _ordered(splits), notes)
    names = _class_names(trees, classes, classes_from)
    if classes is not None:
        notes.append(f"Kept the {pluralize(len(names), 'class')} asked for.")
    splits = _labelled_splits(trees, names, root, notes)
    loose: dict[str, ImageDataset] = {split: FileExamples(tree.loose, None, root) for split, tree in trees.items()}
    name = Path(where).resolve().name
    return DatasetSplits(name, where, "class folders", tuple(names), _ordered(splits), notes, _ordered(loose))


def descend(where: str, notes: list[str]) -> str:
    """Go into the only folder that holds anything, as in ``flowers/jpg/`` or ``camvid/images/`` beside ``masks/``."""
    root, seen = where, set()
    while True:
        seen.add(identity_of(root))
        found = open_root(root)
        if found.images or split_folders(root):
            return root
        chosen = [path for path in found.folders if base(path).lower() in _IMAGE_FOLDERS]
        rest = [path for path in found.folders if base(path).lower() not in _BESIDE_IMAGES and path not in chosen]
        if len(found.folders) > 1 and (len(chosen) != 1 or rest):
            return root
        only = chosen or found.folders
        if len(only) != 1 or identity_of(only[0]) in seen:
            return root
        root = only[0]
        notes.append(f"Read {root}, the only folder of images in {where}.")


def split_folders(root: str) -> dict[str, str]:
    """Folders named train, val, test …; none when such a name is only one class among others."""
    found = open_root(root)
    paths: dict[str, str] = {}
    for path in found.folders:
        split = SPLIT_NAMES.get(base(path).lower())
        if split in paths:
            raise UserError(f"{root} has both '{base(paths[split])}' and '{base(path)}': keep one of them as {split}.")
        if split:
            paths[split] = path
    beside = len(found.folders) - len(paths)
    if list(paths) == ["train"] and beside and not open_root(paths["train"]).folders:
        return {}  # a class of trains among other classes
    return paths if "train" in paths or (not beside and not found.images) else {}


def _read_tree(path: str) -> _Tree:
    found = open_root(path)
    tree = _Tree(path, loose=found.images, others=list(found.others))
    above = frozenset({identity_of(path)})
    for folder in found.folders:
        listing = list_images(folder, above)
        tree.others += listing.others
        tree.unreadable += listing.unreadable
        if listing.images:
            tree.classes[base(folder)] = listing
        elif not listing.others and not listing.unreadable:
            tree.empty.append(base(folder))
    return tree


def _read_unsorted(tree: _Tree, train: _Tree) -> None:
    """A split whose images lie in one folder ``images``: loose, or in the classes that a list beside them names.

    Tiny ImageNet's val is so: ``val_annotations.txt`` holds "file, class, box" separated by tabs.
    """
    if len(tree.classes) != 1 or not (_IMAGE_FOLDERS - {*map(str.lower, train.classes)}) & {
        *map(str.lower, tree.classes)
    }:
        return
    listing = next(iter(tree.classes.values()))
    tree.classes, tree.loose = {}, tree.loose + listing.images
    lists = [path for path in tree.others if base(path) == "val_annotations.txt"]
    if lists:
        rows = [line.split("\t") for line in Path(lists[0]).read_text(encoding="utf-8", errors="replace").splitlines()]
        label = {row[0]: row[1] for row in rows if len(row) > 1}
        for path in listing.images:
            tree.classes.setdefault(label.get(base(path), "unlisted"), Listing()).images.append(path)
        tree.loose = []


def _has_class_folders(trees: dict[str, _Tree], root: str, notes: list[str]) -> bool:
    """Whether the folders mean classes, judged by train (or by all splits where there is no train)."""
    judged = [trees["train"]] if "train" in trees else list(trees.values())
    loose = sum(len(tree.loose) for tree in judged)
    inside = sum(tree.in_folders for tree in judged)
    direct = sum(listing.direct for tree in judged for listing in tree.classes.values())
    folders = {name for tree in judged for name in (*tree.classes, *tree.empty)}
    if not folders:
        return False
    if len(folders) == 1 and len(trees) == 1:
        notes.append(f"{root} has a single folder of images, '{next(iter(folders))}': read as unlabelled.")
        return False
    if loose > inside:
        notes.append(f"{root}: {loose:,} loose images and {inside:,} in folders: read as unlabelled.")
        return False
    if 2 * direct < inside:
        notes.append(
            f"{root}: most images lie more than one folder deep, so folder names are not taken for classes: "
            "read as unlabelled. Class folders must hold their images directly: move these up, list them in a CSV "
            "(path,label), or let the top folders be the classes with "
            f"'frugalvit data pack {console.shell_quote(root)} PACKED --labels folders'."
        )
        return False
    return True


def _class_names(trees: dict[str, _Tree], wanted: Sequence[str] | None, classes_from: Sequence[str]) -> list[str]:
    """Sorted; from train, whose classes are all there can be; without train from every split."""
    judged = [trees[split] for split in classes_from if split in trees] or list(trees.values())
    present = sorted({name for tree in judged for name in (*tree.classes, *tree.empty)})
    if not present:
        raise UserError(f"{judged[0].path} has no class folders.")
    if wanted is not None:
        return chosen_classes(judged[0].path, present, wanted)
    for split, tree in trees.items():
        unknown = sorted(set(tree.classes) - set(present))
        if unknown:
            raise unknown_classes(tree.path, judged[0].path, unknown, split)
    return present


def chosen_classes(place: str, present: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The classes asked for, in the order they have there; ``UserError`` when one is not present.

    One whose folder's name is in no encoding may be asked for by that name or as it is shown.
    """
    kept, known = {utf8_safe(name) for name in wanted}, {utf8_safe(name) for name in present}
    missing = sorted(kept - known)
    if missing:
        hint = did_you_mean(missing[0], present)
        raise UserError(f"{place} lacks {len(missing)} of the classes asked for: {truncate_list(missing)}.{hint}")
    return [name for name in present if utf8_safe(name) in kept]


def unknown_classes(place: str, train: str, unknown: Sequence[str], split: str) -> UserError:
    """The error for a split with classes that nothing can be learned about."""
    way_out = "Move them, or pass --split remake." if split == "val" else "Move or remove them."
    return UserError(
        f"{place} has {pluralize(len(unknown), 'class')} that {train} lacks: {truncate_list(unknown)}. {way_out}"
    )


def _labelled_splits(trees: dict[str, _Tree], names: list[str], root: str, notes: list[str]) -> dict[str, ImageDataset]:
    splits: dict[str, ImageDataset] = {}
    for split, tree in trees.items():
        paths = [path for name in names if name in tree.classes for path in tree.classes[name].images]
        counts = [len(tree.classes[name].images) if name in tree.classes else 0 for name in names]
        if paths:
            splits[split] = FileExamples(paths, np.repeat(np.arange(len(names)), counts), root)
        elif not tree.loose:
            notes.append(f"{tree.path} is empty: left out.")
    return splits


def _note_leftovers(tree: _Tree, notes: list[str]) -> None:
    if tree.others:
        verb = "is no image" if len(tree.others) == 1 else "are no images"
        names = truncate_list([*map(base, tree.others)])
        notes.append(f"{tree.path}: {pluralize(len(tree.others), 'file')} that {verb}: {names}.")
    if tree.unreadable:
        notes.append(f"{tree.path}: no permission to read {truncate_list(tree.unreadable)}.")


def _ordered(splits: dict[str, ImageDataset]) -> dict[str, ImageDataset]:
    return {split: splits[split] for split in ("train", "val", "test") if split in splits and len(splits[split])}


# What file managers and archivers leave behind.
_LITTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"})


@dataclass
class Folder:
    """The entries of one folder, sorted by name; full paths."""

    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass
class Listing:
    """All images at and below a folder. ``direct`` of them lie in the folder itself, or in its folder ``images``."""

    images: list[str] = field(default_factory=list)
    direct: int = 0
    others: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def list_folder(path: str) -> Folder:
    """What lies directly in a folder; hidden files and litter left out. Raises OSError when it cannot be read."""
    found = Folder()
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _LITTER:
                continue
            if entry.is_dir():
                found.folders.append(entry.path)
            elif _names_image(entry):
                found.images.append(entry.path)
            else:
                found.others.append(entry.path)
    found.folders.sort()
    found.images.sort()
    found.others.sort()
    return found


def list_images(path: str, above: frozenset[tuple[int, int]] = frozenset()) -> Listing:
    """All images below ``path``. A folder that links lead to twice, or to one in ``above``, is listed once."""
    listing, seen, waiting = Listing(), set(above), [path]
    while waiting:
        here = waiting.pop()
        try:
            identity = identity_of(here)
            if identity in seen:
                continue
            seen.add(identity)
            found = list_folder(here)
        except OSError:
            listing.unreadable.append(here)
            continue
        if here == path or here == f"{path}{os.sep}images":  # Tiny ImageNet puts another folder between
            listing.direct += len(found.images)
        listing.images += found.images
        listing.others += found.others
        waiting += reversed(found.folders)
    listing.images.sort()
    return listing


def identity_of(folder: str) -> tuple[int, int]:
    """The same for every path that leads to a folder."""
    facts = Path(folder).stat()
    return facts.st_dev, facts.st_ino


def open_root(path: str) -> Folder:
    """``list_folder`` for the folder that the user named: what is wrong with it is said."""
    try:
        return list_folder(path)
    except PermissionError:
        raise UserError(f"No permission to read {path}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


def may_not_read(where: str, unreadable: Sequence[str]) -> UserError:
    """The error for a folder without images whose folders could not all be looked into."""
    if list(unreadable) == [where]:
        return UserError(f"No permission to read {where}.")
    return UserError(f"{where} holds no images that can be read: no permission to read {truncate_list(unreadable)}.")


def base(path: str) -> str:
    """The last part of a path."""
    return Path(path).name


def _names_image(entry: os.DirEntry[str]) -> bool:
    stem, dot, extension = entry.name.rpartition(".")
    if dot and stem:
        # A dead link with an image's name is kept: reading it says that it is missing.
        return f".{extension.lower()}" in EXTENSIONS and (entry.is_file() or entry.is_symlink())
    if not entry.is_file():
        return False
    try:
        with Path(entry.path).open("rb") as file:
            return has_image_signature(file.read(16))
    except OSError:
        return False
