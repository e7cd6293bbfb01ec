"""Make validation splits (deterministic, stratified by class), and check splits for training."""

import hashlib
import os.path
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset, join
from frugalvit.data.duplicates import group_copies
from frugalvit.data.formats.csv import WANTED_COLUMN
from frugalvit.errors import UserError
from frugalvit.utils.text import pluralize, truncate_list

MODES = ("auto", "given", "train+val")


def hold_out(
    keys: Sequence[str], labels: np.ndarray | None, fraction: float, seed: int, copies: np.ndarray | None = None
) -> np.ndarray:
    """Choose images to hold out: bool (N,), a rounded ``fraction`` of every class.

    A class of several images gives at least one, but not all. A hash of seed and key decides, so neither the order of
    the images nor the path of the dataset matters. New images move few others to another split.

    copies: equal numbers for images with the same content (``group_copies``); they count as one and stay together
    """
    contents = (f"{seed}\0{key}".encode("utf-8", "surrogateescape") for key in keys)
    hashes = [int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") for content in contents]
    ranks = np.array(hashes, dtype=np.uint64)
    groups = np.zeros(len(keys), dtype=np.int64) if labels is None else labels
    held_out = np.zeros(len(keys), dtype=bool)
    copies = np.arange(len(keys)) if copies is None else copies
    order = np.lexsort((ranks, copies))
    counted = np.zeros(len(keys), dtype=bool)
    counted[order[np.unique(copies[order], return_index=True)[1]]] = True  # the first rank among copies
    sizes = np.unique(copies, return_inverse=True, return_counts=True)
    size = sizes[2][sizes[1]]  # images with the same content, for every image
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & counted)
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        if count > 0:
            # An image with many copies stays in train: held out, it would take most of a class with it.
            many = size[members] > max(1, fraction * np.count_nonzero(groups == group))
            held_out[members[np.lexsort((ranks[members], many))[:count]]] = True
    held_out = np.isin(copies, copies[held_out])
    for group in np.unique(groups[held_out]):  # copies with several labels may take all images of a class
        if held_out[groups == group].all():
            held_out &= ~np.isin(copies, copies[groups == group])
    return held_out


def subsample_labels(labels: np.ndarray, part: float, seed: int) -> np.ndarray:
    """Choose rows: a share of every class (``part`` up to 1) or a number per class (from 2), at least one."""
    chosen, random = [], np.random.default_rng(seed)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = round(part * len(members)) if part <= 1 else int(part)
        chosen.append(random.permutation(members)[: max(1, count)])
    return np.sort(np.concatenate(chosen))


def add_missing_splits(
    source: DatasetSplits, mode: str = "auto", val_fraction: float = 0.1, seed: int = 0
) -> DatasetSplits:
    """Join or add splits for training.

    mode: as in ``open_data``; "train+val" joins both if test can be scored, as the Drloc paper does with Flowers-102
    """
    if mode not in MODES:
        raise UserError(f"Unknown split '{mode}'. Choose one of {', '.join(MODES)}.")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction} is not between 0 and 1.")
    splits, notes = dict(source.splits), list(source.notes)
    if mode == "train+val" and {"train", "val", "test"} <= splits.keys():
        splits["train"] = join(splits["train"], splits.pop("val"))
        notes.append(f"val is joined with train: {len(splits['train']):,} images.")
    if mode == "auto" and source.classes is not None and "train" in splits and "val" not in splits:
        train = splits["train"]
        copies, copies_note = group_copies(train, train.labels)
        held_out = hold_out(train.keys, train.labels, val_fraction, seed, copies)
        if held_out.any():
            splits |= {"train": train.subset(~held_out), "val": train.subset(held_out)}
            method = "stratified by class" if train.labels is not None else "at random"
            counts = f"{held_out.sum():,} of {len(train):,} images"
            notes.append(f"val is made from train: {counts}, {method}, seed {seed}{copies_note}.")
    return replace(source, splits=splits, notes=notes)


def handle_unlabelled(source: DatasetSplits, *, keep: bool) -> DatasetSplits:
    """Note unlabelled images beside class folders or in rows of a table, and drop them unless ``keep``."""
    notes = list(source.notes)
    for split, examples in source.loose.items():
        count = pluralize(len(examples), "unlabelled image")
        if source.kind == "table":
            found = f"{source.location}: {count} in {split} (rows without a label)"
        else:
            beside = "beside the class folders" if split in source.splits else "without class folders"
            found = f"{Path(examples.names[0]).parent}: {count} {beside}"
        left_out = f"{found}: left out. pretrain, embed and '--unlabelled rest' (train, probe) use them."
        notes.append(f"{found}." if keep else left_out)
    return replace(source, notes=notes, loose=source.loose if keep else {})


def leave_out_files(images: ImageDataset, scored: Sequence[ImageDataset], notes: list[str]) -> ImageDataset:
    """Return unlabelled images without the files that are among those of ``scored``, with a note."""
    if not isinstance(images, FileExamples):
        return images
    leaves = [leaf for part in scored for leaf in part.leaves() if isinstance(leaf, FileExamples)]
    files = {os.path.realpath(name) for leaf in leaves for name in leaf.names}
    keep = np.array([os.path.realpath(name) not in files for name in images.names], dtype=bool)
    if not keep.any():
        raise UserError("--unlabelled: all of its images choose settings or score (val or test). Use other images.")
    if not keep.all():
        notes.append(f"--unlabelled holds {pluralize(int((~keep).sum()), 'image')} of val and test: left out.")
    return images if keep.all() else images.subset(keep)


def check_trainable(source: DatasetSplits) -> None:
    train = source.splits.get("train")
    if train is None or not len(train):
        raise UserError(f"{source.location} has no training images, only {', '.join(source.splits) or 'empty splits'}.")
    if train.targets is not None:
        if source.target == "number" and len(np.unique(train.targets)) < 2:
            raise UserError(f"{source.location}: all training images have the number {train.targets[0, 0]:g}.")
        return
    if source.classes is None or (train.labels is None and train.streaming is None):
        repeated = bool(source.notes) and source.notes[0].startswith(f"{source.location} has no labels")
        note = f" ({source.notes[0].rstrip('.')})" if source.notes and not repeated else ""
        raise UserError(
            f"{source.location} has no labels{note}. To train a classifier, use one folder per class, or a table with "
            f"labels in a column {WANTED_COLUMN} (table.csv:label=COLUMN names another column). Without labels, use "
            "'frugalvit pretrain'."
        )
    if len(source.classes) < 2:
        only = ", ".join(source.classes)
        raise UserError(f"{source.location} has only the class '{only}'. A classifier needs at least two.")
    if train.labels is None:
        return  # streamed: the classes come from the labels, so none is empty
    counts = np.bincount(train.labels, minlength=len(source.classes))
    empty = [source.classes[i] for i in np.flatnonzero(counts == 0)]
    if empty:
        shown = truncate_list([f"'{name}'" for name in empty])
        raise UserError(f"No training images for {shown}. Add images, or remove the empty folders.")


def absent_classes(source: DatasetSplits) -> list[str]:
    """Return a note for every split that lacks classes; streamed splits are not counted."""
    notes: list[str] = []
    for split, examples in source.splits.items():
        if source.classes is None or examples.truth is None or source.target == "number":
            continue
        present = np.flatnonzero((examples.truth == 1).any(0)) if source.target == "labels" else examples.truth
        missing = np.setdiff1d(np.arange(len(source.classes)), present)
        if len(missing):
            names = truncate_list([source.classes[i] for i in missing])
            notes.append(f"{split} has no image of {pluralize(len(missing), 'class')}: {names}")
    return notes
