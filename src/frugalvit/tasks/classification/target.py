"""What a network learns about an image (``--target``): one class, several labels (``multi_label.py``) or a number
(``regression.py``). A target owns the loss, the scores, and what predict and eval write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.data.loader import eval_batches
from frugalvit.experiment.builders import EvalSet
from frugalvit.experiment.summary import collect_answers, measure_calibration, per_class_table, worst_mistakes
from frugalvit.tasks.classification.health import chance_loss
from frugalvit.tasks.classification.metrics import ClassificationScores, Scores
from frugalvit.utils.tables import Table


class Details(NamedTuple):
    """What a run shows of its answers: the worst mistakes with pictures, a table, and values for its summary."""

    mistakes: list[dict[str, Any]]
    table: Table
    summary: dict[str, Any]


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
    def details(self, scores: Any, network: Backbone, dataset: EvalSet, location: str) -> Details:
        """Return details of the final scores; location: folder or table of the data."""

    # -- the steps of a training that a target may need; they do nothing by default

    def start_classifier(self, backbone: Backbone, *, loaded: bool) -> None:
        """Set the classifier's first weights. ``loaded``: they are those of --init."""

    def adjust_fitted(self, bias: Tensor) -> Tensor:
        """Return the bias that the loss expects of a classifier that was fitted by logistic regression."""
        return bias

    def tune(self, score: Callable[[], Any]) -> None:
        """Choose settings of the answers on validation images; ``score`` returns their scores, or None without any."""

    def finish(self, network: Backbone) -> None:
        """Change the final weights to those that are exported."""

    def meta(self) -> dict[str, Any]:
        """Return what the model folder stores, so that ``registry.load_target`` makes this target again."""
        return {}

    # -- what predict writes

    @abstractmethod
    def answers(self, logits: Tensor) -> Tensor:
        """Return the probabilities or the values (B, K)."""

    @abstractmethod
    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        """Return the facts of each image for --json; ``top``: number of classes."""

    @abstractmethod
    def columns(self, top: int) -> list[str]:
        """Return the titles of ``cells``."""

    def cells(self, facts: dict[str, Any]) -> list[object]:
        """Return an image's part of a row of the printed table."""
        return [f"{guess['class']} {guess['probability']:.1%}" for guess in facts["predictions"]]

    def csv_rows(self, facts: dict[str, Any]) -> list[dict[str, object]]:
        """Return the lines of an image in a CSV file, by column."""
        return [
            {"rank": rank, "class": guess["class"], "probability": f"{guess['probability']:.6f}"}
            for rank, guess in enumerate(facts["predictions"], 1)
        ]

    # -- what eval writes of several labels and numbers

    def answer_table(self, answers: Tensor, truth: Tensor) -> Table:
        """Return a table of the answers (N, K)."""
        raise NotImplementedError

    def truth_rows(self, images: Sequence[str], answers: Tensor, truth: Tensor) -> tuple[list[str], list[list[object]]]:
        """Return columns and rows of truth and answer of every image, for a CSV file."""
        raise NotImplementedError


class ClassTarget(Target):
    """One class per image: softmax cross-entropy, with logit adjustment for rare classes.

    Logit adjustment (Menon et al., ICLR 2021) adds the log of the share π_k of each class to its logit z_k, in the loss
    only. So the network learns how much an image speaks for a class beyond the frequency of the class:

        L = -Σ_k y_k · log softmax(z + τ · log π)_k

    τ = 1 is balanced softmax (Ren et al., NeurIPS 2020), which minimizes the mean error per class; τ = 0 is the plain
    loss.
    """

    kind = "class"

    def __init__(self, classes: Sequence[str], counts: np.ndarray | None = None, adjustment: float = 0.0) -> None:
        """counts: training images of each class; ``adjustment`` (τ) needs them."""
        super().__init__(classes)
        self.metric = "mean_per_class" if adjustment else "top1"
        self.offset: Tensor | None
        offset = None
        if adjustment:
            assert counts is not None
            offset = adjustment * torch.from_numpy(counts / counts.sum()).float().clamp(min=1e-12).log()
        self.register_buffer("offset", offset)  # None is not part of a checkpoint

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits if self.offset is None else logits + self.offset, targets)

    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        classes = len(self.classes)
        counts = np.ones(classes) if truth is None else np.bincount(truth, minlength=classes)
        return chance_loss(counts, smoothing, balance=balance)

    def make_scores(self, images: int, device: torch.device) -> ClassificationScores:
        return ClassificationScores(len(self.classes), device)

    def adjust_fitted(self, bias: Tensor) -> Tensor:
        return bias if self.offset is None else bias - self.offset.to(bias)

    def details(self, scores: ClassificationScores, network: Backbone, dataset: EvalSet, location: str) -> Details:
        answers = collect_answers(network, dataset, "collecting mistakes")
        summary = {"confusion": scores.confusion.tolist(), "calibration": measure_calibration(answers)}
        mistakes = worst_mistakes(answers, dataset.store, self.classes, location)
        return Details(mistakes, per_class_table(scores.confusion, self.classes), summary)

    def answers(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)

    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        return [{"predictions": guesses} for guesses in top_classes(answers, self.classes, top)]

    def columns(self, top: int) -> list[str]:
        return [f"{rank}." for rank in range(1, min(top, len(self.classes)) + 1)]



def top_classes(answers: Tensor, classes: Sequence[str], top: int) -> list[list[dict[str, Any]]]:
    """Return the ``top`` classes of each image with their probabilities."""
    highest, labels = answers.topk(min(top, len(classes)), dim=1)
    return [
        [{"class": classes[i], "probability": p} for i, p in zip(best, row, strict=True)]
        for best, row in zip(labels.tolist(), highest.tolist(), strict=True)
    ]


@torch.inference_mode()
def score_alone(target: Target, network: Backbone, dataset: EvalSet) -> Scores:
    """Score a network on a dataset in one process."""
    network.eval()
    scores = target.make_scores(len(dataset.store), dataset.store.device)
    for images, labels, index in eval_batches(dataset.store, dataset.transform, dataset.batch):
        assert labels is not None
        scores.add(network.classify(network(images).pooled).float(), labels, index)
    return scores
