"""Folders of images: with or without train/val/test folders, with class folders or unlabelled images.

If a layout is ambiguous, the notes explain how it was read.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.decode import ARRAYS, EXTENSIONS
from frugalvit.data.formats.base import OpenOptions
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import read_user_text
from frugalvit.utils.text import pluralize, truncate_list

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
_UNLABELLED_FOLDERS = frozenset({"unlabelled", "unlabeled"})  # beside class folders: not a class
_MASK_WORDS = ("mask", "annot", "label", "segm")
_IMAGE_FOLDERS = frozenset({"images", "image", "imgs", "img", "jpegimages", "pngimages", "photos"})
_VOC_FOLDERS = frozenset({"JPEGImages", "SegmentationClass", "SegmentationObject"})
# Files and folders that file managers and archivers leave behind.
_LITTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"})


def are_layout_folders(classes: Sequence[str]) -> bool:
    """True if the class names are folders of COCO (train2017, val2017) or of VOC (JPEGImages …)."""
    return _VOC_FOLDERS.issuperset(classes) or all(name.rstrip("0123456789") in SPLIT_NAMES for name in classes)


class Folder(NamedTuple):
    """The folders and images in one folder as full paths, sorted by name."""

    folders: list[str]
    images: list[str]


@dataclass
class _Tree:
    """The content of one split: images by class folder, empty class folders, images outside class folders.

    unlabelled: the images of a folder with this name
    """

    path: str
    classes: dict[str, list[str]]
    empty: list[str]
    loose: list[str]
    unlabelled: list[str] = field(default_factory=list)

    def in_folders(self) -> list[str]:
        return [path for images in self.classes.values() for path in images]

    def all_images(self) -> list[str]:
        return self.loose + self.unlabelled + self.in_folders()


def open_folder(where: str, options: OpenOptions) -> DatasetSplits:
    notes: list[str] = []
    root, trees = where, _read_trees(where)
    if options.labels != "folders":
        while (inner := _inner_folder(root, trees)) is not None:
            masks = [name for name in trees["train"].classes if name != Path(inner).name]
            reason = f"{truncate_list(masks)} beside it holds masks" if masks else "the only folder of images"
            notes.append(f"Read {inner}; {reason}.")
            root, trees = inner, _read_trees(inner)
        _separate_unlabelled(trees, root)
    if not any(tree.all_images() for tree in trees.values()):
        raise UserError(
            f"{where} holds no images. Put class folders of images into it, or unlabelled images. Unpack archives "
            "first. For a known dataset in its original files, write NAME:FOLDER, for example cifar100:FOLDER."
        )
    for split, tree in trees.items():
        if split != "train" and "train" in trees:
            _read_flat_split(tree, trees["train"])
    name = Path(where).resolve().name
    splits: dict[str, ImageDataset] = {}
    loose: dict[str, ImageDataset] = {}
    if options.labels == "ignore" or (options.labels == "auto" and not _has_class_folders(trees, root, notes)):
        for split, tree in trees.items():
            splits[split] = FileExamples(tree.all_images(), None, root)
        return DatasetSplits(name, where, "unlabelled images", None, splits, notes)
    classes = _class_names(trees, options)
    empty = sorted({name for tree in trees.values() for name in tree.empty} - set(classes))
    if empty:
        notes.append(f"warning: {pluralize(len(empty), 'empty class folder')} left out: {truncate_list(empty)}.")
    for split, tree in trees.items():
        parts = [tree.classes.get(label, []) for label in classes]
        labels = np.repeat(np.arange(len(classes)), [len(part) for part in parts])
        splits[split] = FileExamples([path for part in parts for path in part], labels, root)
        loose[split] = FileExamples(tree.loose + tree.unlabelled, None, root)
    return DatasetSplits(name, where, "class folders", tuple(classes), splits, notes, loose)


def _read_trees(root: str) -> dict[str, _Tree]:
    return {split: _read_tree(path) for split, path in (_split_folders(root) or {"train": root}).items()}


def _inner_folder(root: str, trees: dict[str, _Tree]) -> str | None:
    """Return the only folder of images, such as ``flowers/jpg/``, or ``camvid/images/`` beside ``masks/``."""
    tree = trees.get("train")
    if tree is None or tree.path != root or tree.loose:
        return None
    names = list(tree.classes)
    if any(name.lower() in _IMAGE_FOLDERS for name in names):
        names = [name for name in names if not any(word in name.lower() for word in _MASK_WORDS)]
    return os.path.join(root, names[0]) if len(names) == 1 else None  # noqa: PTH118


def _split_folders(root: str) -> dict[str, str]:
    """Return the folders named train, val, test …; empty if such a name is a class."""
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
    above = frozenset({_folder_id(path)})
    listings = {Path(folder).name: list_images(folder, above) for folder in entries.folders}
    classes = {name: images for name, images in listings.items() if images}
    empty = [name for name in listings if name not in classes and not any(Path(path, name).iterdir())]
    return _Tree(path, classes, empty, entries.images)


def _separate_unlabelled(trees: dict[str, _Tree], root: str) -> None:
    """Take the folder ``unlabelled`` out of the classes of each split; in ``root`` it may be beside train, too."""
    for tree in trees.values():
        for name in [name for name in (*tree.classes, *tree.empty) if name.lower() in _UNLABELLED_FOLDERS]:
            tree.unlabelled += tree.classes.pop(name, [])
            tree.empty = [other for other in tree.empty if other != name]
    has_splits = "train" in trees and trees["train"].path != root
    for folder in open_root(root).folders if has_splits else ():
        if Path(folder).name.lower() in _UNLABELLED_FOLDERS:
            trees["train"].unlabelled += list_images(folder)


def _read_flat_split(tree: _Tree, train: _Tree) -> None:
    """Read Tiny ImageNet's val and test: a folder ``images``, and classes in ``val_annotations.txt``."""
    if list(tree.classes) != ["images"] or "images" in train.classes:
        return
    images = tree.classes.pop("images")
    annotations = Path(tree.path) / "val_annotations.txt"  # "file, class, box", separated by tabs
    if not annotations.exists():
        tree.loose = tree.loose + images
        return
    rows = [line.split("\t") for line in read_user_text(annotations, errors="replace").splitlines()]
    label = {row[0]: row[1] for row in rows if len(row) > 1}
    for path in images:
        tree.classes.setdefault(label.get(Path(path).name, "unlisted"), []).append(path)


