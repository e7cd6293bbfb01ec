"""Supervised training as in Drloc: L_tot = L_ce + λ · L_drloc (§4), on any backbone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit import console
from frugalvit.backbones import Backbone
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.loader import Batch, Batches, eval_batches
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.training.averaging import average_into
from frugalvit.training.localizing import Share, measure
from frugalvit.training.parameters import decay_groups, layer_groups
from frugalvit.training.schedules import Schedule
from frugalvit.training.scores import ClassificationScores


class SupervisedTask(nn.Module):
    """A classifier and its losses. ``average`` holds the moving average of the weights, when there is one."""

    score = "top1"

    def __init__(
        self,
        backbone: Backbone,
        localization: RelativeLocalization | DenseLocalization | None,
        settings: LocalizationConfig,
        weight: Schedule,
        *,
        ema: float = 0.0,
        weight_decay: float = 0.05,
        layer_decay: float = 1.0,
    ) -> None:
        super().__init__()
        self.backbone, self.localization = backbone, localization
        self.settings, self.weight = settings, weight
        self.ema, self.weight_decay, self.layer_decay = ema, weight_decay, layer_decay
        self.average = copy.deepcopy(backbone).requires_grad_(False).eval() if ema > 0 else None
        self.batches: Batches | None = None
        self.evaluated: Any = None
        self.watched = "val"
        self.fabric: Fabric | None = None
        self.share = Share()

    def feed(self, batches: Batches, evaluated: Any, watched: str, fabric: Fabric) -> None:
        """Where batches come from, and which split is evaluated ("val" chooses the best weights, "test" does not)."""
        self.batches, self.evaluated, self.watched, self.fabric = batches, evaluated, watched, fabric
        self.share = Share(batches.seed, batches.rank, batches.world)

    # -- a step

    def batch_at(self, step: int) -> Batch:
        assert self.batches is not None
        return self.batches.batch_at(step)

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The losses of a batch: ``loss`` is what is minimised, the others are for the log."""
        features = self.backbone(batch.images)
        logits = self.backbone.classify(features.pooled)
        assert batch.targets is not None
        classification = F.cross_entropy(logits.float(), batch.targets)
        losses = {"loss": classification, "cross_entropy": classification}
        weight = self.weight.at(step)
        if self.localization is not None:
            grid = features.grid
            if self.settings.images == "clean" and batch.clean is not None:
                grid = self.backbone(batch.clean).grid
            grids = self.backbone.blocks(batch.images) if isinstance(self.localization, DenseLocalization) else grid
            localization, error = measure(self.localization, grids, step, self.share)
            losses |= {"localization": localization, "localization_error": error}
            losses["loss"] = classification + weight * localization
        return losses

    def before_optimizer(self, step: int) -> None:
        """Nothing to do between the gradients and the optimiser."""

    def after_step(self, step: int) -> None:
        if self.average is not None:
            # Early on the average follows quickly, so that a short run is not dominated by the random start.
            average_into(self.average, self.backbone, min(self.ema, (1 + step) / (10 + step)))

    # -- what is trained, what is scored

    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.layer_decay < 1:
            groups = layer_groups(self.backbone.model, self.weight_decay, self.layer_decay)
        else:
            groups = decay_groups(self.backbone.named_parameters(), self.weight_decay)
        if self.localization is not None:
            named = self.localization.named_parameters("localization")
            groups += decay_groups(named, self.weight_decay, self.settings.lr_scale)
        return groups

    @property
    def networks(self) -> list[nn.Module]:
        """What a compiled step compiles, besides the localization head."""
        return [self.backbone]

    @property
    def result(self) -> Backbone:
        """The backbone that is evaluated and exported."""
        return self.average if self.average is not None else self.backbone

    def evaluate(self, step: int) -> dict[str, float]:
        return self.scores(self.evaluated).summary()

    def watch(self, step: int, metrics: dict[str, float]) -> bool:
        """Supervised runs have no collapse to watch for."""
        return False

    def scores(self, dataset: Any) -> ClassificationScores:
        """Scores of the exported weights on a dataset, gathered over all processes."""
        assert self.fabric is not None
        was_training = self.training
        self.eval()
        scores = ClassificationScores(self.backbone.num_classes, self.fabric.device)
        with torch.inference_mode(), self.fabric.autocast():
            batches = eval_batches(dataset.store, dataset.transform, dataset.batch)
            for images, labels, _ in self._share(console.progress(batches, dataset.batches, "scoring")):
                scores.add(self.result.classify(self.result(images).pooled), labels)
        self.train(was_training)
        return scores.reduced(self.fabric)

    def _share(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Every process takes its turn at the batches of an evaluation."""
        assert self.fabric is not None
        for number, batch in enumerate(batches):
            if number % self.fabric.world_size == self.fabric.global_rank:
                yield batch
