"""``open_data``: open a dataset by its path or name, with labels and splits."""

import contextlib
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import DatasetSplits, ImageDataset, spread
from frugalvit.data.decode import PHOTO, PixelFormat
from frugalvit.data.formats.base import OpenOptions
from frugalvit.data.formats.csv import split_columns
from frugalvit.data.formats.named_catalog import DATASETS
from frugalvit.data.formats.registry import find_format
from frugalvit.data.paths import is_file, is_folder, local
from frugalvit.data.splits import add_missing_splits, handle_unlabelled
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.files import read_user_text, utf8_safe
from frugalvit.utils.text import pluralize, truncate_list

_INVISIBLE = re.compile("[\u034f\u115f\u1160\ufe00-\ufe0f]")  # joiners, fillers and variants that count as letters
_HEADERS = 16  # files of a split whose headers decide how its images are read


def open_data(
    data: str | Path,
    *,
    split: str = "auto",
    seed: int = 0,
    val_fraction: float = 0.1,
    labels: str = "auto",
    classes: str | Path | Sequence[str] | None = None,
    root: str | Path | None = None,
    loose: bool = False,
    target: str = "auto",
) -> DatasetSplits:
    """Open a dataset of any supported format (``data/formats/registry.py``).

    Args:
        data: a folder (class folders, with or without train/val/test, or unlabelled images), a CSV, TSV or JSONL,
            shards (``"shards/{000..009}.tar"``), a known dataset (``cifar100:folder``), or ``hf:name:config``.
        split: "auto" takes a missing val from train, "given" changes nothing, "train+val" trains on both.
        seed: decides which images a new val split holds.
        val_fraction: the share of every class that a new val split takes.
        labels: "auto" decides if folders are classes, "folders" takes all folders as classes, "ignore" reads no labels.
        classes: use only these classes: names, or a file with one name per line (as ImageNet-100's list).
        root: the folder of named datasets; by default $FRUGALVIT_DATASETS or ~/.cache/frugalvit/datasets.
        loose: return images without a label in ``DatasetSplits.loose``; otherwise they are left out.
        target: "class": one label per image; "labels": several, as ``cat|dog`` or a JSON list in a table, or objects;
            "number": a number in a table; "auto": labels if a table has JSON lists, else class.
    """
    if not isinstance(data, str | os.PathLike) or not str(data):
        got = "an empty string" if isinstance(data, str) else f"a {type(data).__name__}"
        raise UserError(f"Expected the path or name of a dataset, got {got}. For images in memory use fv.save_data.")
    if labels not in ("auto", "folders", "ignore"):
        raise UserError(f"labels = '{labels}': choose auto, folders or ignore.")
    if target not in ("auto", *_TARGETS):
        raise UserError(f"target = '{target}': choose auto, class, labels or number.")
    path = local(str(data))
    location = str(path) if is_file(path) or is_folder(path) else str(data)
    wanted = read_class_names(classes)
    options = OpenOptions(
        # Selecting classes needs the labels, even if they are removed afterwards.
        labels="auto" if labels == "ignore" and wanted is not None else labels,
        allow_extra=wanted is not None,
        root=root,
        target=target,
    )
    source = _open(location, options)
    if labels != "ignore" and target not in ("auto", source.target):
        raise UserError(f"--target {target} needs {_TARGETS[target]}. {location} has no such labels.")
    _set_pixel_format(source)
    if wanted is None:
        check_class_names(source)
    else:
        source = _select_classes(source, wanted, location)
    if labels == "ignore":
        source = without_labels(source)
    source = handle_unlabelled(source, keep=loose and wanted is None)
    return add_missing_splits(source, split, val_fraction, seed)


_TARGETS = {
    "class": "one label per image",
    "labels": "a table with labels (a|b in a CSV, or JSON lists) or a folder with boxes",
    "number": "a table with a number per image (table.csv:label=COLUMN names its column)",
}


