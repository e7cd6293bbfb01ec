"""What a network learns about an image (``--target``): one class, several labels, or a number.

A target owns the loss, the scores, and what predict and eval show.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.mixup import soft_targets
from frugalvit.data.dataset import ImageDataset
from frugalvit.errors import UserError
from frugalvit.experiment.builders import EvalSet
from frugalvit.experiment.calibration import Calibration, describe_calibration
from frugalvit.experiment.load_model import Model
from frugalvit.experiment.summary import Answers, per_class_table, show_mistakes, worst_mistakes
from frugalvit.probing.metrics import average_precisions, best_thresholds, chance_precision
from frugalvit.tasks.classification.health import chance_loss
from frugalvit.tasks.classification.metrics import ClassificationScores, Scores, StoredScores
from frugalvit.utils.tables import Table

_SHOWN_MISTAKES = 24
_RANGES = 10  # of a number, in the table of answers


Details = tuple[list[dict[str, Any]], Table, dict[str, Any]]
"""What a run shows of its answers: the worst mistakes with pictures, a table, and values for its summary."""
Calibrated = Calibration | str | None
"""The calibration of a run, the reason why it has none, or None if its target has no probabilities."""


class Target(nn.Module, ABC):
    """One kind of target: K outputs per image, named by ``classes``."""

    kind: ClassVar[str]  # as --target names it
    metric: str  # the main score; its highest value marks the best weights
    loss_name: ClassVar[str] = "cross_entropy"

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__()
        self.classes = tuple(classes)

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of logits (B, K); targets: those of ``Batch``."""

    @abstractmethod
    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        """Return the loss of the best constant answer, and its deviation over images; None: the truth is unknown."""

    @abstractmethod
    def make_scores(self, images: int, device: torch.device) -> Scores:
        """Return empty scores for a dataset."""

    @abstractmethod
    def details(
        self, scores: Any, final: Answers | None, dataset: EvalSet, location: str, found: Calibrated
    ) -> Details:
        """Return details of the final scores.

        final: the answers to the images, if they have one class.   location: folder or table of the data
        """

    @abstractmethod
    def answers(self, logits: Tensor) -> Tensor:
        """Return the probabilities or the values (B, K)."""

    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        """Return the facts of each image for ``predict``: its ``top`` classes with their probabilities."""
        highest, labels = (part.tolist() for part in answers.topk(min(top, len(self.classes)), dim=1))
        return [
            {"predictions": [{"class": self.classes[i], "probability": p} for i, p in zip(best, row, strict=True)]}
            for best, row in zip(labels, highest, strict=True)
        ]

    # -- the steps of a training that a target may need; they do nothing by default

    def start_classifier(self, backbone: Backbone, *, loaded: bool) -> None:
        """Set the classifier's first weights. ``loaded``: they are those of --init."""

    def adjust_fitted(self, bias: Tensor) -> Tensor:
        """Return the bias that the loss expects of a classifier that was fitted by logistic regression."""
        return bias

    def tune(self, score: Callable[[], Any]) -> None:
        """Choose settings of the answers on validation images; ``score`` returns their scores."""

    def finish(self, network: Backbone) -> None:
        """Change the final weights to those that are exported."""

    def meta(self) -> dict[str, Any]:
        """Return what the model folder stores for ``load_target``."""
        return {}


