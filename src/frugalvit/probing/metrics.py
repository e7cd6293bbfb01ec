"""The metrics of EsViT's Table 9, in percent: accuracy, mean per class, 11-point mAP, ROC-AUC.

Everything takes plain tensors on any device and returns a Python float in [0, 100].
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.probing.validation import as_labels, as_targets, shape_words

Metric = Literal["accuracy", "mean_per_class", "map11", "roc_auc"]
METRIC_NAMES: dict[Metric, str] = {
    "accuracy": "accuracy",
    "mean_per_class": "mean per class",
    "map11": "11-point mAP",
    "roc_auc": "ROC AUC",
}
SINGLE_LABEL = tuple(metric for metric in METRIC_NAMES if metric != "map11")


def score(metric: Metric, scores: Tensor, targets: Tensor) -> float:
    """One metric of class scores (N, C) against targets: (N,) classes, or (N, C) labels for "map11"."""
    require_metric(metric)
    if metric == "map11":
        targets = as_targets(targets, scores, "rows of scores").to(scores.device)
        if targets.shape != scores.shape:
            raise UserError(
                f"scores are {shape_words(scores)}, but targets {shape_words(targets)}: one for each class."
            )
        return eleven_point_map(scores, targets)
    targets = as_labels(targets, scores, "rows of scores", scores.shape[1]).to(scores.device)
    if metric == "roc_auc":
        if scores.shape[1] != 2:
            raise UserError(f"ROC-AUC is for two classes; this dataset has {scores.shape[1]}.")
        return roc_auc(scores[:, 1] - scores[:, 0], targets)
    ranked = rank_classes(scores, 1)
    if metric == "accuracy":
        return top_k_accuracy(ranked, targets)
    return mean_per_class(ranked[:, 0], targets)


def require_metric(metric: str, known: Collection[str] = tuple(METRIC_NAMES)) -> None:
    """Refuse a word that is none of the known metrics."""
    if metric not in known:
        *others, last = (f'"{name}"' for name in known)
        raise UserError(f'the metric is {", ".join(others)} or {last} here, not "{metric}".')


def require_finite(values: Tensor, what: str) -> None:
    """Refuse NaN and infinite values: they would sort anywhere and give a number that means nothing."""
    bad = ~torch.isfinite(values).flatten(1).all(dim=1)
    if bad.any():
        raise UserError(
            f"{what}: {int(bad.sum())} of {len(values)} rows hold NaN or infinite values; "
            "the model is broken (or overflowed in low precision: try --precision 32)."
        )


def top_k_accuracy(ranked: Tensor, labels: Tensor, k: int = 1) -> float:
    """Share of rows whose label is among the first k ranked classes. ranked: (N, >= 1), best first; labels: (N,).

    With fewer than k classes the k is the number of classes, so top-5 of two classes is 100.
    """
    if len(labels) == 0:
        raise UserError("there are no test images to score; give a test split with at least one labelled image.")
    hits = (ranked[:, :k] == labels[:, None].to(ranked.device)).any(dim=1)
    return 100.0 * hits.double().mean().item()


def rank_classes(scores: Tensor, k: int = 5) -> Tensor:
    """The k best classes of every row, best first, ties to the smaller index. scores: (N, C) -> (N, min(k, C))."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


def mean_per_class(predicted: Tensor, labels: Tensor) -> float:
    """The mean over classes of the share of that class's images that are recognised. predicted, labels: (N,).

    A class without a test image has no accuracy and is left out of the mean.
    """
    if len(labels) == 0:
        raise UserError("there are no test images to score; give a test split with at least one labelled image.")
    labels = labels.to(predicted.device)
    classes = int(labels.max()) + 1
    total = torch.bincount(labels, minlength=classes).double()
    right = torch.bincount(labels[predicted == labels], minlength=classes).double()
    present = total > 0
    return 100.0 * (right[present] / total[present]).mean().item()


def classification_scores(ranked: Tensor, labels: Tensor) -> dict[str, float]:
    """The three words every classifier is reported with: top1, top5, mean_per_class."""
    return {
        "top1": top_k_accuracy(ranked, labels, 1),
        "top5": top_k_accuracy(ranked, labels, 5),
        "mean_per_class": mean_per_class(ranked[:, 0], labels),
    }


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Where the share of right answers lies with 95 % certainty, by ``count`` images alone, in percent (Wilson 1927).

    It stays between 0 and 100 and means something where all or none are right, as the usual ± does not.
    """
    if count == 0:
        raise UserError("there are no test images to score; give a test split with at least one labelled image.")
    z = 1.959963984540054  # of 95 %
    share, weight = right / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def eleven_point_average_precision(scores: Tensor, targets: Tensor) -> float:
    """VOC 2007's average precision of one class: AP = 1/11 sum over r in {0, .1 .. 1} of max precision at recall >= r.

    scores: (N,); targets: (N,) with 1 = present, 0 = absent, -1 = difficult (left out, as the devkit does).
    Images of equal score enter together, so the result does not depend on their order.
    """
    kept = targets >= 0
    scores, targets = scores[kept].double(), targets[kept].double()
    positives = targets.sum()
    if positives == 0:
        raise UserError("average precision needs at least one positive test image of the class.")
    order = scores.argsort(descending=True, stable=True)
    scores, targets = scores[order], targets[order]
    last_of_tie = torch.ones_like(scores, dtype=torch.bool)
    last_of_tie[:-1] = scores[1:] != scores[:-1]
    found = targets.cumsum(0)
    seen = torch.arange(1, len(targets) + 1, device=targets.device, dtype=torch.float64)
    precision, recall = (found / seen)[last_of_tie], (found / positives)[last_of_tie]
    levels = torch.arange(11, device=targets.device, dtype=torch.float64) / 10
    reached = recall[None] >= levels[:, None]
    return 100.0 * (reached * precision).amax(dim=1).mean().item()


def eleven_point_map(scores: Tensor, targets: Tensor) -> float:
    """Mean of the 11-point average precision over the classes with a positive image. scores, targets: (N, C)."""
    present = [c for c in range(targets.shape[1]) if (targets[:, c] == 1).any()]
    if not present:
        raise UserError("mean average precision needs at least one positive test image.")
    return sum(eleven_point_average_precision(scores[:, c], targets[:, c]) for c in present) / len(present)


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive outranks a negative, ties counting half.

    scores: (N,) of the positive class; labels: (N,) in {0, 1}. AUC = (rank sum of positives - P(P+1)/2) / (P * Q).
    """
    positive = labels.bool().to(scores.device)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if positives == 0 or negatives == 0:
        raise UserError("ROC-AUC needs test images of both classes; this test split holds only one.")
    _, tie, count = scores.double().unique(return_inverse=True, return_counts=True)
    count = count.double()
    mean_rank = count.cumsum(0) - (count - 1) / 2
    area = mean_rank[tie][positive].sum() - positives * (positives + 1) / 2
    return 100.0 * (area / (positives * negatives)).item()
