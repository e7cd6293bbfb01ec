"""Open a model and a dataset for probing, and make the splits that a probe needs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.probe import ExtractConfig, FrozenModelConfig
from frugalvit.data import DatasetSplits, open_data
from frugalvit.data.duplicates import group_copies
from frugalvit.data.formats.csv import WANTED_COLUMN
from frugalvit.data.rng import generator_for
from frugalvit.data.splits import hold_out, subsample_labels
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet, Kind
from frugalvit.utils import console
from frugalvit.utils.text import pluralize

HELD_OUT = "train, held out"
"""The scored split of a dataset with nothing but train."""


@dataclass
class ProbeSplit:
    """Features (N, D), or (V, N, D) with augmented views, and labels (N,) or several per image (N, C)."""

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, rows: np.ndarray) -> Self:
        index = torch.from_numpy(np.flatnonzero(rows))
        return replace(self, features=self.features.index_select(-2, index), targets=self.targets[index])


@dataclass
class ProbeData:
    """The splits of a probe, and notes on how they were made."""

    train: ProbeSplit
    val: ProbeSplit
    test: ProbeSplit
    classes: int
    notes: list[str] = field(default_factory=list)
    held_out: ProbeSplit | None = None  # the images of val with their views, if val comes from train
    unseen: list[str] = field(default_factory=list)  # the keys of the images of test, if test comes from train
    unlabelled: Tensor | None = None  # features (N, D) of the training images whose label --labels hides


def open_model(name: str, config: ExtractConfig) -> Model:
    """Load the model on its device. A model name means random weights from the seed, so that caches match."""
    torch.manual_seed(config.seed)
    options = {"img_size": config.img_size, "architecture": config.backbone, "pretrained": config.pretrained}
    return load_model(name, pick_device(config.device), **options)


def make_extractor(model: Model, config: FrozenModelConfig, kind: Kind, blocks: int = 4) -> FeatureExtractor:
    options = config.model_dump(include={"batch", "precision", "workers", "cache"})
    return FeatureExtractor(model, kind=kind, blocks=blocks, **options)


def probe_device(model: Model) -> torch.device:
    """Return the model's device; the CPU instead of MPS, which has no double precision for eigenvectors."""
    device = next(model.backbone.parameters()).device
    return torch.device("cpu") if device.type == "mps" else device


def open_labelled(data: str, root: str | None, target: str = "auto", *, loose: bool = False) -> DatasetSplits:
    """Open a dataset with its own splits; an error if labels are missing. loose: keep the images without a label."""
    source = open_data(data, split="given", root=root, target=target, loose=loose)
    for name, examples in source.splits.items():
        if examples.labels is None and examples.targets is None:
            split = "" if len(source.splits) == 1 else f" in {name}"
            raise UserError(
                f"{source.location} has no labels{split}, which a probe needs: "
                f"put the images into one folder per class, or give a CSV with a column {WANTED_COLUMN}."
            )
    if "train" not in source.splits:
        raise UserError(f"{source.location} has no train split, only {', '.join(source.splits)}.")
    if source.classes is not None and len(source.classes) < 2:
        raise UserError(f"{source.location} has one class; a probe needs at least two.")
    return source


def embed_splits(extractor: FeatureExtractor, source: DatasetSplits) -> dict[str, FeatureSet]:
    """Extract the features of every split of the dataset, so that all probes share one cache."""
    parts = {name: extractor(examples, f"{source.name} {name}") for name, examples in source.splits.items()}
    if not {"val", "test"} <= set(parts):  # a part of train is held out
        train, examples = parts["train"], source.splits["train"]
        copies, train.copies_note = group_copies(examples, examples.labels)
        train.copies = copies[train.positions]
    return parts


def labelled_splits(splits: Collection[str]) -> list[str]:
    """List the splits that --labels draws from: all but the scored split."""
    return ["train", "val"] if {"val", "test"} <= set(splits) else ["train"]


def draw_labels(train: ProbeSplit, available: np.ndarray, labels: float, seed: int) -> np.ndarray:
    """Choose the available images that keep their labels under --labels: bool (N,)."""
    rows, chosen = np.flatnonzero(available), np.zeros(len(train), dtype=bool)
    chosen[rows[subsample_labels(train.targets.numpy()[rows], labels, seed)]] = True
    return chosen


