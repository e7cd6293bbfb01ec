"""Open a dataset by its name: torchvision downloads and reads it, or files that were put in place by hand are read."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.data.dataset import ArrayExamples, DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.formats import folder as folders
from frugalvit.data.formats import table
from frugalvit.data.formats.named_catalog import DATASETS, Known, dataset_status
from frugalvit.data.formats.named_catalog import list_datasets as list_datasets
from frugalvit.data.paths import datasets_root
from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError
from frugalvit.utils import console

_Parts = tuple[Sequence[str], dict[str, ImageDataset]]
_SPLIT_SEED = 0  # of the splits that a dataset's makers left open: fixed, so that results compare


def open_named(name: str, root: str | Path | None = None) -> DatasetSplits:
    """The splits of a dataset as its makers defined them, downloaded first where that is possible and needed."""
    known, home = DATASETS[name], datasets_root(root)
    state, instruction = dataset_status(name, home)
    if state == "by hand":
        raise UserError(f"{known.title} is not in {home} and cannot be downloaded: {instruction}.")
    if state == "downloadable":
        _download(name, known, home)
    notes: list[str] = []
    if name in _OWN:
        return _OWN[name](home, notes)
    try:
        classes, splits = (_SPECIAL.get(name) or _from_torchvision)(name, known, home, notes)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{known.title} in {home} cannot be read ({_short(error)}). Move it away to have it downloaded again."
        ) from None
    return _sorted_source(name, home, classes, splits, notes)


def _download(name: str, known: Known, home: Path) -> None:
    """Into a folder of its own first, so that a broken download never looks like a dataset."""
    staging = home / ".incomplete" / f"{name}.{os.getpid()}"  # several processes may start at once
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"Cannot write to {home} ({error.strerror}): set FRUGALVIT_DATASETS to another folder."
        ) from None
    console.info(f"downloading {known.title} to {home}")
    try:
        # torchvision talks on standard output, which belongs to results.
        with contextlib.redirect_stdout(sys.stderr):
            for arguments in known.splits.values():
                _make(known, staging, download=True, **arguments)
    except Exception as error:  # the network fails in many ways; the person needs one line
        what = " and ".join(str(home / mark) for mark in known.marks[:3])
        raise UserError(
            f"{known.title} cannot be downloaded ({_short(error)}). Without a network, bring it by hand: as "
            f"torchvision.datasets.{known.torchvision} lays it out, so that there is {what}."
        ) from None
    else:
        for entry in sorted(staging.iterdir()):
            if not (home / entry.name).exists():
                entry.rename(home / entry.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            staging.parent.rmdir()  # unless another process is still downloading there


def _make(known: Known, root: Path, **arguments: Any) -> Any:
    from torchvision import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(datasets, known.torchvision)(str(root), **arguments)


def _from_torchvision(name: str, known: Known, home: Path, notes: list[str]) -> _Parts:
    classes: Sequence[str] = ()
    splits: dict[str, ImageDataset] = {}
    for split, arguments in known.splits.items():
        dataset = _make(known, home, **arguments)
        splits[split] = _examples(dataset, f"{name}/{split}", str(home))
        classes = list(getattr(dataset, "classes", ()))
    if not classes:
        count = 1 + max(int(examples.labels.max()) for examples in splits.values() if examples.labels is not None)
        classes = [f"{number:0{len(str(count - 1))}d}" for number in range(count)]
    return classes, splits


def _examples(dataset: Any, name: str, home: str) -> ImageDataset:
    """Files or arrays, whichever a torchvision dataset holds."""
    for files, labels in (("_image_files", "_labels"), ("_images", "_labels")):
        if hasattr(dataset, files) and hasattr(dataset, labels):
            paths = [str(path) for path in getattr(dataset, files)]
            return FileExamples(paths, np.asarray(getattr(dataset, labels)), home)
    samples = getattr(dataset, "_samples", None) or getattr(dataset, "samples", None)
    if samples:
        return FileExamples([str(path) for path, _ in samples], np.array([int(label) for _, label in samples]), home)
    images = np.asarray(dataset.data)
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    return ArrayExamples(images, np.asarray(labels), name)


def _open_sun397(name: str, known: Known, home: Path, notes: list[str]) -> _Parts:
    """The first of the official partitions (50 + 50 images per class) where its lists lie beside the images."""
    dataset = _make(known, home)
    order = np.argsort([str(path) for path in dataset._image_files])
    everything = _examples(dataset, name, str(home)).subset(order)
    base = home / "SUN397"
    for folder in (base, base / "Partitions", home / "Partitions"):
        lists = {"train": folder / "Training_01.txt", "test": folder / "Testing_01.txt"}
        if all(path.is_file() for path in lists.values()):
            place = {key.removeprefix("SUN397/"): index for index, key in enumerate(everything.keys)}
            chosen = {split: path.read_text().split() for split, path in lists.items()}
            return dataset.classes, {
                split: everything.subset([place[line.strip("/")] for line in lines if line.strip("/") in place])
                for split, lines in chosen.items()
            }
    notes.append(f"{base} lacks Training_01.txt and Testing_01.txt: half of every class is taken for test instead.")
    held = hold_out(everything.keys, everything.labels, 0.5, _SPLIT_SEED)
    return dataset.classes, {"train": everything.subset(~held), "test": everything.subset(held)}


def _open_caltech101(name: str, known: Known, home: Path, notes: list[str]) -> _Parts:
    """30 images per class to train, the rest to test, the background class included, as Table 9 counts them."""
    source = folders.open_folder(str(home / "caltech101" / "101_ObjectCategories"), "folders")
    everything = source.splits["train"]
    assert everything.labels is not None
    assert source.classes is not None
    train = np.zeros(len(everything), dtype=bool)
    for number in range(len(source.classes)):
        members = np.flatnonzero(everything.labels == number)
        share = min(30 / len(members), 0.999)
        train[members[hold_out([everything.keys[i] for i in members], None, share, _SPLIT_SEED)]] = True
    notes.append("30 images of every class are for training, the others for testing (this dataset has no own split).")
    return source.classes, {"train": everything.subset(train), "test": everything.subset(~train)}


def _open_voc2007(name: str, known: Known, home: Path, notes: list[str]) -> _Parts:
    """Several objects per image: ``targets`` instead of labels, -1 where an object is too difficult to judge."""
    base = home / "VOCdevkit" / "VOC2007"
    lists = base / "ImageSets" / "Main"
    classes = sorted(path.name.removesuffix("_trainval.txt") for path in lists.glob("*_trainval.txt"))
    splits: dict[str, ImageDataset] = {}
    for split, part in (("train", "trainval"), ("test", "test")):
        stems = (lists / f"{part}.txt").read_text().split()
        examples = FileExamples([str(base / "JPEGImages" / f"{stem}.jpg") for stem in stems], None, str(home))
        targets = np.zeros((len(stems), len(classes)), dtype=np.int8)
        place = {stem: row for row, stem in enumerate(stems)}
        for column, label in enumerate(classes):
            words = (lists / f"{label}_{part}.txt").read_text().split()
            for stem, mark in zip(words[::2], words[1::2], strict=True):
                targets[place[stem], column] = {"1": 1, "-1": 0, "0": -1}[mark]
        examples.targets = targets
        splits[split] = examples
    return classes, splits


def _open_pcam(name: str, known: Known, home: Path, notes: list[str]) -> _Parts:
    import h5py  # type: ignore[import-not-found]

    splits: dict[str, ImageDataset] = {}
    for split, part in (("train", "train"), ("val", "valid"), ("test", "test")):
        images, labels = (home / f"pcam/camelyonpatch_level_2_split_{part}_{what}.h5" for what in "xy")
        with h5py.File(labels) as file:
            numbers = np.asarray(file["y"]).reshape(-1)
        splits[split] = ArrayExamples(_H5Images(str(images)), numbers, f"{name}/{split}")  # type: ignore[arg-type]
    return ("no tumour", "tumour"), splits


class _H5Images:
    """Seven gigabytes that stay on disk: behaves like the array (N, H, W, 3) that they are."""

    def __init__(self, path: str, rows: np.ndarray | None = None) -> None:
        import h5py  # type: ignore[import-not-found]

        self.path = path
        with h5py.File(path) as file:
            self.rows = np.arange(file["x"].shape[0]) if rows is None else rows
            self.shape = (len(self.rows), *file["x"].shape[1:])
        self.ndim = len(self.shape)

    def marks(self, times: bool) -> Iterator[object]:
        facts = Path(self.path).stat()
        written = [facts.st_mtime_ns] if times else []
        return ((facts.st_size, *written, row) for row in self.rows.tolist())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray):
            return _H5Images(self.path, self.rows[index])
        import h5py  # type: ignore[import-not-found]

        with h5py.File(self.path) as file:
            return np.asarray(file["x"][int(self.rows[index])])


def _open_fer2013(home: Path, notes: list[str]) -> DatasetSplits:
    """The challenge's one file: 48 x 48 grey pixels as text; its public test is val and its private test is test."""
    path = home / "fer2013" / "fer2013.csv"
    usage = {"Training": "train", "PublicTest": "val", "PrivateTest": "test"}
    images: dict[str, list[np.ndarray]] = {split: [] for split in usage.values()}
    labels: dict[str, list[int]] = {split: [] for split in usage.values()}
    emotions = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                split = usage[row["Usage"].strip()]
                images[split].append(np.array(row["pixels"].split(), dtype=np.uint8).reshape(48, 48))
                labels[split].append(int(row["emotion"]))
    except (OSError, KeyError, ValueError, TypeError, csv.Error, OverflowError) as error:
        raise UserError(f"{path} is not the challenge's table ({_short(error)}).") from None
    splits: dict[str, ImageDataset] = {
        split: ArrayExamples(np.stack(images[split]), np.array(labels[split]), f"fer2013/{split}")
        for split in images
        if images[split]
    }
    return _sorted_source("fer2013", home, emotions, splits, notes)


