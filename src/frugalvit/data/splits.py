"""Absent splits, made: deterministic, stratified, and said."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset, join
from frugalvit.data.formats.table import WANTED_COLUMN
from frugalvit.errors import UserError
from frugalvit.utils.text import pluralize, truncate_list

MODES = ("auto", "given", "train+val", "remake")


def hold_out(
    keys: Sequence[str], labels: np.ndarray | None, fraction: float, seed: int, images: Sequence[str] | None = None
) -> np.ndarray:
    """Which examples to hold out: bool (N,), a ``fraction`` of every class, rounded, at least one where there are two.

    An example's place is decided by a hash of the seed and its key. So the answer depends neither on the order of the
    examples nor on where the dataset lies, and new images move few of the old ones. Where ``images`` says which image
    each example is, copies of one stay together: what was learned from is not fit to be judged by.
    """
    if images is not None:
        number: dict[str, int] = {}
        image_of = [number.setdefault(image, len(number)) for image in images]
        first = np.unique(image_of, return_index=True)[1]
        own = None if labels is None else labels[first]
        return hold_out([keys[int(i)] for i in first], own, fraction, seed)[image_of]
    ranks = np.array([_rank(key, seed) for key in keys], dtype=np.uint64)
    groups = np.zeros(len(keys), dtype=np.int64) if labels is None else labels
    held = np.zeros(len(keys), dtype=bool)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        if count > 0:
            held[members[np.argsort(ranks[members], kind="stable")[:count]]] = True
    return held


def hold_out_files(
    names: Sequence[str], keys: Sequence[str], labels: np.ndarray | None, fraction: float, seed: int
) -> np.ndarray:
    """``hold_out`` of examples that have names, the files' paths: a file that is named twice stays on one side."""
    places = None
    if len(set(keys)) < len(keys):  # copies, or two shards that each have an image of one key
        places = [os.path.abspath(name) for name in names]  # noqa: PTH100  (pathlib takes several times as long)
    return hold_out(keys, labels, fraction, seed, places)


def subsample_labels(labels: np.ndarray, part: float, seed: int) -> np.ndarray:
    """Rows of a part of the labels: a share of every class (up to 1) or so many of each (from 2 on), at least one.

    The same rows for a given seed.
    """
    chosen, random = [], np.random.default_rng(seed)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = round(part * len(members)) if part <= 1 else int(part)
        chosen.append(random.permutation(members)[: max(1, count)])
    return np.sort(np.concatenate(chosen))


def split_examples(examples: ImageDataset, fraction: float, seed: int) -> tuple[ImageDataset, ImageDataset]:
    """The kept and the held-out part; both in their old order."""
    held = hold_out_files(examples.names, examples.keys, examples.labels, fraction, seed)
    return examples.subset(~held), examples.subset(held)


def add_missing_splits(
    source: DatasetSplits, mode: str = "auto", val_fraction: float = 0.1, seed: int = 0
) -> DatasetSplits:
    """The splits a training wants, from those that are there.

    Args:
        mode: "auto" makes a missing val from train where there are labels; "given" makes nothing; "train+val" joins
            the two and leaves test to judge by, as the Drloc paper does with Flowers-102; "remake" pools train and val
            and splits them anew.
    """
    if mode not in MODES:
        raise UserError(f"There is no split '{mode}': choose one of {', '.join(MODES)}.")
    if not 0 < val_fraction < 1:
        raise UserError(f"A share of {val_fraction} cannot be held out: give one between 0 and 1.")
    splits, notes = dict(source.splits), list(source.notes)
    if mode in ("train+val", "remake") and "train" in splits and "val" in splits:
        splits["train"] = join(splits["train"], splits.pop("val"))
        done = "is pooled with train" if mode == "remake" else "is part of train"
        notes.append(f"val {done}: {len(splits['train']):,} images.")
    elif mode == "train+val":
        notes.append("There is no val to join with train.")
    wants_val = mode == "remake" or (mode == "auto" and source.classes is not None)
    if wants_val and "train" in splits and "val" not in splits:
        train, val = split_examples(splits["train"], val_fraction, seed)
        if len(val):
            splits |= {"train": train, "val": val}
            way = "stratified by class" if source.classes is not None else "at random"
            notes.append(
                f"val is made from train: {len(val):,} of {len(train) + len(val):,} images, {way}, seed {seed}"
                f"{_singles(train, val, source.classes)}."
            )
    ordered = {split: splits[split] for split in ("train", "val", "test") if split in splits}
    return replace(source, splits=ordered, notes=notes)


