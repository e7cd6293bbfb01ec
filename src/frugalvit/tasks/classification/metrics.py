"""Scores over batches: accuracies and the confusion matrix, or the answers of all images for mAP and R²."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.probing.metrics import PartCounts
from frugalvit.utils.intervals import PARTS, jackknife_facts


class Scores(ABC):
    """Scores of a dataset, collected batch by batch without synchronizing the device."""

    features: Tensor | None = None  # of the first batch, (B, D)
    nonfinite: Tensor  # number of images with non-finite logits

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        """Take a batch; index: (B,) of the images in their dataset."""

    def reduced(self, fabric: Fabric) -> Scores:
        """Combine the batches of all ranks."""
        for part in self.sums() if fabric.world_size > 1 else ():
            part.copy_(fabric.all_reduce(part, reduce_op="sum"))  # type: ignore[arg-type]
        return self

    @abstractmethod
    def sums(self) -> tuple[Tensor, ...]:
        """Return what is summed over all ranks."""

    @abstractmethod
    def is_at_chance(self) -> bool:
        """True if the answers tell nothing about the truth."""

    @abstractmethod
    def facts(self, split: str) -> dict[str, Any]:
        """Return what the scores were measured on, intervals, chance levels and pseudo-values."""

    @abstractmethod
    def summary(self) -> dict[str, float]:
        """Return the scores, the main one first."""


class ClassificationScores(Scores):
    """Top-1, top-5, mean per class and the confusion matrix, as counts."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self.parts = PartCounts(classes, device)

    def add(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        classes = len(self.confusion)
        self.nonfinite += (~logits.isfinite()).any(1).sum()
        best = logits.topk(min(5, classes), dim=1).indices
        self.parts.add(best, labels, index)
        cells = labels * classes + best[:, 0]
        self.confusion += torch.bincount(cells, minlength=classes * classes).view(classes, classes)

    def sums(self) -> tuple[Tensor, ...]:
        return self.confusion, self.nonfinite, self.parts.counts

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
        return {"scored_on": split, "scored_images": int(self.confusion.sum()), **self.parts.facts()}

    def summary(self) -> dict[str, float]:
        """Return the scores in percent. Mean per class covers the classes that have images."""
        return self.parts.scores() or dict.fromkeys(("top1", "top5", "mean_per_class"), 0.0)


class StoredScores(Scores):
    """Answers and truth (N, K) of every image, for scores that are not sums over images."""

    def __init__(self, images: int, target: Any, device: torch.device) -> None:
        """target: a ``StoredTarget``"""
        self.answers, self.truth = (torch.zeros(images, len(target.classes), device=device) for _ in range(2))
        self.seen, self.target = torch.zeros(images, device=device), target  # 1 for scored images
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        self.put(self.target.answers(logits), labels, index)

    def put(self, answers: Tensor, truth: Tensor, index: Tensor) -> None:
        self.nonfinite += (~answers.isfinite()).any(1).sum()
        rows = index.to(self.seen.device)
        self.answers[rows], self.truth[rows], self.seen[rows] = answers.float(), truth.to(self.truth), 1.0

    def sums(self) -> tuple[Tensor, ...]:
        return self.answers, self.truth, self.seen, self.nonfinite

    def scored(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return answers, truth and indices of the scored images, on the CPU."""
        index = self.seen.cpu().nonzero()[:, 0]
        return self.answers.cpu()[index], self.truth.cpu()[index], index

    def summary(self) -> dict[str, float]:
        return self.target.measure(*self.scored()[:2])

    def facts(self, split: str) -> dict[str, Any]:
        answers, truth, index = self.scored()
        parts = [index % PARTS != part for part in (index % PARTS).unique()]
        without = [self.target.measure(answers[part], truth[part]) for part in parts]
        facts = {"scored_on": split, "scored_images": len(index), "chance": self.target.chance(truth)}
        limits = {"r2": (-math.inf, 100.0), "mae": (0.0, math.inf)}
        return facts | jackknife_facts(self.target.measure(answers, truth), without, limits)

    def is_at_chance(self) -> bool:
        """True if the main score is at most one deviation above chance."""
        name, score = next(iter(self.summary().items()))
        facts = self.facts("")
        return not score - (score - facts[f"{name}_interval"][0]) / 2 > facts["chance"][name]
