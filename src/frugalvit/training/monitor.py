"""A look at the features while they are being learned: rank, deviation and, where there are labels, k-NN."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.data.loader import eval_batches
from frugalvit.training.health import effective_rank, feature_deviation
from frugalvit.training.setup import EvalSet


class FeatureMonitor:
    """Embeds a sample of the images with the teacher. With labels, votes of the 20 nearest: is it getting better?"""

    def __init__(self, bank: EvalSet, queries: EvalSet | None, classes: int, fabric: Fabric) -> None:
        self.bank, self.queries, self.classes, self.fabric = bank, queries, classes, fabric

    def look(self, backbone: Backbone) -> dict[str, float]:
        features, labels = self._embed(backbone, self.bank)
        seen = {"effective_rank": effective_rank(features), "feature_deviation": feature_deviation(features)}
        if labels is None or self.classes < 2 or not bool(torch.isfinite(features).all()):
            return seen  # broken features are the health's to report
        # The probes stand above training in the order of rooms; this one function of theirs is plain torch.
        from frugalvit.probing.knn import knn_accuracy

        if self.queries is None:
            accuracy = knn_accuracy(features, labels, None, None, ks=(20,), classes=self.classes)
        else:
            asked, answers = self._embed(backbone, self.queries)
            accuracy = knn_accuracy(features, labels, asked, answers, ks=(20,), classes=self.classes)
        return seen | {"knn": _top1(accuracy)}

    @torch.inference_mode()
    def _embed(self, backbone: Backbone, images: EvalSet) -> tuple[Tensor, Tensor | None]:
        features, labels = [], []
        with self.fabric.autocast():
            for batch, target, _ in eval_batches(images.store, images.transform, images.batch):
                features.append(backbone(batch).pooled.float())
                labels.append(target)
        return torch.cat(features), torch.cat(labels) if labels[0] is not None else None


def _top1(accuracy: Any) -> float:
    return float(next(iter(accuracy.values()))["top1"])
