"""A number per image (also ordered grades): squared error, R² and the mean absolute error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.experiment.builders import EvalSet
from frugalvit.experiment.summary import show_mistakes
from frugalvit.tasks.classification.metrics import StoredScores
from frugalvit.tasks.classification.target import Details, Target
from frugalvit.utils.tables import Table

_SHOWN_MISTAKES = 24
_RANGES = 10  # rows of the table


class NumberTarget(Target):
    """The squared error of ((y - mean) / deviation): the network learns numbers of about one size.

    ``finish`` moves mean and deviation into the classifier, so that exported weights answer in the user's unit.
    """

    kind, metric, loss_name = "number", "r2", "squared_error"

    def __init__(self, classes: Sequence[str], mean: float, deviation: float) -> None:
        super().__init__(classes)
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))

    @classmethod
    def fitted(cls, classes: Sequence[str], targets: np.ndarray | None) -> Self:
        """Take mean and deviation from the numbers (N, 1) of the training images."""
        assert targets is not None
        values = targets.astype(np.float64)
        return cls(classes, float(values.mean()), float(values.std()))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(logits, (targets - self.mean) / self.deviation)

    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        assert truth is not None
        return 1.0, float((((truth - float(self.mean)) / float(self.deviation)) ** 2).std())

    def make_scores(self, images: int, device: torch.device) -> NumberScores:
        return NumberScores(images, 1, device, self.answers)

    def start_classifier(self, backbone: Backbone, *, loaded: bool) -> None:
        """Turn the unit of a loaded classifier into deviations from the mean."""
        if loaded:
            _change_unit(backbone, 1 / float(self.deviation), -float(self.mean / self.deviation))

    def finish(self, network: Backbone) -> None:
        _change_unit(network, float(self.deviation), float(self.mean))

    def meta(self) -> dict[str, Any]:
        return {"target": self.kind, "mean": float(self.mean), "deviation": float(self.deviation)}

    def details(self, scores: NumberScores, network: Backbone, dataset: EvalSet, location: str) -> Details:
        answers, truth, index = (part.flatten() for part in scores.scored())
        order = (answers - truth).abs().argsort(descending=True)[:_SHOWN_MISTAKES].tolist()
        entries = [(int(index[row]), f"{float(truth[row]):.4g}", f"{float(answers[row]):.4g}", None) for row in order]
        table = self.answer_table(answers, truth)
        stored = {"columns": table.columns, "rows": table.rows}
        return Details(show_mistakes(entries, dataset.store, location), table, {"per_class": stored} | self.meta())

    def answer_table(self, answers: Tensor, truth: Tensor) -> Table:
        """Return equally many images per range of the truth: mean answer and mean absolute error."""
        answers, truth = answers.flatten(), truth.flatten()
        rows: list[list[object]] = []
        for part in truth.argsort(stable=True).chunk(_RANGES):
            true, answer = truth[part].double(), answers[part].double()
            facts = [float(value) for value in (true.mean(), answer.mean(), (answer - true).abs().mean())]
            between = f"{float(true[0]):.4g} to {float(true[-1]):.4g}"
            rows.append([between, len(part), *(float(f"{value:.4g}") for value in facts)])
        columns = [self.classes[0], "images", "mean", "mean of the answers", "mean absolute error"]
        return Table(columns, rows, "Each range")

    # -- what predict writes

    def answers(self, logits: Tensor) -> Tensor:
        return logits * self.deviation + self.mean

    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        return [{"value": value} for value in answers[:, 0].tolist()]

    def columns(self, top: int) -> list[str]:
        return [self.classes[0]]

    def cells(self, facts: dict[str, Any]) -> list[object]:
        return [f"{facts['value']:.4g}"]

    def csv_rows(self, facts: dict[str, Any]) -> list[dict[str, object]]:
        return [{self.classes[0]: f"{facts['value']:.6g}"}]

    def truth_rows(self, images: Sequence[str], answers: Tensor, truth: Tensor) -> tuple[list[str], list[list[object]]]:
        rows = zip(images, truth[:, 0].tolist(), answers[:, 0].tolist(), strict=True)
        return ["image", self.classes[0], "predicted"], [
            [image, f"{y:.6g}", f"{value:.6g}"] for image, y, value in rows
        ]


@torch.no_grad()
def _change_unit(network: Backbone, factor: float, shift: float) -> None:
    """Multiply the output of the classifier and add to it."""
    head = network.linear_classifier()
    head.weight.mul_(factor)
    head.bias.mul_(factor).add_(shift)


class NumberScores(StoredScores):
    """R² = 1 - Σ (y - ŷ)² / Σ (y - mean)² in per cent, and the mean absolute error.

    For whole numbers also the share of answers that are right if they are rounded.
    """

    limits: ClassVar[dict[str, tuple[float, float]]] = {"r2": (-math.inf, 100.0), "mae": (0.0, math.inf)}

    def measure(self, answers: Tensor, truth: Tensor, keep: Tensor) -> dict[str, Tensor]:
        answer, true, keep = answers[:, 0].double(), truth[:, 0].double(), keep.double()
        centred = true - true.mean()
        images = keep.sum(1)
        spread = keep @ centred.square() - (keep @ centred).square() / images
        measured = {
            "r2": 100 * (1 - keep @ (answer - true).square() / spread),
            "mae": keep @ (answer - true).abs() / images,
        }
        if bool((true == true.round()).all()):
            measured["rounded"] = 100 * (keep @ (answer.round() == true).double()) / images
        return measured

    def chance(self, truth: Tensor) -> dict[str, float]:
        """Return the scores of the mean (R²) and of the median (mean absolute error)."""
        values = truth[:, 0].double()
        return {"r2": 0.0, "mae": float((values - values.median()).abs().mean())}