def handle_unlabelled(source: DatasetSplits, *, keep: bool) -> DatasetSplits:
    """Images without a label beside class folders: kept for those who need no labels, or left out; both are said."""
    notes = list(source.notes)
    for split, examples in source.loose.items():
        beside = "beside the class folders" if split in source.splits else "without class folders"
        kind = "loose image" if split in source.splits else "image"
        found = f"{Path(examples.names[0]).parent}: {pluralize(len(examples), kind)} {beside}"
        if keep:
            use = "pretrain and embed use them, train and probe leave them out"
            notes.append(f"{found}, so without labels: {use}; --labels ignore takes no folder for a class.")
        else:
            notes.append(f"{found}, so without labels: left out (pretrain and embed use them).")
    return replace(source, notes=notes, loose=source.loose if keep else {})


def check_trainable(source: DatasetSplits) -> None:
    """Raise ``UserError`` for what would make a classifier's training pointless, before anything expensive starts."""
    train = source.splits.get("train")
    if train is None or not len(train):
        raise UserError(
            f"{source.location} has no training images: found only {', '.join(source.splits) or 'nothing'}."
        )
    if train.targets is not None:
        raise UserError(
            f"{source.location} has several labels per image: 'frugalvit probe suite' can use it, train cannot."
        )
    if source.classes is None or (train.labels is None and train.streaming is None):
        why = f" ({source.notes[0].rstrip('.')})" if source.notes else ""
        raise UserError(
            f"{source.location} has no labels{why}: training a classifier wants one folder per class, or a table with "
            f"labels in a column {WANTED_COLUMN}. Without labels there is 'frugalvit pretrain'."
        )
    if len(source.classes) < 2:
        only = ", ".join(source.classes)
        raise UserError(f"{source.location} has one class only, '{only}': a classifier needs at least two.")
    if train.labels is None:
        return  # read in passing: what classes there are was read off the labels
    counts = np.bincount(train.labels, minlength=len(source.classes))
    empty = [source.classes[i] for i in np.flatnonzero(counts == 0)]
    if empty:
        shown = truncate_list([f"'{name}'" for name in empty])
        which = "class has" if len(empty) == 1 else "classes have"
        raise UserError(f"{len(empty)} {which} no training image: {shown}. Add images, or remove the empty folders.")


def _rank(key: str, seed: int) -> int:
    content = f"{seed}\0{key}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _singles(train: ImageDataset, val: ImageDataset, classes: Sequence[str] | None) -> str:
    if classes is None or train.labels is None or val.labels is None:
        return ""
    missing = len(np.setdiff1d(train.labels, val.labels))
    return f"; {pluralize(missing, 'class')} with a single image: in train" if missing else ""


def absent_classes(source: DatasetSplits) -> list[str]:
    """A sentence for every split that lacks classes; images that are read in passing are not counted."""
    said: list[str] = []
    for split, examples in source.splits.items():
        if source.classes is None or examples.labels is None:
            continue
        missing = np.setdiff1d(np.arange(len(source.classes)), examples.labels)
        if len(missing):
            said.append(absence(split, [source.classes[i] for i in missing]))
    return said


def absence(split: str, names: list[str]) -> str:
    """The sentence for a split and the classes that it lacks."""
    return f"{split} has no image of {pluralize(len(names), 'class')}: {truncate_list(names)}"


def only_class(examples: ImageDataset, classes: tuple[str, ...]) -> str | None:
    """The name of the class that all images are of; None where there are several, or no labels."""
    if examples.labels is None or len(found := np.unique(examples.labels)) != 1:
        return None
    return classes[int(found[0])]
