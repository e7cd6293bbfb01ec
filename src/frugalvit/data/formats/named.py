"""Open datasets by name: torchvision downloads and reads them, or the user copies the files."""

import contextlib
import csv
import io
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.data.dataset import ArrayExamples, DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.formats import csv as table
from frugalvit.data.formats.base import OpenOptions
from frugalvit.data.formats.image_folder import open_folder
from frugalvit.data.formats.named_catalog import DATASETS, IMAGENET_100, Known, dataset_status
from frugalvit.data.paths import datasets_root, local
from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_text
from frugalvit.utils.text import short_message

_Parts = tuple[Sequence[str], dict[str, ImageDataset]]
_SPLIT_SEED = 0  # for datasets without official splits; fixed, so that results are comparable


def is_name(where: str) -> bool:
    """True for ``NAME`` and ``NAME:FOLDER`` of a known dataset."""
    return where.partition(":")[0].lower() in DATASETS


def open_by_name(where: str, options: OpenOptions) -> DatasetSplits:
    """Open ``NAME`` from the folder of named datasets, or ``NAME:FOLDER``."""
    name, _, folder = where.partition(":")
    return open_named(name.lower(), local(folder) if folder else options.root)


def open_named(name: str, root: str | Path | None = None) -> DatasetSplits:
    """Open the official splits of a dataset; download it first if necessary and possible."""
    known, home = DATASETS[name], datasets_root(root)
    state, instruction = dataset_status(name, home)
    if state == "by hand":
        raise UserError(f"{known.title} is not in {home} and cannot be downloaded: {instruction}.")
    if state == "downloadable":
        _download(name, known, home)
    try:
        classes, splits = (_READERS.get(name) or _from_torchvision)(name, known, home)
    except UserError:
        raise
    except Exception as error:  # damaged files raise many types
        raise UserError(
            f"Cannot read {known.title} in {home} ({short_message(error)}). Move it away to download it again."
        ) from None
    return _sort_classes(name, home, classes, splits)


