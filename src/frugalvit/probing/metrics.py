"""The metrics of EsViT's Table 9 (accuracy, mean per class, 11-point mAP, ROC-AUC), and mAP with its thresholds.

Every metric of ``score`` takes tensors on any device and returns a float in [0, 100].
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.utils.intervals import PARTS, jackknife_facts, jackknife_interval, pseudo_values, wilson_interval

Metric = Literal["accuracy", "mean_per_class", "map", "map11", "roc_auc"]
METRIC_NAMES: dict[Metric, str] = {
    "accuracy": "accuracy",
    "mean_per_class": "mean per class",
    "map": "mAP",
    "map11": "11-point mAP",
    "roc_auc": "ROC AUC",
}


def score(metric: Metric, scores: Tensor, targets: Tensor) -> float:
    """Compute one metric of class scores (N, C); targets: (N,) classes, or (N, C) labels for mAP."""
    targets = targets.to(scores.device)
    if metric in ("map", "map11"):
        if not (targets == 1).any():
            raise UserError("Mean average precision needs at least one positive test image.")
        if metric == "map11":
            return eleven_point_map(scores, targets)
        return 100.0 * average_precisions(scores, targets).nanmean().item()
    if metric == "roc_auc":
        if scores.shape[1] != 2:
            raise UserError(f"ROC-AUC needs two classes; this dataset has {scores.shape[1]}.")
        return roc_auc(scores[:, 1] - scores[:, 0], targets)
    ranked = rank_classes(scores, 1)
    return mean_per_class(ranked[:, 0], targets) if metric == "mean_per_class" else top_k_accuracy(ranked, targets)


def top_k_accuracy(ranked: Tensor, labels: Tensor, k: int = 1) -> float:
    """Share of rows whose label is among the first k ranked classes; ranked: (N, >= 1), labels: (N,).

    With fewer than k classes all of them count, so top-5 of two classes is 100.
    """
    if len(labels) == 0:
        raise UserError("There are no test images to score: give a test split with at least one labelled image.")
    hits = (ranked[:, :k] == labels[:, None].to(ranked.device)).any(dim=1)
    return 100.0 * hits.double().mean().item()


def rank_classes(scores: Tensor, k: int = 5) -> Tensor:
    """The k best classes of every row, ties to the smaller index: (N, C) -> (N, min(k, C))."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


def mean_per_class(predicted: Tensor, labels: Tensor) -> float:
    """Mean over the classes with images of the accuracy on these; predicted, labels: (N,)."""
    labels = labels.to(predicted.device)
    classes = int(labels.max()) + 1
    total = torch.bincount(labels, minlength=classes).double()
    right = torch.bincount(labels[predicted == labels], minlength=classes).double()
    present = total > 0
    return 100.0 * (right[present] / total[present]).mean().item()


