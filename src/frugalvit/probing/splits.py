"""From MODEL and DATA to labelled features in the splits a probe needs; what had to be made is said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.probe import ExtractConfig, LookConfig
from frugalvit.data import DatasetSplits, open_data
from frugalvit.data.formats.table import WANTED_COLUMN
from frugalvit.data.splits import hold_out_files, subsample_labels
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet, Kind
from frugalvit.probing.logistic import LogisticResult, logistic_probe
from frugalvit.probing.metrics import Metric, classification_scores, rank_classes, score
from frugalvit.utils import console


@dataclass
class ProbeSplit:
    """Features (N, D), or (V, N, D) with augmented views, and their labels (N,) or several labels an image (N, C)."""

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, rows: np.ndarray) -> ProbeSplit:
        index = torch.from_numpy(np.flatnonzero(rows))
        return ProbeSplit(self.features.index_select(-2, index), self.targets[index])


@dataclass
class ProbeData:
    """A dataset as a probe sees it."""

    train: ProbeSplit
    val: ProbeSplit
    test: ProbeSplit
    classes: int
    notes: list[str] = field(default_factory=list)
    held_out: ProbeSplit | None = None  # where val was a part of the training images: these, with their views


def open_model(where: str, config: ExtractConfig) -> Model:
    """The model on its device. A name alone means random weights; the seed decides them, so that caches find them."""
    torch.manual_seed(config.seed)
    return load_model(where, pick_device(config.device), img_size=config.img_size, architecture=config.backbone)


def make_extractor(model: Model, config: LookConfig, kind: Kind, blocks: int = 4) -> FeatureExtractor:
    """The extractor that the options describe."""
    return FeatureExtractor(
        model,
        kind=kind,
        blocks=blocks,
        batch=config.batch,
        precision=config.precision,
        workers=config.workers,
        cache=config.cache,
    )


def probe_device(model: Model) -> torch.device:
    """Where a probe computes: with the model, except on MPS, which has no double precision for the eigenvectors."""
    device = next(model.backbone.parameters()).device
    return torch.device("cpu") if device.type == "mps" else device


def open_labelled(data: str, root: str | None) -> DatasetSplits:
    """The dataset with the splits its makers gave it; refused before anything expensive where labels are missing."""
    source = open_data(data, split="given", root=root)
    for name, examples in source.splits.items():
        if examples.labels is None and examples.targets is None:
            where = "" if len(source.splits) == 1 else f" in {name}"
            raise UserError(
                f"{source.location} has no labels{where}; a probe needs them: "
                f"put the images into one folder per class, or give a CSV with a column {WANTED_COLUMN}."
            )
    if "train" not in source.splits:
        raise UserError(f"{source.location} has no train split to learn from, only {', '.join(source.splits)}.")
    if source.classes is not None and len(source.classes) < 2:
        raise UserError(f"{source.location} has one class only; a probe needs at least two to tell apart.")
    return source


def embed_splits(extractor: FeatureExtractor, source: DatasetSplits) -> dict[str, FeatureSet]:
    """Features of every split as given: all probes share them, whichever splits they make of them."""
    return {name: extractor(examples, f"{source.name} {name}") for name, examples in source.splits.items()}


def labelled_splits(splits: Collection[str]) -> list[str]:
    """The splits that a part of the labels is drawn from: all but the one that is tested on."""
    return ["train", "val"] if {"val", "test"} <= set(splits) else ["train"]


def draw_labels(train: ProbeSplit, left: np.ndarray, labels: float, seed: int) -> np.ndarray:
    """Which of the images still left keep their labels where a part of them is asked for: bool (N,)."""
    rows, chosen = np.flatnonzero(left), np.zeros(len(train), dtype=bool)
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
    """Train, validation and test from what is there.

    No test split: a given val is tested on (as ImageNet's), else a part of train is held out. No val split, or val is
    tested on: a part of train is held out. Both stratified and decided by the seed and the images' names alone.
    ``views`` (V, N, D) are augmented features of the train split's images, and replace theirs for training. A part of
    the ``labels`` is drawn from train and val together, and settings are chosen on some of it: others are not known.
    """
    notes: list[str] = []
    if labels != 1:
        chosen = labelled_splits(parts)
        whole = _join([parts[name] for name in chosen])
        parts = {name: part for name, part in parts.items() if name not in chosen} | {"train": whole}
    whole = parts["train"]
    left, test, val = np.ones(len(whole), dtype=bool), parts.get("test"), parts.get("val")
    train = as_part(whole)
    if test is None and val is not None:
        notes.append(f"there is no test split: val is tested on ({len(val):,} images)")
        test, val = val, None
    if test is None:
        held = _hold(whole, left, val_fraction, seed + 1)
        notes.append(f"there is no test split: {held.sum():,} of {len(whole):,} training images are held out for it")
        left &= ~held
        test_part = train.subset(held)
    else:
        test_part = as_part(test)
    if labels != 1:
        known, left = int(left.sum()), draw_labels(train, left, labels, seed)
        notes.append(f"{left.sum():,} of {known:,} labels are used")
    learned, held_out = train if views is None else ProbeSplit(views, train.targets), None
    if val is None:
        held = _hold(whole, left, val_fraction, seed)
        if labels != 1 and not held.any():
            raise UserError(
                f"--labels {labels:g} leaves one image of each class and none to choose settings on: "
                "take 2 or more of each, or 'frugalvit probe knn', which has nothing to choose."
            )
        if labels == 1:
            notes.append(f"there is no val split: {held.sum():,} training images are held out to choose settings on")
        else:
            notes.append(f"settings are chosen on {held.sum():,} of these")
        left &= ~held
        val_part, held_out = train.subset(held), learned.subset(held)
    else:
        val_part = as_part(val)
    if not left.any() or not len(test_part):
        raise UserError(f"{len(whole)} training images are too few to hold any out; add images or a test split.")
    return ProbeData(learned.subset(left), val_part, test_part, classes, notes, held_out)


def _join(parts: Sequence[FeatureSet]) -> FeatureSet:
    """Several splits with one label an image, one after the other."""
    labels = [part.labels for part in parts if part.labels is not None]
    if len(labels) < len(parts):
        raise UserError("--labels is for data with one label an image.")
    names, keys = [name for part in parts for name in part.names], [key for part in parts for key in part.keys]
    return FeatureSet(torch.cat([part.features for part in parts]), torch.cat(labels), None, names, keys)


def as_part(embedded: FeatureSet) -> ProbeSplit:
    """Features with whichever kind of labels there are."""
    targets = embedded.labels if embedded.targets is None else embedded.targets
    assert targets is not None
    return ProbeSplit(embedded.features, targets)


def concat(*parts: ProbeSplit) -> ProbeSplit:
    """Several parts, one after the other."""
    return ProbeSplit(torch.cat([part.features for part in parts]), torch.cat([part.targets for part in parts]))


@dataclass
class LogisticScore:
    """Logistic regression on a dataset: the score by its metric, and by classes where an image has one label."""

    metric: Metric
    score: float
    by_class: dict[str, float]
    found: LogisticResult


def fit_and_score(data: ProbeData, metric: Metric, device: torch.device, max_iterations: int) -> LogisticScore:
    """λ searched on the validation images, fitted on train + val, tested once; several labels an image mean mAP."""
    several = data.train.targets.ndim == 2
    metric = "map11" if several else metric
    found = logistic_probe(
        data.train.features,
        data.train.targets,
        data.val.features,
        data.val.targets,
        data.test.features,
        metric=metric,
        classes=data.classes,
        device=device,
        max_iterations=max_iterations,
    )
    if not found.converged:
        console.warning(f"L-BFGS ended at its limit of {max_iterations} iterations; raise --max-iterations")
    by_class = {} if several else classification_scores(rank_classes(found.scores), data.test.targets)
    return LogisticScore(metric, score(metric, found.scores, data.test.targets), by_class, found)


def _hold(embedded: FeatureSet, left: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Of the images still left, those to hold out: bool (N,). One that occurs twice stays on one side."""
    rows = np.flatnonzero(left)
    labels = None if embedded.labels is None else embedded.labels.numpy()[rows]
    names, keys = ([words[row] for row in rows] for words in (embedded.names, embedded.keys))
    chosen = hold_out_files(names, keys, labels, fraction, seed)
    held = np.zeros(len(embedded), dtype=bool)
    held[rows[chosen]] = True
    return held