def _has_class_folders(trees: dict[str, _Tree], root: str, notes: list[str]) -> bool:
    """Decide whether the folders of train (of all splits, if there is no train) are classes."""
    decisive = [trees["train"]] if "train" in trees else list(trees.values())
    loose = sum(len(tree.loose) for tree in decisive)
    inside = sum(len(tree.in_folders()) for tree in decisive)
    direct = sum(_is_direct(path, tree.path) for tree in decisive for path in tree.in_folders())
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
            f"with 'frugalvit data pack {console.shell_quote(root)} PACKED --label-source folders'."
        )
        return False
    return True


def _class_names(trees: dict[str, _Tree], options: OpenOptions) -> list[str]:
    """Return the sorted classes of train, or of all splits if there is no train."""
    decisive = [trees["train"]] if "train" in trees else list(trees.values())
    names = sorted({name for tree in decisive for name in tree.classes})
    if not names:
        raise UserError(f"{decisive[0].path} has no class folders.")
    for tree in trees.values():
        unknown = sorted(set(tree.classes) - set(names))
        if unknown and not options.allow_extra:
            raise unknown_classes(tree.path, decisive[0].path, unknown)
    return names


def unknown_classes(where: str, train: str, unknown: Sequence[str]) -> UserError:
    count = pluralize(len(unknown), "class")
    return UserError(f"{where} has {count} that {train} lacks: {truncate_list(unknown)}. Move or remove them.")


def open_root(path: str) -> Folder:
    """List the folders and images in a folder, without hidden files and litter. Raises ``UserError``."""
    result, arrays = Folder([], []), []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.lower() in _LITTER:
                    continue
                if entry.is_dir():
                    result.folders.append(entry.path)
                elif (suffix := os.path.splitext(entry.name)[1].lower()) in ARRAYS:  # noqa: PTH122  (faster than pathlib)
                    arrays.append(entry.path)
                # A broken link counts: reading it reports a missing file.
                elif suffix in EXTENSIONS and (entry.is_file() or entry.is_symlink()):
                    result.images.append(entry.path)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
    return Folder(sorted(result.folders), sorted(result.images or arrays))


def list_images(path: str, above: frozenset[tuple[int, int]] = frozenset()) -> list[str]:
    """List all images below ``path``, sorted. Each folder is listed once; folders in ``above`` are skipped."""
    images, seen, waiting = [], set(above), [path]
    while waiting:
        here = waiting.pop()
        entries = open_root(here)
        if (identity := _folder_id(here)) in seen:
            continue
        seen.add(identity)
        images += entries.images
        waiting += entries.folders
    return sorted(images)


def _is_direct(path: str, root: str) -> bool:
    """True for an image in a class folder of ``root``, or in its folder ``images``, as in Tiny ImageNet."""
    _, *inner, _ = path.removeprefix(root).strip(os.sep).split(os.sep)  # noqa: PTH206  (faster than pathlib)
    return inner in ([], ["images"])


def _folder_id(folder: str) -> tuple[int, int]:
    """Identify a folder independently of the path that leads to it."""
    status = Path(folder).stat()
    return status.st_dev, status.st_ino