def make_probe_splits(
    parts: dict[str, FeatureSet],
    classes: int,
    val_fraction: float,
    seed: int,
    views: Tensor | None = None,
    labels: float = 1.0,
) -> ProbeData:
    """Make train, validation and test splits from the dataset's own.

    Without a test split, val is scored (as for ImageNet); without both, a part of train is held out. Without a val
    split, or if it is scored, a part of train is held out for it. Both are stratified and depend only on the seed and
    the images' names. ``views`` (V, N, D) are augmented features that replace those of train for training. ``labels``
    other than 1 draws labels from train and val together, and some of these choose the settings.
    """
    notes: list[str] = []
    unseen: list[str] = []
    if labels != 1:
        names = labelled_splits(parts)
        joined = _join([parts[name] for name in names])
        parts = {name: part for name, part in parts.items() if name not in names} | {"train": joined}
    full = parts["train"]
    remaining, test, val = np.ones(len(full), dtype=bool), parts.get("test"), parts.get("val")
    train = to_probe_split(full)
    if test is None and val is not None:
        notes.append(f"no test split: scored on val ({len(val):,} images)")
        test, val = val, None
    if test is None:
        held = _hold_out(full, remaining, val_fraction, seed + 1)
        where = f"{held.sum():,} of {len(full):,} labelled images, not used to learn"
        notes.append(f"no test split: scored on {where}{full.copies_note}")
        remaining &= ~held
        test_part, unseen = train.subset(held), [full.keys[row] for row in np.flatnonzero(held)]
    else:
        test_part = to_probe_split(test)
    unlabelled = None
    if labels != 1:
        total, chosen = int(remaining.sum()), draw_labels(train, remaining, labels, seed)
        if (remaining & ~chosen).any():
            unlabelled = train.subset(remaining & ~chosen).features
        remaining = chosen
        notes.append(f"{remaining.sum():,} of {total:,} labels are used")
    learned, held_out = train if views is None else ProbeSplit(views, train.targets), None
    if val is None:
        held = _hold_out(full, remaining, val_fraction, seed)
        if len(test_part) and not held.any():
            cause = "There is" if labels == 1 else f"--labels {labels:g} leaves"
            raise UserError(
                f"{cause} one image of each class and none to choose settings on: "
                "use 2 or more of each, or 'frugalvit probe knn', which has no settings to choose."
            )
        if labels == 1:
            notes.append(f"no val split: {held.sum():,} images choose the settings; the probe then learns them too")
        else:
            notes.append(f"settings are chosen on {held.sum():,} of these")
        remaining &= ~held
        val_part, held_out = train.subset(held), learned.subset(held)
    else:
        val_part = to_probe_split(val)
    if not remaining.any() or not len(test_part):
        raise UserError(
            f"{pluralize(len(full), 'training image')}: none can be held out to score on. Add images (two or more of "
            "each class) or a test split."
        )
    return ProbeData(learned.subset(remaining), val_part, test_part, classes, notes, held_out, unseen, unlabelled)


def _join(parts: Sequence[FeatureSet]) -> FeatureSet:
    """Concatenate splits with one label per image."""
    labels = [part.labels for part in parts if part.labels is not None]
    if len(labels) < len(parts):
        raise UserError("--labels needs data with one label per image.")
    names, keys = [name for part in parts for name in part.names], [key for part in parts for key in part.keys]
    joined = FeatureSet(torch.cat([part.features for part in parts]), torch.cat(labels), None, names, keys)
    return joined if len(parts) > 1 else replace(joined, copies=parts[0].copies, copies_note=parts[0].copies_note)


def to_probe_split(features: FeatureSet) -> ProbeSplit:
    """Pair features with their labels of either kind."""
    targets = features.labels if features.targets is None else features.targets
    assert targets is not None
    return ProbeSplit(features.features, targets)


def concat(*parts: ProbeSplit) -> ProbeSplit:
    return ProbeSplit(torch.cat([part.features for part in parts]), torch.cat([part.targets for part in parts]))


def assign_fifths(labels: Tensor, seed: int = 0) -> Tensor:
    """Assign each image to a fifth at random, so that each class is spread evenly: (N,) -> (N,) from 0 to 4."""
    order = torch.randperm(len(labels), generator=generator_for(seed, "fifths"))
    order = order[labels[order].argsort(stable=True)]  # class by class; the count continues, so fifths are even
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(labels)) % 5)


def leave_fifths_out(
    data: ProbeSplit, classes: int, fit: Callable[[ProbeSplit], Callable[[Tensor], Tensor]], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the logits (N, C) of every image by a fit on the other four fifths, and the labels (N,).

    An image whose class has no other image in the four fifths is left out.
    """
    fifths, logits = assign_fifths(data.targets, seed), torch.empty(len(data), classes)
    known = torch.zeros(len(data), dtype=torch.bool)
    for held in console.progress([fifths == number for number in range(5)], label="cross-validating"):
        rest, part = data.subset(~held.numpy()), data.subset(held.numpy())
        if len(rest.targets.unique()) > 1:
            logits[held] = fit(rest)(part.features).float().cpu()
            known[held] = torch.isin(part.targets, rest.targets)
    return logits[known], data.targets[known]


def _hold_out(features: FeatureSet, available: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Choose the available images to hold out: bool (N,)."""
    rows = np.flatnonzero(available)
    labels = None if features.labels is None else features.labels.numpy()[rows]
    held = np.zeros(len(features), dtype=bool)
    copies = None if features.copies is None else features.copies[rows]
    held[rows[hold_out([features.keys[row] for row in rows], labels, fraction, seed, copies)]] = True
    return held
