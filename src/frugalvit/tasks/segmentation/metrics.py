"""Confusion matrix of pixels: IoU and accuracy of segmenters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = 255
"""Class of the pixels that do not count, after a dataset's labels are mapped to classes."""


class Confusion:
    """Pixels by true class (rows) and predicted class (columns), without those of class ``IGNORED``."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """Count pixels; both tensors hold class numbers and have the same shape."""
        counted = truth != IGNORED
        pairs = truth[counted].long() * self.classes + predicted[counted].long()
        self.counts += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)

    def reduced(self, fabric: Any) -> Confusion:
        """Sum the counts over all ranks."""
        self.counts = fabric.all_reduce(self.counts, reduce_op="sum")
        return self

    def ious(self) -> Tensor:
        """Return |truth ∩ predicted| / |truth ∪ predicted| per class; NaN for a class in neither."""
        both = self.counts.diagonal().double()
        return both / (self.counts.sum(0) + self.counts.sum(1) - both)

    def accuracies(self) -> Tensor:
        """Return the share of correct pixels per true class; NaN for a class without pixels."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def summary(self) -> dict[str, float]:
        """Return ``miou``, ``mean_accuracy`` and ``pixel_accuracy``.

        ``miou`` is over the classes in truth or prediction, ``mean_accuracy`` over those in truth.
        """
        total = self.counts.sum()
        correct = self.counts.diagonal().sum()
        return {
            "miou": _mean(self.ious()),
            "mean_accuracy": _mean(self.accuracies()),
            "pixel_accuracy": float(correct / total) if total else 0.0,
        }


def _mean(values: Tensor) -> float:
    defined = values[~values.isnan()]
    return float(defined.mean()) if len(defined) else 0.0