def _download(name: str, known: Known, home: Path) -> None:
    """Download into a temporary folder first: a partial download never counts as a dataset."""
    staging = home / ".incomplete" / f"{name}.{os.getpid()}"  # several processes may start at once
    shutil.rmtree(staging, ignore_errors=True)
    make_folder(staging, "Set FRUGALVIT_DATASETS to another folder.")
    console.info(f"downloading {known.title} to {home}")
    try:
        # torchvision prints to standard output, which is for results.
        with contextlib.redirect_stdout(sys.stderr):
            for arguments in known.splits.values():
                _make(known, staging, download=True, **arguments)
    except Exception as error:  # the network raises many types
        files = " and ".join(str(home / path) for path in known.files[:3])
        raise UserError(
            f"Cannot download {known.title} ({short_message(error)}). Without a network, copy {files}, in the layout "
            f"of torchvision.datasets.{known.torchvision}."
        ) from None
    else:
        for entry in sorted(staging.iterdir()):
            if not (home / entry.name).exists():
                entry.rename(home / entry.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            staging.parent.rmdir()  # fails while another process downloads, which is fine


def _make(known: Known, root: Path, **arguments: Any) -> Any:
    from torchvision import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(datasets, known.torchvision)(str(root), **arguments)


def _from_torchvision(name: str, known: Known, home: Path) -> _Parts:
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
    """Take the files or arrays of a torchvision dataset."""
    files = getattr(dataset, "_image_files", None) or getattr(dataset, "_images", None)
    if files and hasattr(dataset, "_labels"):
        return FileExamples([str(path) for path in files], np.asarray(dataset._labels), home)
    samples = getattr(dataset, "_samples", None) or getattr(dataset, "samples", None)
    if samples:
        return FileExamples([str(path) for path, _ in samples], np.array([int(label) for _, label in samples]), home)
    images = np.asarray(dataset.data)
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    return ArrayExamples(images, np.asarray(labels), name)


def _open_sun397(name: str, known: Known, home: Path) -> _Parts:
    """Use the first official partition, 50 + 50 images per class, if its lists are in ``SUN397``."""
    dataset = _make(known, home)
    order = np.argsort([str(path) for path in dataset._image_files])
    everything = _examples(dataset, name, str(home)).subset(order)
    lists = {"train": home / "SUN397" / "Training_01.txt", "test": home / "SUN397" / "Testing_01.txt"}
    if not all(path.is_file() for path in lists.values()):
        console.warning(f"half of every class is the test split: {lists['train']} and {lists['test'].name} are missing")
        held_out = hold_out(everything.keys, everything.labels, 0.5, _SPLIT_SEED)
        return dataset.classes, {"train": everything.subset(~held_out), "test": everything.subset(held_out)}
    index = {key.removeprefix("SUN397"): number for number, key in enumerate(everything.keys)}
    lines = {split: read_text(path).split() for split, path in lists.items()}
    return dataset.classes, {
        split: everything.subset([index[image] for image in images if image in index])
        for split, images in lines.items()
    }


def _open_caltech101(name: str, known: Known, home: Path) -> _Parts:
    """Take 30 training images per class and the rest for testing, with the background class (Table 9)."""
    source = open_folder(str(home / "caltech101" / "101_ObjectCategories"), OpenOptions(labels="folders"))
    everything = source.splits["train"]
    assert everything.labels is not None
    assert source.classes is not None
    train = np.zeros(len(everything), dtype=bool)
    for number in range(len(source.classes)):
        members = np.flatnonzero(everything.labels == number)
        share = min(30 / len(members), 0.999)
        train[members[hold_out([everything.keys[i] for i in members], None, share, _SPLIT_SEED)]] = True
    return source.classes, {"train": everything.subset(train), "test": everything.subset(~train)}


def _open_voc2007(name: str, known: Known, home: Path) -> _Parts:
    """Read several objects per image as ``targets``; -1 marks an object that VOC calls difficult."""
    base = home / "VOCdevkit" / "VOC2007"
    lists = base / "ImageSets" / "Main"
    classes = sorted(path.name.removesuffix("_train.txt") for path in lists.glob("*_train.txt"))
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val", "test"):
        stems = read_text(lists / f"{split}.txt").split()
        examples = FileExamples([str(base / "JPEGImages" / f"{stem}.jpg") for stem in stems], None, str(home))
        targets = np.zeros((len(stems), len(classes)), dtype=np.int8)
        row_of = {stem: row for row, stem in enumerate(stems)}
        for column, label in enumerate(classes):
            cells = read_text(lists / f"{label}_{split}.txt").split()
            for stem, value in zip(cells[::2], cells[1::2], strict=True):
                targets[row_of[stem], column] = {"1": 1, "-1": 0, "0": -1}[value]
        examples.targets = targets
        splits[split] = examples
    return classes, splits


def _open_pcam(name: str, known: Known, home: Path) -> _Parts:
    import h5py  # type: ignore[import-not-found]

    splits: dict[str, ImageDataset] = {}
    for split, part in (("train", "train"), ("val", "valid"), ("test", "test")):
        images, labels = (home / f"pcam/camelyonpatch_level_2_split_{part}_{kind}.h5" for kind in "xy")
        with h5py.File(labels) as file:
            numbers = np.asarray(file["y"]).reshape(-1)
        splits[split] = ArrayExamples(_H5Images(str(images)), numbers, f"{name}/{split}")  # type: ignore[arg-type]
    return ("no tumour", "tumour"), splits


class _H5Images:
    """An array (N, H, W, 3) that stays on disk, because it takes seven gigabytes."""

    def __init__(self, path: str, rows: np.ndarray | None = None) -> None:
        import h5py  # type: ignore[import-not-found]

        self.path = path
        with h5py.File(path) as file:
            self.rows = np.arange(file["x"].shape[0]) if rows is None else rows
            self.shape = (len(self.rows), *file["x"].shape[1:])
        self.ndim = len(self.shape)

    def fingerprint_items(self, times: bool) -> Iterator[object]:
        status = Path(self.path).stat()
        modified = [status.st_mtime_ns, status.st_ctime_ns] if times else []
        return ((status.st_size, *modified, row) for row in self.rows.tolist())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray):
            return _H5Images(self.path, self.rows[index])
        import h5py  # type: ignore[import-not-found]

        with h5py.File(self.path) as file:
            return np.asarray(file["x"][int(self.rows[index])])