class ClassTarget(Target):
    """One class per image: softmax cross-entropy, with logit adjustment for rare classes.

    Logit adjustment (Menon et al., ICLR 2021) adds the log of the share π_k of each class to its logit z_k, in the loss
    only: L = -Σ_k y_k · log softmax(z + τ · log π)_k. So the network learns what an image says beyond the frequency of
    the class. τ = 1 is balanced softmax (Ren et al., NeurIPS 2020), which minimizes the mean error per class.
    """

    kind = "class"

    def __init__(self, classes: Sequence[str], counts: np.ndarray | None = None, adjustment: float = 0.0) -> None:
        """counts: training images of each class; without them a checkpoint sets the shares. adjustment: τ."""
        super().__init__(classes)
        self.metric = "mean_per_class" if adjustment else "top1"
        counts = np.ones(len(classes)) if counts is None else counts
        offset = adjustment * torch.from_numpy(counts / counts.sum()).float().clamp(min=1e-12).log()
        self.offset: Tensor | None
        self.register_buffer("offset", offset if adjustment else None)  # None is not part of a checkpoint

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits if self.offset is None else logits + self.offset, targets)

    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        classes = len(self.classes)
        counts = np.ones(classes) if truth is None else np.bincount(truth, minlength=classes)
        return chance_loss(counts, smoothing, balance=balance)

    def make_scores(self, images: int, device: torch.device) -> ClassificationScores:
        return ClassificationScores(len(self.classes), device)

    def details(
        self, scores: Any, final: Answers | None, dataset: EvalSet, location: str, found: Calibrated
    ) -> Details:
        assert final is not None
        answers, summary = final, {"confusion": scores.confusion.tolist()}
        if found is not None:
            summary["calibration"] = describe_calibration(answers.logits, answers.labels, found)
        if isinstance(found, Calibration):
            answers = replace(answers, logits=answers.logits / found.temperature)
        mistakes = worst_mistakes(answers, dataset.store, self.classes, location)
        return mistakes, per_class_table(scores.confusion, self.classes), summary

    def answers(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)

    def adjust_fitted(self, bias: Tensor) -> Tensor:
        return bias if self.offset is None else bias - self.offset.to(bias)


class StoredTarget(Target):
    """A target whose scores need the answers and the truth (N, K) of all images."""

    column: str  # heading of the answers

    @abstractmethod
    def measure(self, answers: Tensor, truth: Tensor) -> dict[str, float]:
        """Return the scores, the main one first; NaN if one is undefined."""

    @abstractmethod
    def chance(self, truth: Tensor) -> dict[str, float]:
        """Return the scores of an answer that does not depend on the image."""

    @abstractmethod
    def answer_table(self, answers: Tensor, truth: Tensor) -> Table:
        """Return a table of the answers."""

    @abstractmethod
    def texts(self, answers: Tensor) -> list[str]:
        """Return each answer as a text; also for the truth."""

    @abstractmethod
    def worst(self, answers: Tensor, truth: Tensor) -> list[tuple[int, str, str, float | None]]:
        """Return the worst mistakes: row, truth, answer, and its probability."""

    def make_scores(self, images: int, device: torch.device) -> StoredScores:
        return StoredScores(images, self, device)

    def details(
        self, scores: Any, final: Answers | None, dataset: EvalSet, location: str, found: Calibrated
    ) -> Details:
        answers, truth, index = scores.scored()
        entries = [(int(index[row]), true, answer, sure) for row, true, answer, sure in self.worst(answers, truth)]
        table = self.answer_table(answers, truth)
        summary = {"per_class": {"columns": table.columns, "rows": table.rows}} | self.meta()
        return show_mistakes(entries, dataset.store, location), table, summary