def _open_ucf101(home: Path, notes: list[str]) -> DatasetSplits:
    return folders.open_folder(str(home / "ucf101"), "folders")


def _open_hateful_memes(home: Path, notes: list[str]) -> DatasetSplits:
    base = home / "hateful_memes"
    dev = next((base / file for file in ("dev.jsonl", "dev_seen.jsonl") if (base / file).is_file()), None)
    rows = table.join_rows({"train": base / "train.jsonl", "test": dev})
    return table.open_rows(base / "train.jsonl", rows, "hateful_memes")


_SPECIAL: dict[str, Callable[[str, Known, Path, list[str]], _Parts]] = {
    "sun397": _open_sun397,
    "caltech101": _open_caltech101,
    "voc2007": _open_voc2007,
    "pcam": _open_pcam,
}
_OWN: dict[str, Callable[[Path, list[str]], DatasetSplits]] = {
    "fer2013": _open_fer2013,
    "ucf101": _open_ucf101,
    "hateful_memes": _open_hateful_memes,
}


def _sorted_source(
    name: str, home: Path, classes: Sequence[str], splits: dict[str, ImageDataset], notes: list[str]
) -> DatasetSplits:
    """Classes sorted by name, as everywhere here; labels and targets follow."""
    order = sorted(range(len(classes)), key=lambda number: classes[number])
    new = np.empty(len(classes), dtype=np.int64)
    new[order] = np.arange(len(classes))
    for examples in splits.values():
        if examples.labels is not None:
            examples.labels = new[examples.labels]
        if examples.targets is not None:
            examples.targets = examples.targets[:, order]
    return DatasetSplits(name, str(home), "named dataset", tuple(classes[i] for i in order), splits, notes)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
