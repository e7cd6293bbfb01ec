"""The metrics of EsViT's Table 9: accuracy, mean per class, 11-point mAP, ROC-AUC.

Every metric takes tensors on any device and returns a float in [0, 100].
"""

from typing import Literal

import torch
from torch import Tensor

from frugalvit.errors import UserError

Metric = Literal["accuracy", "mean_per_class", "map11", "roc_auc"]
METRIC_NAMES: dict[Metric, str] = {
    "accuracy": "accuracy",
    "mean_per_class": "mean per class",
    "map11": "11-point mAP",
    "roc_auc": "ROC AUC",
}


def score(metric: Metric, scores: Tensor, targets: Tensor) -> float:
    """Compute one metric of class scores (N, C); targets: (N,) classes, or (N, C) labels for "map11"."""
    targets = targets.to(scores.device)
    if metric == "map11":
        return eleven_point_map(scores, targets)
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
    """Mean over classes of the accuracy on the class's images; predicted, labels: (N,).

    Classes without a test image do not count.
    """
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


def eleven_point_average_precision(scores: Tensor, targets: Tensor) -> float:
    """VOC 2007's AP of one class: 1/11 sum over r in {0, .1 .. 1} of the max precision at recall >= r.

    scores: (N,); targets: (N,) with 1 = present, 0 = absent, -1 = difficult (ignored, as in the devkit).
    Images of equal score count together, so the result does not depend on their order.
    """
    rated = targets >= 0
    scores, targets = scores[rated].double(), targets[rated].double()
    positives = targets.sum()
    if positives == 0:
        raise UserError("Average precision needs at least one positive test image of the class.")
    order = scores.argsort(descending=True, stable=True)
    scores, targets = scores[order], targets[order]
    last_of_tie = torch.ones_like(scores, dtype=torch.bool)
    last_of_tie[:-1] = scores[1:] != scores[:-1]
    hits = targets.cumsum(0)
    ranks = torch.arange(1, len(targets) + 1, device=targets.device, dtype=torch.float64)
    precision, recall = (hits / ranks)[last_of_tie], (hits / positives)[last_of_tie]
    levels = torch.arange(11, device=targets.device, dtype=torch.float64) / 10
    reached = recall[None] >= levels[:, None]
    return 100.0 * (reached * precision).amax(dim=1).mean().item()


def eleven_point_map(scores: Tensor, targets: Tensor) -> float:
    """Mean 11-point average precision of the classes with a positive image; scores, targets: (N, C)."""
    present = [c for c in range(targets.shape[1]) if (targets[:, c] == 1).any()]
    if not present:
        raise UserError("Mean average precision needs at least one positive test image.")
    return sum(eleven_point_average_precision(scores[:, c], targets[:, c]) for c in present) / len(present)


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive outranks a negative, ties counting half.

    scores: (N,) of the positive class; labels: (N,) in {0, 1}. AUC = (rank sum of positives - P(P+1)/2) / (P * Q).
    """
    positive = labels.bool().to(scores.device)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if positives == 0 or negatives == 0:
        raise UserError("ROC-AUC needs test images of both classes; this test split has one class.")
    _, tie, count = scores.double().unique(return_inverse=True, return_counts=True)
    count = count.double()
    mean_rank = count.cumsum(0) - (count - 1) / 2
    area = mean_rank[tie][positive].sum() - positives * (positives + 1) / 2
    return 100.0 * (area / (positives * negatives)).item()