def _set_pixel_format(source: DatasetSplits) -> None:
    """Decide how the images of a dataset are read, by the headers of a few files."""
    examples: dict[PixelFormat, str] = {}
    for part in (*source.splits.values(), *source.loose.values()):
        for index in spread(len(part), _HEADERS):
            with contextlib.suppress(UnreadableImage):
                examples.setdefault(part.stored_format(index), part.names[index])
    kinds = "; ".join(f"{name}: {pixels}" for pixels, name in examples.items())
    if examples.keys() - {PHOTO, PixelFormat("float32", 1)} and len(examples) > 1:
        raise UserError(f"{source.location} holds images of different kinds: {kinds}. Convert them to one kind.")
    if len(examples) > 1:
        source.notes.append(f"All images are read as {PHOTO}, because they differ: {kinds}.")
    elif examples.keys() - {PHOTO}:
        pixels = next(iter(examples))
        for group in (source.splits, source.loose):
            group.update({name: part.with_pixels(pixels) for name, part in group.items()})
        source.notes.append(
            f"The images hold {pixels}, which stay as they are. Mean and deviation of the training images normalize "
            "them, and augmentation leaves out operations on colours."
        )


def check_class_names(source: DatasetSplits) -> DatasetSplits:
    """Refuse class names that look the same, and note those that differ only in upper and lower case."""
    seen: dict[str, str] = {}
    for name in source.classes or ():
        plain = unicodedata.normalize("NFKC", name)
        shown = (sign for sign in plain if sign.isspace() or unicodedata.category(sign) not in ("Cc", "Cf"))
        visible = _INVISIBLE.sub("", "".join(shown))
        before = seen.setdefault(" ".join(visible.split()).casefold(), name)
        if before == name:
            continue
        if before.casefold() != name.casefold():
            raise UserError(
                f"{source.location} has two classes that look the same: {before!a} and {name!a}. Merge them, or name "
                "both in --classes FILE."
            )
        source.notes.append(
            f"The classes {before!r} and {name!r} differ only in upper and lower case. Is it one class?"
        )
    return source


def without_labels(source: DatasetSplits) -> DatasetSplits:
    for examples in source.splits.values():
        examples.labels = examples.targets = None
    source.classes = None
    return source


def _open(location: str, options: OpenOptions) -> DatasetSplits:
    if options.target == "labels" and (Path(location).is_dir() or location.endswith(".json")):
        from frugalvit.data.formats.coco import open_box_labels

        return open_box_labels(location)
    data_format = find_format(location)
    if data_format is not None:
        return data_format.open(location, options)
    table, columns = split_columns(location)
    if columns and not is_file(table):
        raise UserError(f"There is no table {table} (for '{location}').")
    if not (is_file(location) or is_folder(Path(location))):
        hint = did_you_mean(location, DATASETS)
        raise UserError(
            f"No folder, file or known dataset '{location}'.{hint} 'frugalvit list datasets' shows the names."
        )
    raise UserError(
        f"{location} has no format that frugalvit reads. Give a folder, a table (.csv …) or a shard (.tar). Unpack "
        "other archives first."
    )


def _select_classes(source: DatasetSplits, wanted: Sequence[str], location: str) -> DatasetSplits:
    if any(examples.targets is not None for examples in source.splits.values()):
        raise UserError(f"{location} has several labels per image: --classes needs one. Remove the option.")
    if source.classes is None:
        raise UserError(f"{location} has no labels, so --classes cannot select any. Remove the option.")
    requested = {utf8_safe(name) for name in wanted}
    missing = sorted(requested - set(source.classes))
    if missing:
        hint = did_you_mean(missing[0], source.classes)
        raise UserError(f"{location} lacks {len(missing)} of the classes of --classes: {truncate_list(missing)}.{hint}")
    names = [name for name in source.classes if name in requested]
    if len(names) == len(source.classes):
        return source
    new_label = np.full(len(source.classes), -1)
    new_label[[source.classes.index(name) for name in names]] = np.arange(len(names))
    selected: dict[str, ImageDataset] = {}
    notes = [*source.notes, f"Using only the {pluralize(len(names), 'class')} of --classes."]
    for split, examples in source.splits.items():
        assert examples.labels is not None
        part = examples.subset(new_label[examples.labels] >= 0)
        assert part.labels is not None
        part.labels = new_label[part.labels]
        if len(part):
            selected[split] = part
        else:
            notes.append(f"{split} has no image of these classes: left out.")
    return replace(source, classes=tuple(names), splits=selected, notes=notes)


def read_class_names(classes: str | Path | Sequence[str] | None) -> list[str] | None:
    """Return the class names of --classes: a list, or a file with one name per line."""
    if classes is None:
        return None
    if isinstance(classes, str | Path):
        lines = read_user_text(local(classes), "utf-8-sig").splitlines()
        classes = [line.strip() for line in lines if line.strip()]
    if not classes:
        raise UserError("The list of classes is empty.")
    return list(classes)
