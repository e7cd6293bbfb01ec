"""Top-1, top-5, mean per class and the confusion matrix, counted on the device and summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.probing.metrics import PartCounts


class ClassificationScores:
    """Counts over batches. Counting does not synchronize the device."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.features: Tensor | None = None  # of the first batch, (B, D)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)  # images with non-finite logits
        self.parts = PartCounts(classes, device)

    def add(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        """Count a batch; index: (B,) of the images in their dataset."""
        classes = len(self.confusion)
        self.nonfinite += (~logits.isfinite()).any(1).sum()
        best = logits.topk(min(5, classes), dim=1).indices
        self.parts.add(best, labels, index)
        cells = labels * classes + best[:, 0]
        self.confusion += torch.bincount(cells, minlength=classes * classes).view(classes, classes)

    def reduced(self, fabric: Fabric) -> ClassificationScores:
        """Sum the counts over all ranks."""
        if fabric.world_size > 1:
            counts = (self.confusion, self.nonfinite, self.parts.counts)
            summed: Any = [fabric.all_reduce(count, reduce_op="sum") for count in counts]
            self.confusion, self.nonfinite, self.parts.counts = summed
        return self

    def has_nonfinite(self) -> bool:
        """True if some logits were non-finite, so that the scores mean nothing."""
        return bool(self.nonfinite)

    def is_at_chance(self) -> bool:
        """True if the predictions tell nothing about the labels.

        Then P(predicted = k) = π_k for all labels, so the mean per class is Σ_k π_k / K, which is 1/K, with the
        variance Σ_k π_k (1 - π_k) / n_k / K²; the sums are over the K classes with images, n_k of each. This holds for
        imbalanced classes too, where the accuracy itself may be high. One deviation above counts as better.
        """
        confusion = self.confusion.cpu().double()
        images, shares = confusion.sum(1), confusion.sum(0) / confusion.sum().clamp(min=1)
        present = images > 0
        images, shares, count = images[present], shares[present], int(present.sum())
        deviation = (shares * (1 - shares) / images).sum().sqrt().item() / max(count, 1)
        score = (confusion.diagonal()[present] / images).mean().item() if count else 0.0
        return count > 1 and score <= shares.sum().item() / count + deviation + 1e-9

    def facts(self, split: str) -> dict[str, Any]:
        """Return what the scores were measured on, intervals, chance levels and pseudo-values."""
        return {"scored_on": split, "scored_images": int(self.confusion.sum()), **self.parts.facts()}

    def summary(self) -> dict[str, float]:
        """Return the scores in percent. Mean per class covers the classes that have images."""
        return self.parts.scores() or dict.fromkeys(("top1", "top5", "mean_per_class"), 0.0)
