"""The kinds of targets: build the one that a run or a stored model has."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.dataset import ImageDataset
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model
from frugalvit.tasks.classification.multi_label import LabelTarget
from frugalvit.tasks.classification.regression import NumberTarget
from frugalvit.tasks.classification.target import ClassTarget, Target


def make_target(config: ResolvedTrainConfig, kind: str, classes: Sequence[str], images: ImageDataset) -> Target:
    """Build the target of a run. ``kind``: "class", "labels" or "number"; ``images``: those of the training."""
    if kind == "labels":
        return LabelTarget(classes, images.targets)
    if kind == "number":
        return NumberTarget.fitted(classes, images.targets)
    if config.logit_adjustment and images.labels is None:
        raise UserError("--logit-adjustment needs the labels of all images: use --stream false.")
    counts = None if images.labels is None else np.bincount(images.labels, minlength=len(classes))
    return ClassTarget(classes, counts, config.logit_adjustment)


def load_target(model: Model, classes: Sequence[str]) -> Target:
    """Build the target of a stored model, to predict and to score."""
    if model.meta.get("target") == "labels":
        return LabelTarget(classes, thresholds=model.meta.get("thresholds"))
    if model.meta.get("target") == "number":
        raw = model.meta.get("checkpoint")  # weights of a checkpoint answer in deviations from the mean
        return NumberTarget(classes, *(model.meta["mean"], model.meta["deviation"]) if raw else (0.0, 1.0))
    return ClassTarget(classes)


def restore_target(state: Mapping[str, Tensor], labels: Tensor | None, outputs: int) -> Target:
    """Build the target of a dumped step from its checkpoint and its labels."""
    names = [str(number) for number in range(outputs)]
    if labels is None or labels.ndim == 1:
        target = ClassTarget(names)
        target.offset = state.get("target.offset")
        return target
    if labels.is_floating_point():
        return NumberTarget(names, float(state["target.mean"]), float(state["target.deviation"]))
    return LabelTarget(names)


def check_options(config: TrainConfig, kind: str) -> None:
    """Refuse the options that have no meaning for a kind of target."""
    needs_class = {
        "--unlabelled": config.unlabelled is not None,
        "--balance": config.balance,
        "--logit-adjustment": config.logit_adjustment not in ("auto", 0),
        f"--labels {config.labels:g}": config.labels > 1,
    }
    needs_classes = {
        "--classifier logistic": config.classifier == "logistic",
        "--mixing.smoothing": config.mixing.smoothing not in ("auto", 0),
    }
    refused = {"class": {}, "labels": needs_class, "number": needs_class | needs_classes}[kind]
    for option, is_used in refused.items():
        if is_used:
            has = "several labels" if kind == "labels" else "a number"
            raise UserError(f"{option} needs one class per image, but these images have {has}. Leave it out.")


def imbalance(images: ImageDataset, classes: int) -> float:
    """Return the images of the largest class relative to the smallest; 1 if that is unknown."""
    if images.labels is None:
        return 1.0
    counts = np.bincount(images.labels, minlength=classes)
    return float(counts.max() / max(1, counts.min()))
