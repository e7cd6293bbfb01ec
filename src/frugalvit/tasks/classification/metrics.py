"""Top-1, top-5, mean per class and the confusion matrix, counted on the device and summed over processes."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor


class ClassificationScores:
    """Counts that grow batch by batch; nothing is read from the device before ``summary``."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.top5 = torch.zeros((), dtype=torch.int64, device=device)
        self.no_numbers = torch.zeros((), dtype=torch.int64, device=device)  # images whose answers are not finite

    def add(self, logits: Tensor, labels: Tensor) -> None:
        classes = len(self.confusion)
        self.no_numbers += (~logits.isfinite()).any(1).sum()
        best = logits.topk(min(5, classes), dim=1).indices
        self.top5 += (best == labels[:, None]).any(1).sum()
        cells = labels * classes + best[:, 0]
        self.confusion += torch.bincount(cells, minlength=classes * classes).view(classes, classes)

    def reduced(self, fabric: Fabric) -> ClassificationScores:
        """The sum over all processes."""
        if fabric.world_size > 1:
            counts = (self.confusion, self.top5, self.no_numbers)
            summed: Any = [fabric.all_reduce(count, reduce_op="sum") for count in counts]
            self.confusion, self.top5, self.no_numbers = summed
        return self

    def broken(self) -> bool:
        """Whether the network has given answers that are no numbers: what it is scored with is chance."""
        return bool(self.no_numbers)

    def summary(self) -> dict[str, float]:
        """Percentages. Mean per class leaves out classes that have no image here."""
        confusion = self.confusion.cpu().double()  # in this order: MPS has no doubles
        counts = confusion.sum(1)
        total = counts.sum().clamp(min=1)
        right = confusion.diagonal()
        present = counts > 0
        per_class = (right[present] / counts[present]).mean() if present.any() else torch.zeros(())
        return {
            "top1": 100 * (right.sum() / total).item(),
            "top5": 100 * (self.top5.cpu().double() / total).item(),
            "mean_per_class": 100 * per_class.item(),
        }