def classification_scores(ranked: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the scores of every classifier: top1, top5, mean_per_class."""
    return {
        "top1": top_k_accuracy(ranked, labels, 1),
        "top5": top_k_accuracy(ranked, labels, 5),
        "mean_per_class": mean_per_class(ranked[:, 0], labels),
    }


def metric_interval(metric: Metric, scores: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of ``score``: Wilson's for an accuracy, the jackknife's for other metrics."""
    targets, total = targets.to(scores.device), score(metric, scores, targets)
    if metric == "accuracy":
        return wilson_interval(round(total * len(targets) / 100), len(targets))
    part, without = torch.arange(len(targets), device=scores.device) % PARTS, []
    for number in range(min(PARTS, len(targets))):
        rest = part != number
        try:
            without.append(score(metric, scores[rest], targets[rest]))
        except UserError:  # a class has images in this part only
            continue
    return jackknife_interval(total, pseudo_values(total, without))


class PartCounts:
    """Images, top-1 hits and top-5 hits by part and class, for the intervals of a classifier's scores."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.counts = torch.zeros(3 * PARTS * classes, dtype=torch.int64, device=device)

    def add(self, ranked: Tensor, labels: Tensor, index: Tensor) -> None:
        """Count images by their index in the dataset; ranked: (N, up to 5) classes, best first."""
        hits = ranked == labels[:, None]
        cells = index.to(labels.device) % PARTS * self.classes + labels
        for kind, counted in enumerate((torch.ones_like(hits[:, 0]), hits[:, 0], hits.any(1))):
            self.counts.index_add_(0, cells + kind * PARTS * self.classes, counted.long())

    def by_part(self) -> Tensor:
        """Return images, top-1 hits and top-5 hits (3, PARTS, classes)."""
        return self.counts.cpu().double().view(3, PARTS, self.classes)  # first to the CPU: MPS has no float64

    def scores(self) -> dict[str, float]:
        return _scores_of(self.by_part().sum(1))

    def facts(self) -> dict[str, Any]:
        """Return chance levels, the interval of the mean per class, and the pseudo-values of each score.

        Chance is what answering the most frequent classes of these images has, and 1/K for the mean per class.
        """
        counts = self.by_part()
        counts, images = counts[:, counts[0].sum(1) > 0], counts[0].sum(0)
        without = [_scores_of(part) for part in (counts.sum(1, True) - counts).unbind(1)]
        measured = jackknife_facts(self.scores(), without)
        frequent = images.sort(descending=True).values / images.sum().clamp(min=1)
        chance = {
            "top1": frequent[0],
            "top5": frequent[:5].sum(),
            "mean_per_class": 1 / (images > 0).sum().clamp(min=1),
        }
        return {
            "mean_per_class_interval": measured.get("mean_per_class_interval", [0.0, 100.0]),
            "chance": {name: round(100 * float(share), 6) for name, share in chance.items()},
            "pseudo_values": measured["pseudo_values"],
        }


def _scores_of(counts: Tensor) -> dict[str, float]:
    """Return the scores of counts (3, C); {} without images."""
    images, right, in_five = counts
    present = images > 0
    if not present.any():
        return {}
    return {
        "top1": 100 * float(right.sum() / images.sum()),
        "top5": 100 * float(in_five.sum() / images.sum()),
        "mean_per_class": 100 * float((right[present] / images[present]).mean()),
    }


def score_facts(ranked: Tensor, labels: Tensor, classes: int | None = None) -> dict[str, Any]:
    """Return chance levels and intervals of a classifier's scores: ``PartCounts.facts`` without the pseudo-values."""
    labels = labels.to(ranked.device)
    counts = PartCounts(classes or 1 + int(max(labels.max(), ranked.max())), ranked.device)
    counts.add(ranked, labels, torch.arange(len(labels)))
    return {name: value for name, value in counts.facts().items() if name != "pseudo_values"}


def eleven_point_map(scores: Tensor, targets: Tensor) -> float:
    """VOC 2007's mAP: 1/11 sum over r in {0, .1 .. 1} of the max precision at recall >= r, mean over classes.

    scores, targets: (N, C) with 1 = present, 0 = absent, -1 = difficult (ignored, as in the devkit). Images of equal
    score count together, so the result does not depend on their order. Classes without a positive image do not count.
    """
    _, hits, images, is_last = _rank_images(scores, targets)
    precision, recall = (hits / images.clamp(min=1)).masked_fill(~is_last, 0), hits / hits[-1]
    best = torch.stack([(precision * (recall >= level)).amax(0) for level in np.arange(11) / 10])
    return 100.0 * best.mean(0)[hits[-1] > 0].mean().item()


def average_precisions(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the average precision of every class, (C,), in [0, 1]; NaN without a positive image.

    AP = Σ_i (R_i - R_{i-1}) · P_i over the distinct scores from high to low, with recall R_i and precision P_i of all
    images from that score on. ``scores`` are (N, C).

    targets: (N, C) of 1 = present, 0 = absent, -1 = unknown (ignored)
    """
    _, hits, images, is_last = _rank_images(scores, targets)
    new_hits = (hits * is_last).cummax(0).values.diff(dim=0, prepend=torch.zeros_like(hits[:1]))
    return (new_hits * hits / images.clamp(min=1)).sum(0) / (targets == 1).sum(0)


def _rank_images(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort every class by its scores, high to low: scores, hits and images from the first on, the last of each tie."""
    scores, order = scores.sort(dim=0, descending=True, stable=True)
    targets = targets.gather(0, order)
    is_last = torch.ones_like(order, dtype=torch.bool)
    is_last[:-1] = scores[1:] != scores[:-1]
    return scores, (targets == 1).cumsum(0).double(), (targets >= 0).cumsum(0), is_last


def chance_precision(targets: Tensor) -> float:
    """Return the mAP in per cent that a random order of the images has on average.

    With P of N images positive and H_N = Σ_{k ≤ N} 1/k it is H_N / N + (P - 1) (N - H_N) / (N (N - 1)): more than P / N
    for few images.
    """
    known, positives = (targets >= 0).sum(0).double(), (targets == 1).sum(0).double()
    harmonic = torch.special.digamma(known + 1) + np.euler_gamma
    chance = harmonic / known + (positives - 1) * (known - harmonic) / (known * (known - 1).clamp(min=1))
    return float(100 * chance[positives > 0].mean())


FEW_POSITIVES = 10
"""With fewer images of a label its threshold is the common one."""


def best_thresholds(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the threshold of each class with the highest F1 = 2 TP / (2 TP + FP + FN), (C,).

    It lies between two scores. A class with few positive images takes the threshold that is best for all together.
    """

    def best(scores: Tensor, targets: Tensor) -> Tensor:
        scores, hits, chosen, is_last = _rank_images(scores, targets)
        f1 = (2 * hits / (chosen + hits[-1]).clamp(min=1)).masked_fill(~is_last, -1)  # all of a tie are chosen
        lowest = f1.argmax(0, keepdim=True)
        below = scores.gather(0, (lowest + 1).clamp(max=len(scores) - 1))
        return ((scores.gather(0, lowest) + below) / 2)[0]

    common = best(scores.reshape(-1, 1), targets.reshape(-1, 1))
    return torch.where((targets == 1).sum(0) < FEW_POSITIVES, common, best(scores, targets))


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve; scores: (N,) of the positive class; labels: (N,) in {0, 1}."""
    from sklearn.metrics import roc_auc_score

    if len(labels.unique()) < 2:
        raise UserError("ROC-AUC needs test images of both classes; this test split has one class.")
    return 100.0 * float(roc_auc_score(labels.numpy(force=True), scores.numpy(force=True)))
