"""``open_data``: a path or a name -> images by split, with their labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from frugalvit.data import splits
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.formats import folder as folders
from frugalvit.data.formats import table
from frugalvit.data.formats.folder import base, open_root
from frugalvit.data.paths import local
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.text import pluralize

_ROWS = (".parquet", ".arrow")


def open_data(
    where: str | Path,
    *,
    split: str = "auto",
    seed: int = 0,
    val_fraction: float = 0.1,
    labels: str = "auto",
    classes: str | Path | Sequence[str] | None = None,
    root: str | Path | None = None,
    loose: bool = False,
) -> DatasetSplits:
    """Open a dataset, whatever it is.

    Args:
        where: a folder of class folders (with or without train/val/test), a folder of unlabelled images, a CSV, TSV or
            JSONL of paths and labels, WebDataset shards (``"shards/{000..009}.tar"``), a dataset that torchvision
            knows (``cifar100``, ``cifar100:folder``, or that folder), or one of Hugging Face's (``hf:name``,
            ``hf:name:config``).
        split: "auto" makes a missing val from train, "given" makes nothing, "train+val" trains on both, "remake" splits
            their union anew.
        seed: decides which examples a made val holds.
        val_fraction: its share of every class.
        labels: "auto" decides whether folders mean classes, "folders" insists, "ignore" reads none.
        classes: keep only these classes: names, or a file with one name per line (ImageNet-100's list).
        root: where datasets with a name lie; by default $FRUGALVIT_DATASETS or ~/.cache/frugalvit/datasets.
        loose: keep images without a label that lie beside class folders, as ``DatasetSplits.loose``; else leave them out.
    """
    if not isinstance(where, str | os.PathLike) or not str(where):
        what = "An empty text" if isinstance(where, str) else f"A {type(where).__name__}"
        raise UserError(f"{what} is no dataset: give a path or a name; fv.save_data writes images in memory as one.")
    place = str(where)
    if labels not in ("auto", "folders", "ignore"):
        raise UserError(f"labels = '{labels}': choose auto, folders or ignore.")
    wanted = class_names(classes)
    # Choosing among classes needs the labels that are forgotten afterwards.
    read = "auto" if labels == "ignore" and wanted is not None else labels
    source = _open(place, read, wanted, root, ("train", "val") if split == "remake" else ("train",))
    if wanted is not None:
        source = _only_classes(source, wanted, place)
    if labels == "ignore":
        source = without_labels(source)
    source = splits.handle_unlabelled(source, keep=loose and wanted is None)  # who names classes wants no others
    return splits.add_missing_splits(source, split, val_fraction, seed)


def without_labels(source: DatasetSplits) -> DatasetSplits:
    """The same images, their labels forgotten."""
    for examples in source.splits.values():
        examples.labels = examples.targets = None
    source.classes = None
    return source


def _only_classes(source: DatasetSplits, wanted: Sequence[str], place: str) -> DatasetSplits:
    """The images of these classes alone; class folders come here with no others left, and stay as they are."""
    if any(examples.targets is not None for examples in source.splits.values()):
        raise UserError(f"{place} has several labels per image: its classes cannot be chosen, leave --classes out.")
    if source.classes is None:
        raise UserError(f"{place} has no labels, so there are no classes to choose: leave --classes out.")
    names = folders.chosen_classes(place, source.classes, _as_classes(wanted, source.classes))
    if len(names) == len(source.classes):
        return source
    new = np.full(len(source.classes), -1)
    new[[source.classes.index(name) for name in names]] = np.arange(len(names))
    kept: dict[str, ImageDataset] = {}
    notes = [*source.notes, f"Kept the {pluralize(len(names), 'class')} asked for."]
    for split, examples in source.splits.items():
        assert examples.labels is not None
        part = examples.subset(new[examples.labels] >= 0)
        assert part.labels is not None
        part.labels = new[part.labels]
        if len(part):
            kept[split] = part
        else:
            notes.append(f"{split} has no image of these classes: left out.")
    return replace(source, classes=tuple(names), splits=kept, notes=notes)


def _open(
    place: str, labels: str, classes: Sequence[str] | None, root: str | Path | None, classes_from: Sequence[str]
) -> DatasetSplits:
    if place.startswith("hf:"):
        from frugalvit.data.formats import huggingface

        return huggingface.open_hub(place)
    from frugalvit.data.formats import named
    from frugalvit.data.webdataset import shards

    if shards.is_shards(place):
        return shards.open_shards(place)
    path = local(place)
    kind = _kind(path)
    if kind == "folder":
        return _open_folder(path, labels, classes, classes_from)
    if kind == "file":
        return _open_file(path, labels, classes_from)
    name, _, folder = place.partition(":")
    if name.lower() in named.DATASETS:
        return named.open_named(name.lower(), local(folder) if folder else root)
    raise UserError(_not_found(place))


def _open_folder(path: Path, labels: str, classes: Sequence[str] | None, classes_from: Sequence[str]) -> DatasetSplits:
    from frugalvit.data.formats import huggingface, named, named_catalog
    from frugalvit.data.webdataset import shards

    if huggingface.is_saved(path):
        return huggingface.open_saved(path)
    if shards.is_shard_folder(path):
        return shards.open_shards(str(path))
    lists = table.find_lists(path)
    if lists is not None:
        return table.open_lists(*lists, labels)
    known = named_catalog.datasets_in(path) if labels != "folders" else []
    if known and not _has_images(str(path)):
        if len(known) > 1:
            choices = ", ".join(f"{name}:{path}" for name in known)
            raise UserError(f"{path} holds several datasets: choose one of {choices}.")
        return named.open_named(known[0], path)
    if classes is not None:
        classes = _as_classes(classes, _class_folders(str(path), labels))
    source = folders.open_folder(str(path), labels, classes, classes_from)
    titles = {name: named_catalog.DATASETS[name].title for name in known}
    ways = [f"laid out as {title}: '{name}:{path}' has its makers' labels and splits" for name, title in titles.items()]
    return replace(source, notes=[*ways, *source.notes])


def _has_images(where: str) -> bool:
    """Whether a folder has image files, in class folders or loose; a dataset's arrays are none."""
    try:
        return any(map(len, folders.open_folder(where, "ignore", None, ("train",)).splits.values()))
    except UserError:
        return False


def _class_folders(where: str, labels: str) -> list[str]:
    """The names that classes may have there, as ``open_folder`` will look for them; no image is listed for it."""
    root = where if labels == "folders" else folders.descend(where, [])
    parts = list(folders.split_folders(root).values()) or [root]
    return [base(folder) for part in parts for folder in open_root(part).folders]


def _open_file(path: Path, labels: str, classes_from: Sequence[str]) -> DatasetSplits:
    suffix = path.suffix.lower()
    if suffix in table.SUFFIXES:
        return table.open_table(str(path), labels, classes_from)
    if suffix in _ROWS:
        from frugalvit.data.formats import huggingface

        return huggingface.open_saved(path)
    known = ", ".join((*table.SUFFIXES, *_ROWS, ".tar"))
    if suffix in (".zip", ".gz", ".tgz", ".rar", ".7z"):
        raise UserError(f"{path} is an archive: unpack it and give the folder.")
    raise UserError(f"{path} is a single file of an unknown kind: give a folder, or a table or shard ({known}).")


def is_dataset_file(where: str) -> bool:
    """Whether a file is one that ``open_data`` reads images from, and not an image itself."""
    from frugalvit.data.webdataset import shards

    return shards.is_shards(where) or local(where).suffix.lower() in (*table.SUFFIXES, *_ROWS)


def _kind(path: Path) -> str:
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else "nothing"
    except OSError:  # a name too long to be a path, or no permission on the way
        return "nothing"


def class_names(classes: str | Path | Sequence[str] | None) -> list[str] | None:
    """The names of the classes to keep: as given, or the lines of a file."""
    if classes is None:
        return None
    if isinstance(classes, str | Path):
        try:
            lines = local(classes).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{classes} cannot be read as a list of class names, one per line.") from None
        classes = _each_once(classes, lines)
    if not classes:
        raise UserError("The list of classes is empty.")
    return list(classes)


def _each_once(file: str | Path, lines: Sequence[str]) -> list[str]:
    """The lines that hold something. One that comes twice may be a slip for a class that is missing now."""
    numbers: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and (first := numbers.setdefault(line, number)) != number:
            raise UserError(
                f"{file} names the class '{line}' twice, in lines {first} and {number}: remove one of them."
            )
    return list(numbers)


def classes_in_shards(where: str, file: str | None) -> list[str] | None:
    """The classes to keep of shards that are read in passing; where no index names them all, in either reading."""
    from frugalvit.data.webdataset import shards

    wanted = class_names(file)
    if wanted is None or all(len(line.split()) == 1 for line in wanted):
        return wanted
    index = shards.list_shards(where).index
    if index is not None and index.classes is not None:
        return _as_classes(wanted, index.classes)
    return list(dict.fromkeys([*wanted, *(line.split()[0] for line in wanted)]))


def _as_classes(wanted: Sequence[str], present: Sequence[str]) -> list[str]:
    """Whole lines are names; of one that is none, the first word: lists carry descriptions, "n01558993 robin".

    ``UserError`` where two lines mean one class.
    """
    known = {utf8_safe(name) for name in present}

    def name_in(line: str) -> str:
        first = line.split()[0] if line.strip() else line
        return first if utf8_safe(line) not in known and utf8_safe(first) in known else line

    lines: dict[str, str] = {}
    for line in wanted:
        name = name_in(line)
        if (first := lines.setdefault(name, line)) != line:
            raise UserError(
                f"Two lines of the list of classes mean the class '{name}', '{first}' and '{line}': remove one of them."
            )
    return list(lines)


def _not_found(place: str) -> str:
    from frugalvit.data.formats import named

    hint = did_you_mean(place, named.DATASETS)
    parent = local(place).parent
    if not hint and _kind(parent) == "folder" and os.access(parent, os.R_OK):
        hint = did_you_mean(Path(place).name, sorted(entry.name for entry in parent.iterdir()))
    return f"There is no folder, file or known dataset '{place}'.{hint} 'frugalvit list datasets' shows the names."
