"""Confusion matrix of pixels: IoU and accuracy of segmenters."""

from typing import Any, Self

import torch
from torch import Tensor

from frugalvit.utils.intervals import PARTS, jackknife_facts

IGNORED = 255  # class of the pixels that do not count, after a dataset's labels are mapped to classes


class Confusion:
    """Pixels by true and predicted class, without ``IGNORED`` ones; ``parts``: by part of the images, (PARTS, C, C)."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.parts = torch.zeros(PARTS, classes, classes, dtype=torch.int64, device=device)

    @property
    def counts(self) -> Tensor:
        return self.parts.sum(0)

    def add(self, predicted: Tensor, truth: Tensor, index: int = 0) -> None:
        """Count the pixels of an image; both tensors hold class numbers. ``index``: of the image in its dataset."""
        counted = truth != IGNORED
        pairs = truth[counted].long() * self.classes + predicted[counted].long()
        self.parts[index % PARTS] += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)

    def reduced(self, fabric: Any) -> Self:
        """Sum the counts over all ranks."""
        self.parts = fabric.all_reduce(self.parts, reduce_op="sum")
        return self

    def ious(self) -> Tensor:
        """Return |truth ∩ predicted| / |truth ∪ predicted| per class; NaN for a class in neither."""
        both = self.counts.diagonal().double()
        return both / (self.counts.sum(0) + self.counts.sum(1) - both)

    def accuracies(self) -> Tensor:
        """Return the share of correct pixels per true class; NaN for a class without pixels."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def summary(self) -> dict[str, float]:
        """Return mIoU over classes in truth or prediction, mean accuracy over those in truth, and pixel accuracy."""
        total = self.counts.sum()
        correct = self.counts.diagonal().sum()
        return {
            "miou": _mean(self.ious()),
            "mean_accuracy": _mean(self.accuracies()),
            "pixel_accuracy": float(correct / total) if total else 0.0,
        }

    def facts(self) -> dict[str, Any]:
        """Return intervals, pseudo-values, and chance levels: what calling every pixel the most frequent class has."""
        counts = self.counts
        without = []
        for part in self.parts[self.parts.sum((1, 2)) > 0]:
            rest = Confusion(self.classes, counts.device)
            rest.parts[0] = counts - part
            without.append(rest.summary())
        guess = Confusion(self.classes, counts.device)
        guess.parts[0, :, int(counts.sum(1).argmax())] = counts.sum(1)
        return {"chance": guess.summary(), **jackknife_facts(self.summary(), without, highest=1.0, digits=8)}


def _mean(values: Tensor) -> float:
    defined = values[~values.isnan()]
    return float(defined.mean()) if len(defined) else 0.0