class LabelTarget(StoredTarget):
    """Several labels per image: the mean binary cross-entropy of the known ones, mAP, and a threshold for every label.

    thresholds: (K,) probabilities from which on a label counts as present; ``tune`` chooses them
    """

    kind, metric, column = "labels", "map", "labels"

    def __init__(
        self, classes: Sequence[str], truth: np.ndarray | None = None, thresholds: Sequence[float] | None = None
    ) -> None:
        """truth: (N, K) of the training images, 1 = present, 0 = absent, -1 = unknown"""
        super().__init__(classes)
        truth = np.zeros((0, len(classes))) if truth is None else truth
        shares = ((truth == 1).sum(0) + 1) / ((truth >= 0).sum(0) + 2)  # one image more of each kind: never 0 or 1
        self.constant = torch.from_numpy(shares).float().logit()  # the best constant answer
        self.thresholds = torch.full((len(classes),), 0.5) if thresholds is None else torch.tensor(thresholds)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses, known = self._losses(logits, targets)
        return losses.sum() / known.sum().clamp(min=1)

    def _losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of every label (B, K), 0 where it is unknown, and where it is known."""
        targets = soft_targets(targets, len(self.classes))
        known = targets.isfinite()
        return known * F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none"), known

    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        assert truth is not None
        losses, known = self._losses(self.constant.expand(truth.shape), torch.from_numpy(truth))
        of_images = losses.sum(1) / known.sum(1).clamp(min=1)
        return float(losses.sum() / known.sum().clamp(min=1)), float(of_images.std(correction=0))

    @torch.no_grad()
    def start_classifier(self, backbone: Backbone, *, loaded: bool) -> None:
        """Start at the share of each label, so that the first steps need not learn that most labels are absent."""
        if not loaded:
            backbone.linear_classifier().bias.copy_(self.constant)

    def tune(self, score: Callable[[], StoredScores]) -> None:
        self.thresholds.copy_(best_thresholds(*score().scored()[:2]))

    def meta(self) -> dict[str, Any]:
        return {"target": self.kind, "thresholds": [round(value, 6) for value in self.thresholds.tolist()]}

    def measure(self, answers: Tensor, truth: Tensor) -> dict[str, float]:
        """Return mAP over the labels that some image has, and F1 over all decisions."""
        chosen, present = (answers >= self.thresholds) & (truth >= 0), truth == 1
        f1 = 2 * (chosen & present).sum() / (chosen.sum() + present.sum())
        return {"map": 100 * float(average_precisions(answers, truth).nanmean()), "f1": 100 * float(f1)}

    def chance(self, truth: Tensor) -> dict[str, float]:
        return {"map": round(chance_precision(truth), 6)}

    def answer_table(self, answers: Tensor, truth: Tensor) -> Table:
        """Return every label with its images, average precision, threshold, precision and recall; worst first."""
        chosen, present = (answers >= self.thresholds) & (truth >= 0), truth == 1
        images, hits = present.sum(0), (chosen & present).sum(0)
        shares = [average_precisions(answers, truth), hits / chosen.sum(0).clamp(min=1), hits / images]
        columns = [self.classes, images.tolist(), *((100 * share).tolist() for share in shares)]
        rows: list[list[object]] = [
            [name, count, round(ap, 2), round(threshold, 4), round(precision, 2), round(recall, 2)]
            for name, count, ap, precision, recall, threshold in zip(*columns, self.thresholds.tolist(), strict=True)
            if count
        ]
        rows.sort(key=lambda row: row[2])  # type: ignore[arg-type, return-value]
        titles = ["label", "images", "average precision, %", "threshold", "precision, %", "recall, %"]
        return Table(titles, rows, "Each label")

    def worst(self, answers: Tensor, truth: Tensor) -> list[tuple[int, str, str, float | None]]:
        """Return the surest wrong decision about each image."""
        wrong = ((answers >= self.thresholds) != (truth == 1)) & (truth >= 0)
        highest, label = torch.where(truth == 1, 1 - answers, answers).masked_fill(~wrong, -1).max(1)
        mistakes: list[tuple[int, str, str, float | None]] = []
        for row in highest.argsort(descending=True)[:_SHOWN_MISTAKES].tolist():
            name, sure = self.classes[label[row]], float(highest[row])
            texts = (name, f"no {name}") if truth[row, label[row]] == 1 else (f"no {name}", name)
            mistakes += [(row, *texts, sure)] if sure >= 0 else []
        return mistakes

    def answers(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def _present(self, answers: Tensor) -> list[list[str]]:
        chosen = (answers >= self.thresholds.to(answers.device)).tolist()
        return [[name for name, is_present in zip(self.classes, row, strict=True) if is_present] for row in chosen]

    def texts(self, answers: Tensor) -> list[str]:
        return ["|".join(names) for names in self._present(answers)]

    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        guesses = super().describe(answers, top)
        return [{"labels": names, **facts} for names, facts in zip(self._present(answers), guesses, strict=True)]


class NumberTarget(StoredTarget):
    """A number per image (also ordered grades): the squared error of (y - mean) / deviation, R² and the mean error.

    ``finish`` moves mean and deviation into the classifier, so that exported weights answer in the user's unit.
    """

    kind, metric, loss_name = "number", "r2", "squared_error"

    def __init__(self, classes: Sequence[str], mean: float = 0.0, deviation: float = 1.0) -> None:
        super().__init__(classes)
        self.column = classes[0]
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(logits, (targets - self.mean) / self.deviation)

    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        assert truth is not None
        return 1.0, float((((truth - float(self.mean)) / float(self.deviation)) ** 2).std())

    def start_classifier(self, backbone: Backbone, *, loaded: bool) -> None:
        """Turn the unit of a loaded classifier into deviations from the mean."""
        if loaded:
            _change_unit(backbone, 1 / float(self.deviation), -float(self.mean / self.deviation))

    def finish(self, network: Backbone) -> None:
        _change_unit(network, float(self.deviation), float(self.mean))

    def meta(self) -> dict[str, Any]:
        return {"target": self.kind, "mean": float(self.mean), "deviation": float(self.deviation)}

    def measure(self, answers: Tensor, truth: Tensor) -> dict[str, float]:
        """Return R² = 1 - Σ (y - ŷ)² / Σ (y - mean)² in per cent, the mean absolute error, and for whole numbers the
        share of answers that are right if they are rounded.
        """
        answer, true = answers.double(), truth.double()
        error = answer - true
        r2 = 1 - error.square().sum() / (true - true.mean()).square().sum()
        measured = {"r2": 100 * float(r2), "mae": float(error.abs().mean())}
        if bool((true == true.round()).all()):
            measured["rounded"] = 100 * float((answer.round() == true).double().mean())
        return measured

    def chance(self, truth: Tensor) -> dict[str, float]:
        """Return the scores of the mean (R²) and of the median (mean absolute error)."""
        return {"r2": 0.0, "mae": float((truth - truth.median()).abs().double().mean())}

    def answer_table(self, answers: Tensor, truth: Tensor) -> Table:
        """Return equally many images per range of the truth: mean answer and mean absolute error."""
        rows: list[list[object]] = []
        for part in truth.flatten().argsort(stable=True).chunk(_RANGES):
            true, answer = truth[part].double(), answers[part].double()
            facts = [float(f"{value.mean():.4g}") for value in (true, answer, (answer - true).abs())]
            rows.append([" to ".join(self.texts(true[[0, -1]])), len(part), *facts])
        return Table([self.column, "images", "mean", "mean of the answers", "mean absolute error"], rows, "Each range")

    def worst(self, answers: Tensor, truth: Tensor) -> list[tuple[int, str, str, float | None]]:
        order = (answers - truth).abs().flatten().argsort(descending=True)[:_SHOWN_MISTAKES]
        columns = order.tolist(), self.texts(truth[order]), self.texts(answers[order])
        return [(row, true, answer, None) for row, true, answer in zip(*columns, strict=True)]

    def answers(self, logits: Tensor) -> Tensor:
        return logits * self.deviation + self.mean

    def texts(self, answers: Tensor) -> list[str]:
        return [f"{value:.6g}" for value in answers.flatten().tolist()]

    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        return [{"value": value} for value in answers.flatten().tolist()]


@torch.no_grad()
def _change_unit(network: Backbone, factor: float, shift: float) -> None:
    """Multiply the output of the classifier and add to it."""
    head = network.linear_classifier()
    head.weight.mul_(factor)
    head.bias.mul_(factor).add_(shift)


# -- the target of a run, or of a stored model


def make_target(config: ResolvedTrainConfig, classes: Sequence[str], images: ImageDataset | None = None) -> Target:
    """Build the target of a run. images: those of the training; without them a checkpoint sets its values."""
    truth = None if images is None else images.truth
    if config.target == "labels":
        return LabelTarget(classes, truth)
    if config.target == "number":
        return NumberTarget(classes, *(() if truth is None else (float(truth.mean(dtype=float)), float(truth.std()))))
    if config.logit_adjustment and images is not None and truth is None:
        raise UserError("--logit-adjustment needs the labels of all images: use --stream false.")
    counts = None if truth is None else np.bincount(truth, minlength=len(classes))
    return ClassTarget(classes, counts, config.logit_adjustment)


def load_target(model: Model, classes: Sequence[str]) -> Target:
    """Build the target of a stored model, to predict and to score."""
    meta = model.meta
    if meta.get("target") == "labels":
        return LabelTarget(classes, thresholds=meta["thresholds"])
    if meta.get("target") == "number":  # the weights of a checkpoint answer in deviations from the mean
        return NumberTarget(classes, *((meta["mean"], meta["deviation"]) if meta.get("checkpoint") else ()))
    return ClassTarget(classes)


def check_options(config: TrainConfig, kind: str) -> None:
    """Refuse the options that have no meaning for a kind of target."""
    refused = {
        "--unlabelled": config.unlabelled is not None,
        "--balance": config.balance,
        "--logit-adjustment": config.logit_adjustment not in ("auto", 0),
        f"--labels {config.labels:g}": config.labels > 1,
        "--mixing.smoothing": config.mixing.smoothing not in ("auto", 0),
        "--classifier logistic": config.classifier == "logistic" and kind == "number",
    }
    for option, is_used in refused.items():
        if is_used and kind != "class":
            has = "several labels" if kind == "labels" else "a number"
            raise UserError(f"{option} needs one class per image. These images have {has}. Remove {option}.")