def _open_fer2013(name: str, known: Known, home: Path) -> _Parts:
    """Read the challenge's file: 48 x 48 grey pixels as text. Its public test is val, its private test is test."""
    usage = {"Training": "train", "PublicTest": "val", "PrivateTest": "test"}
    images: dict[str, list[np.ndarray]] = {split: [] for split in usage.values()}
    labels: dict[str, list[int]] = {split: [] for split in usage.values()}
    with io.StringIO(read_text(home / "fer2013" / "fer2013.csv")) as file:
        for row in csv.DictReader(file):
            split = usage[row["Usage"].strip()]
            images[split].append(np.array(row["pixels"].split(), dtype=np.uint8).reshape(48, 48))
            labels[split].append(int(row["emotion"]))
    return ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral"), {
        split: ArrayExamples(np.stack(images[split]), np.array(labels[split]), f"{name}/{split}") for split in images
    }


def _parts(source: DatasetSplits) -> _Parts:
    return source.classes or (), source.splits


def _open_hateful_memes(name: str, known: Known, home: Path) -> _Parts:
    base = home / "hateful_memes"
    dev = base / "dev.jsonl"
    lists = {"train": base / "train.jsonl", "test": dev if dev.is_file() else base / "dev_seen.jsonl"}
    return _parts(table.build_splits(str(lists["train"]), table.join_rows(lists), name, OpenOptions()))


def _open_imagenet100(name: str, known: Known, home: Path) -> _Parts:
    """Read the 100 classes from the folders of ImageNet-1K. Its val images are scored, as everywhere."""
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val"):
        folders = [home / "imagenet" / split / number for number in IMAGENET_100]
        if missing := [folder.name for folder in folders if not folder.is_dir()]:
            raise UserError(f"{home / 'imagenet' / split} lacks {len(missing)} of the 100 classes: {missing[0]}, …")
        files = [(path, label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]
        labels = np.array([label for _, label in files])
        splits[split] = FileExamples([str(path) for path, _ in files], labels, str(home))
    return IMAGENET_100, splits


def _open_domainnet(name: str, known: Known, home: Path) -> _Parts:
    """Read ``clipart/CLASS/`` with its lists ``clipart_train.txt`` and ``clipart_test.txt``."""
    domain = name.removeprefix("domainnet_")
    lists = {split: home / "domainnet" / f"{domain}_{split}.txt" for split in ("train", "test")}
    rows = [row._replace(label=Path(row.path).parent.name) for row in table.join_rows(lists)]
    return _parts(table.build_splits(str(lists["train"]), rows, name, OpenOptions()))


# Datasets that torchvision does not read, or not with the splits of Table 9.
_READERS: dict[str, Callable[[str, Known, Path], _Parts]] = {
    "sun397": _open_sun397,
    "caltech101": _open_caltech101,
    "voc2007": _open_voc2007,
    "pcam": _open_pcam,
    "fer2013": _open_fer2013,
    "ucf101": lambda name, known, home: _parts(open_folder(str(home / name), OpenOptions(labels="folders"))),
    "hateful_memes": _open_hateful_memes,
    "imagenet100": _open_imagenet100,
    **{name: _open_domainnet for name in DATASETS if name.startswith("domainnet_")},
}


def _sort_classes(name: str, home: Path, classes: Sequence[str], splits: dict[str, ImageDataset]) -> DatasetSplits:
    """Build a dataset with classes sorted by name, and renumber labels and targets."""
    order = sorted(range(len(classes)), key=lambda number: classes[number])
    new_label = np.empty(len(classes), dtype=np.int64)
    new_label[order] = np.arange(len(classes))
    for examples in splits.values():
        if examples.labels is not None:
            examples.labels = new_label[examples.labels]
        if examples.targets is not None:
            examples.targets = examples.targets[:, order]
    return DatasetSplits(name, str(home), "named dataset", tuple(classes[i] for i in order), splits)
