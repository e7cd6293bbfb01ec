"""Folders of images: with or without train/val/test folders, with class folders or unlabelled images.

If a layout is ambiguous, the notes say how it was read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.decode import EXTENSIONS, has_image_signature
from frugalvit.data.formats.base import OpenOptions
from frugalvit.data.formats.named_catalog import DATASETS, datasets_in
from frugalvit.data.paths import is_folder
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize, truncate_list

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
_BESIDE_IMAGES = frozenset({"masks", "mask", "annotations", "labels", "segmentation", "segmentationclass", "bboxes"})
_IMAGE_FOLDERS = frozenset({"images", "image", "img", "imgs", "jpegimages", "jpg"})
_VOC_FOLDERS = frozenset({"JPEGImages", "SegmentationClass", "SegmentationObject"})


def are_layout_folders(classes: Sequence[str]) -> bool:
    """True if the class names are folders of COCO (train2017, val2017) or of VOC (JPEGImages …)."""
    return _VOC_FOLDERS.issuperset(classes) or all(name.rstrip("0123456789") in SPLIT_NAMES for name in classes)


@dataclass
class _Tree:
    """The content of one split: images by class folder, loose images, other files."""

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


def is_image_folder(where: str) -> bool:
    """True for any folder: this format stands behind all other folder formats."""
    return is_folder(Path(where))


def open_folder(where: str, options: OpenOptions) -> DatasetSplits:
    """Read the splits and classes of a folder."""
    labels = options.labels
    notes = [
        f"laid out as {DATASETS[name].title}: '{name}:{where}' has its official labels and splits"
        for name in (datasets_in(Path(where)) if labels != "folders" else ())
    ]
    root = where if labels == "folders" else _find_image_root(where, notes)
    split_paths = _split_folders(root)
    if split_paths:
        trees = {split: _read_tree(path) for split, path in split_paths.items()}
        beside = sorted(set(open_root(root).folders) - set(split_paths.values()))
        if beside:
            notes.append(f"Not read, beside the splits: {truncate_list([Path(path).name for path in beside])}.")
    else:
        trees = {"train": _read_tree(root)}
    if not any(tree.all_images() for tree in trees.values()):
        if locked := [path for tree in trees.values() for path in tree.unreadable]:
            raise permission_error(where, locked)
        raise UserError(f"{where} holds no images. Put class folders of images into it, or unlabelled images.")
    for split, tree in trees.items():
        if split != "train" and "train" in trees:
            _read_flat_split(tree, trees["train"])
        _note_leftovers(tree, notes)
    labelled = labels == "folders" or (labels == "auto" and _has_class_folders(trees, root, notes))
    if not labelled:
        splits: dict[str, ImageDataset] = {
            split: FileExamples(tree.all_images(), None, root) for split, tree in trees.items()
        }
        return DatasetSplits(Path(where).resolve().name, where, "unlabelled images", None, _ordered(splits), notes)
    names = _class_names(trees, options)
    splits = _labelled_splits(trees, names, root, notes)
    loose: dict[str, ImageDataset] = {split: FileExamples(tree.loose, None, root) for split, tree in trees.items()}
    name = Path(where).resolve().name
    return DatasetSplits(name, where, "class folders", tuple(names), _ordered(splits), notes, _ordered(loose))


def _find_image_root(where: str, notes: list[str]) -> str:
    """Enter the only folder that holds images, as ``flowers/jpg/``, or ``camvid/images/`` beside ``masks/``."""
    root, seen = where, set()
    while True:
        seen.add(identity_of(root))
        listing = open_root(root)
        if listing.images or _split_folders(root):
            return root
        chosen = [path for path in listing.folders if Path(path).name.lower() in _IMAGE_FOLDERS]
        rest = [p for p in listing.folders if Path(p).name.lower() not in _BESIDE_IMAGES and p not in chosen]
        if len(listing.folders) > 1 and (len(chosen) != 1 or rest):
            return root
        only = chosen or listing.folders
        if len(only) != 1 or identity_of(only[0]) in seen:
            return root
        root = only[0]
        notes.append(f"Read {root}, the only folder of images in {where}.")


def _split_folders(root: str) -> dict[str, str]:
    """Return the folders named train, val, test …; empty if such a name is one class among others."""
    listing = open_root(root)
    paths: dict[str, str] = {}
    for path in listing.folders:
        split = SPLIT_NAMES.get(Path(path).name.lower())
        if split in paths:
            names = f"'{Path(paths[split]).name}' and '{Path(path).name}'"
            raise UserError(f"{root} has both {names}. Leave only one of them as {split}.")
        if split:
            paths[split] = path
    beside = len(listing.folders) - len(paths)
    if list(paths) == ["train"] and beside and not open_root(paths["train"]).folders:
        return {}  # a class of trains among other classes
    return paths if "train" in paths or (not beside and not listing.images) else {}


def _read_tree(path: str) -> _Tree:
    entries = open_root(path)
    tree = _Tree(path, loose=entries.images, others=list(entries.others))
    above = frozenset({identity_of(path)})
    for folder in entries.folders:
        listing = list_images(folder, above)
        tree.others += listing.others
        tree.unreadable += listing.unreadable
        if listing.images:
            tree.classes[Path(folder).name] = listing
        elif not listing.others and not listing.unreadable:
            tree.empty.append(Path(folder).name)
    return tree


def _read_flat_split(tree: _Tree, train: _Tree) -> None:
    """Read a split whose images are all in one folder ``images``, with labels from a list if there is one.

    Tiny ImageNet's val has this layout: ``val_annotations.txt`` holds "file, class, box" separated by tabs.
    """
    if len(tree.classes) != 1 or not (_IMAGE_FOLDERS - {*map(str.lower, train.classes)}) & {
        *map(str.lower, tree.classes)
    }:
        return
    listing = next(iter(tree.classes.values()))
    tree.classes, tree.loose = {}, tree.loose + listing.images
    lists = [path for path in tree.others if Path(path).name == "val_annotations.txt"]
    if lists:
        rows = [line.split("\t") for line in Path(lists[0]).read_text(encoding="utf-8", errors="replace").splitlines()]
        label = {row[0]: row[1] for row in rows if len(row) > 1}
        for path in listing.images:
            tree.classes.setdefault(label.get(Path(path).name, "unlisted"), Listing()).images.append(path)
        tree.loose = []


def _has_class_folders(trees: dict[str, _Tree], root: str, notes: list[str]) -> bool:
    """Decide whether the folders of train (of all splits, if there is no train) are classes."""
    decisive = [trees["train"]] if "train" in trees else list(trees.values())
    loose = sum(len(tree.loose) for tree in decisive)
    inside = sum(tree.in_folders for tree in decisive)
    direct = sum(listing.direct for tree in decisive for listing in tree.classes.values())
    folders = {name for tree in decisive for name in (*tree.classes, *tree.empty)}
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
            f"{root}: most images are more than one folder deep, so read as unlabelled. Class folders must hold their "
            "images directly: move the images up, list them in a CSV (path,label), or use the top folders as classes "
            f"with 'frugalvit data pack {console.shell_quote(root)} PACKED --labels folders'."
        )
        return False
    return True


def _class_names(trees: dict[str, _Tree], options: OpenOptions) -> list[str]:
    """Return the sorted classes of the splits that define them (of all splits, if none of these is present)."""
    decisive = [trees[split] for split in options.class_splits if split in trees] or list(trees.values())
    names = sorted({name for tree in decisive for name in (*tree.classes, *tree.empty)})
    if not names:
        raise UserError(f"{decisive[0].path} has no class folders.")
    for split, tree in trees.items():
        unknown = sorted(set(tree.classes) - set(names))
        if unknown and not options.allow_extra:
            raise unknown_classes(tree.path, decisive[0].path, unknown, split)
    return names


def unknown_classes(where: str, train: str, unknown: Sequence[str], split: str) -> UserError:
    """Return the error for a split with classes that train lacks."""
    advice = "Move them, or pass --split remake." if split == "val" else "Move or remove them."
    return UserError(
        f"{where} has {pluralize(len(unknown), 'class')} that {train} lacks: {truncate_list(unknown)}. {advice}"
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
        names = truncate_list([Path(path).name for path in tree.others])
        notes.append(f"{tree.path}: {pluralize(len(tree.others), 'file')} without an image: {names}.")
    if tree.unreadable:
        notes.append(f"{tree.path}: no permission to read {truncate_list(tree.unreadable)}.")


def _ordered(splits: dict[str, ImageDataset]) -> dict[str, ImageDataset]:
    return {split: splits[split] for split in ("train", "val", "test") if split in splits and len(splits[split])}


# Left behind by file managers and archivers.
_LITTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"})


@dataclass
class Folder:
    """The entries of one folder as full paths, sorted by name."""

    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass
class Listing:
    """All images in and below a folder; ``direct`` counts those in the folder itself or in its folder ``images``."""

    images: list[str] = field(default_factory=list)
    direct: int = 0
    others: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def list_folder(path: str) -> Folder:
    """List one folder without hidden files and litter. Raises OSError."""
    result = Folder()
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _LITTER:
                continue
            if entry.is_dir():
                result.folders.append(entry.path)
            elif _is_image_entry(entry):
                result.images.append(entry.path)
            else:
                result.others.append(entry.path)
    result.folders.sort()
    result.images.sort()
    result.others.sort()
    return result


def list_images(path: str, above: frozenset[tuple[int, int]] = frozenset()) -> Listing:
    """List all images below ``path``. A folder that several links reach, or one in ``above``, is listed once."""
    listing, seen, waiting = Listing(), set(above), [path]
    while waiting:
        here = waiting.pop()
        try:
            identity = identity_of(here)
            if identity in seen:
                continue
            seen.add(identity)
            entries = list_folder(here)
        except OSError:
            listing.unreadable.append(here)
            continue
        if here == path or here == f"{path}{os.sep}images":  # Tiny ImageNet has this folder in every class folder
            listing.direct += len(entries.images)
        listing.images += entries.images
        listing.others += entries.others
        waiting += reversed(entries.folders)
    listing.images.sort()
    return listing


def identity_of(folder: str) -> tuple[int, int]:
    """Identify a folder independently of the path that leads to it."""
    status = Path(folder).stat()
    return status.st_dev, status.st_ino


def open_root(path: str) -> Folder:
    """List a folder that the user named. Raises ``UserError`` if it cannot be read."""
    try:
        return list_folder(path)
    except PermissionError:
        raise UserError(f"No permission to read {path}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None


def permission_error(where: str, unreadable: Sequence[str]) -> UserError:
    """Return the error for a folder without images if some of its folders are unreadable."""
    return UserError(f"{where} holds no readable images: no permission to read {truncate_list(unreadable)}.")


def _is_image_entry(entry: os.DirEntry[str]) -> bool:
    stem, dot, extension = entry.name.rpartition(".")
    if dot and stem:
        # A dead link counts: reading it reports a missing file.
        return f".{extension.lower()}" in EXTENSIONS and (entry.is_file() or entry.is_symlink())
    if not entry.is_file():
        return False
    try:
        with Path(entry.path).open("rb") as file:
            return has_image_signature(file.read(16))
    except OSError:
        return False
