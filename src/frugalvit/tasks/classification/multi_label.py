"""Several labels per image: binary cross-entropy, mAP, and a threshold for every label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.experiment.builders import EvalSet
from frugalvit.experiment.summary import show_mistakes
from frugalvit.probing.metrics import average_precisions, best_thresholds, chance_precision
from frugalvit.tasks.classification.metrics import StoredScores
from frugalvit.tasks.classification.target import Details, Target, top_classes
from frugalvit.utils.tables import Table

_SHOWN_MISTAKES = 24


class LabelTarget(Target):
    """Each label is present, absent or unknown: the mean of the binary cross-entropies of the known ones.

    thresholds: (K,) probabilities from which on a label counts as present; ``tune`` chooses them
    """

    kind = "labels"
    metric = "map"

    def __init__(
        self, classes: Sequence[str], targets: np.ndarray | None = None, thresholds: Sequence[float] | None = None
    ) -> None:
        """targets: (N, K) of the training images, 1 = present, 0 = absent, -1 = unknown"""
        super().__init__(classes)
        self.shares = None
        if targets is not None:  # one image more of each kind, so that no share is 0 or 1
            present, known = (targets == 1).sum(0), (targets >= 0).sum(0)
            self.shares = torch.from_numpy((present + 1) / (known + 2)).float()
        self.thresholds = torch.full((len(classes),), 0.5) if thresholds is None else torch.tensor(thresholds)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            targets = targets.float().masked_fill(targets < 0, torch.nan)
        known = targets.isfinite()
        losses = F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none")
        return (losses * known).sum() / known.sum().clamp(min=1)

    def chance_loss(self, truth: np.ndarray | None, smoothing: float, *, balance: bool) -> tuple[float, float]:
        assert truth is not None
        known = truth >= 0
        share = (truth == 1).sum(0) / known.sum(0).clip(1)
        share = ((1 - smoothing) * share + smoothing / 2).clip(1e-9, 1 - 1e-9)
        target = (1 - smoothing) * truth + smoothing / 2
        losses = -(target * np.log(share) + (1 - target) * np.log(1 - share)) * known
        of_image = losses.sum(1) / known.sum(1).clip(1)
        return float(losses.sum() / known.sum().clip(1)), float(of_image.std())

    def make_scores(self, images: int, device: torch.device) -> LabelScores:
        return LabelScores(images, len(self.classes), device, self.answers, self.thresholds)

    @torch.no_grad()
    def start_classifier(self, backbone: Backbone, *, loaded: bool) -> None:
        """Start at the share of each label, so that the first steps do not go into learning that most are absent."""
        if not loaded:
            assert self.shares is not None
            bias = backbone.linear_classifier().bias
            bias.copy_(self.shares.to(bias).logit())

    def tune(self, score: Callable[[], Any]) -> None:
        scores = score()
        if scores is not None:
            self.thresholds.copy_(best_thresholds(*scores.scored()[:2]))

    def meta(self) -> dict[str, Any]:
        return {"target": self.kind, "thresholds": [round(value, 6) for value in self.thresholds.tolist()]}

    def details(self, scores: LabelScores, network: Backbone, dataset: EvalSet, location: str) -> Details:
        answers, truth, index = scores.scored()
        wrong = ((answers >= self.thresholds) != (truth == 1)) & (truth >= 0)
        confidence = torch.where(truth == 1, 1 - answers, answers).masked_fill(~wrong, -1)
        highest, label = confidence.max(1)  # one mistake of each image
        rows = [row for row in highest.argsort(descending=True)[:_SHOWN_MISTAKES].tolist() if highest[row] >= 0]
        entries = []
        for row in rows:
            texts = [self.classes[label[row]], f"no {self.classes[label[row]]}"]
            is_present = bool(truth[row, label[row]] == 1)
            entries.append((int(index[row]), texts[not is_present], texts[is_present], float(highest[row])))
        table = self.answer_table(answers, truth)
        stored = {"columns": table.columns, "rows": table.rows}
        return Details(show_mistakes(entries, dataset.store, location), table, {"per_class": stored} | self.meta())

    def answer_table(self, answers: Tensor, truth: Tensor) -> Table:
        """Return every label with its images, average precision, threshold, precision and recall; worst first."""
        precision = average_precisions(answers, truth)
        chosen, present = (answers >= self.thresholds) & (truth >= 0), truth == 1
        rows: list[list[object]] = []
        for k, name in enumerate(self.classes):
            images, count = int(present[:, k].sum()), int(chosen[:, k].sum())
            if images:
                hits = int((chosen & present)[:, k].sum())
                shares = [100 * float(precision[k]), 100 * hits / count if count else 0.0, 100 * hits / images]
                ap, precise, recall = (round(share, 2) for share in shares)
                rows.append([name, images, ap, round(float(self.thresholds[k]), 4), precise, recall])
        rows.sort(key=lambda row: row[2])  # type: ignore[arg-type, return-value]
        columns = ["label", "images", "average precision, %", "threshold", "precision, %", "recall, %"]
        return Table(columns, rows, "Each label")

    # -- what predict writes

    def answers(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def describe(self, answers: Tensor, top: int) -> list[dict[str, Any]]:
        chosen = (answers >= self.thresholds.to(answers)).tolist()
        labels = [[name for name, is_present in zip(self.classes, row, strict=True) if is_present] for row in chosen]
        guesses = top_classes(answers, self.classes, top)
        return [{"labels": names, "predictions": best} for names, best in zip(labels, guesses, strict=True)]

    def columns(self, top: int) -> list[str]:
        return ["labels", "most probable"]

    def cells(self, facts: dict[str, Any]) -> list[object]:
        return ["|".join(facts["labels"]), ", ".join(map(str, super().cells(facts)))]

    def csv_rows(self, facts: dict[str, Any]) -> list[dict[str, object]]:
        return [row | {"present": int(row["class"] in facts["labels"])} for row in super().csv_rows(facts)]

    def truth_rows(self, images: Sequence[str], answers: Tensor, truth: Tensor) -> tuple[list[str], list[list[object]]]:
        rows: list[list[object]] = []
        for image, facts, row in zip(images, self.describe(answers, 1), truth.tolist(), strict=True):
            present = [name for name, value in zip(self.classes, row, strict=True) if value == 1]
            rows.append([image, "|".join(present), "|".join(facts["labels"])])
        return ["image", "labels", "predicted"], rows


class LabelScores(StoredScores):
    """mAP over the labels that some image has, and F1 over all decisions, at the thresholds of the target."""

    def __init__(
        self, images: int, labels: int, device: torch.device, answer: Callable[[Tensor], Tensor], thresholds: Tensor
    ) -> None:
        super().__init__(images, labels, device, answer)
        self.thresholds = thresholds

    def measure(self, answers: Tensor, truth: Tensor, keep: Tensor) -> dict[str, Tensor]:
        chosen, present = (answers >= self.thresholds) & (truth >= 0), truth == 1
        counts = torch.stack([(chosen & present).sum(1), chosen.sum(1) + present.sum(1)], 1).double()
        hits, both = (keep.double() @ counts).unbind(1)
        precisions = 100 * average_precisions(answers, truth, keep).nanmean(1)
        return {"map": precisions, "f1": 100 * 2 * hits / both}

    def chance(self, truth: Tensor) -> dict[str, float]:
        return {"map": round(chance_precision(truth), 6)}
