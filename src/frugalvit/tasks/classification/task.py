"""ClassificationTask: supervised training of any backbone with Drloc, L_tot = L_ce + λ · L_drloc (§4)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit.backbones import Backbone
from frugalvit.backbones.architectures.hybrid import Hybrid
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.loader import Batch, BatchShard, BatchSource, eval_batches
from frugalvit.data.rng import device_generator
from frugalvit.engine.ema import EMA
from frugalvit.engine.health import effective_rank
from frugalvit.engine.param_groups import decay_groups, layer_groups, merge_param_groups, no_weight_decay_names
from frugalvit.engine.schedules import Schedule
from frugalvit.engine.task import Task
from frugalvit.experiment.extra_objectives import ExtraObjectives
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.objectives.drloc import Pairs, draw_batch_pairs, loss_at_pairs
from frugalvit.tasks.classification.metrics import Scores
from frugalvit.tasks.classification.target import ClassTarget, Target
from frugalvit.tasks.distillation.teacher import Guide
from frugalvit.utils import console
from frugalvit.utils.tables import Table


class ClassificationTask(Task):
    """A classifier and its losses. ``average`` holds the EMA of the weights if ``ema`` is above 0."""

    unprinted = ("effective_rank",)  # for the health checks; low for few classes, however good the network

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
        objectives: ExtraObjectives | None = None,
        guide: Guide | None = None,
        target: Target | None = None,
    ) -> None:
        super().__init__()
        self.target = ClassTarget([str(number) for number in range(backbone.num_classes)]) if target is None else target
        self.best_metric = self.target.metric
        self.backbone, self.localization = backbone, localization
        self.objectives, self.guide = objectives, guide
        self.settings, self.weight = settings, weight
        self.ema, self.weight_decay, self.layer_decay = ema, weight_decay, layer_decay
        self.average = copy.deepcopy(backbone).requires_grad_(False).eval() if ema > 0 else None
        self.average_update = EMA(self.average, backbone, buffers=True) if self.average is not None else None
        self.evaluated: Any = None
        self.eval_split = "val"
        self.last_error: float | None = None  # of the localization task, in grid cells
        self.cached_scores: tuple[Any, Scores] | None = None  # dataset and scores of the current weights
        self.fabric: Fabric | None = None
        self.share = BatchShard()

    def set_data(self, batches: BatchSource, evaluated: Any, eval_split: str, fabric: Fabric) -> None:
        """Set the training batches and the evaluation images; only the split "val" chooses the best weights."""
        self.batches, self.evaluated, self.eval_split, self.fabric = batches, evaluated, eval_split, fabric
        self.share = BatchShard(batches.seed, batches.rank, batches.world)

    def train(self, mode: bool = True) -> ClassificationTask:
        """Set the mode; frozen batch norms stay in evaluation mode and keep their statistics."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, _BatchNorm) and module.affine and not module.weight.requires_grad:
                module.eval()
        return self

    # -- a step

    def batch_at(self, step: int) -> Batch:
        self.cached_scores = None
        return self.batches.batch_at(step)

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return the losses of a batch: ``loss`` is minimized, the others are logged."""
        images, targets, clean, pairs, weight, *guidance = self.step_inputs(batch, step)
        losses = self.compute_losses(images, targets, clean, pairs, weight, *guidance)
        if isinstance(self.localization, DenseLocalization):
            assert weight is not None
            grids = self.backbone.blocks(batch.images if clean is None else clean)
            generator = device_generator(self.share.seed, "pairs", batch.number, grids[0].device)

            def loss(head: RelativeLocalization, grid: Tensor) -> tuple[Tensor, Tensor]:
                return loss_at_pairs(head, grid, self._draw(head, (grid.shape[2], grid.shape[3]), len(grid), generator))

            # The loss of all blocks' grids (B, C_l, h_l, w_l) at new pairs, and the last block's error.
            losses["localization"], losses["localization_error"] = self.localization.apply_per_level(grids, loss)
            losses["loss"] = losses["loss"] + weight * losses["localization"]
        return losses

    def step_inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        """Return the arguments of :meth:`compute_losses`."""
        assert batch.targets is not None
        if self.objectives is not None:
            self.objectives.step = step
        clean = batch.clean if self.settings.images == "clean" else None
        weight = None
        if self.localization is not None:
            weight = batch.images.new_full((), self.weight.at(step), dtype=torch.float32)
        grid = strength = None
        if self.guide is not None:
            with nullcontext() if self.fabric is None else self.fabric.autocast():  # CUDA graphs begin after this
                grid, strength = self.guide.targets(batch.images, step)
        return batch.images, batch.targets, clean, self._pairs(batch), weight, grid, strength

    def compute_losses(
        self,
        images: Tensor,
        targets: Tensor,
        clean: Tensor | None,
        pairs: Pairs,
        weight: Tensor | None,
        guide_grid: Tensor | None = None,
        guide_weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute network, classifier and losses from tensors alone, so that a CUDA graph can capture it.

        clean: the images before mixing, if the localization loss uses them
        weight: λ as a tensor; a graph would keep a Python number
        """
        features = self.backbone(images)
        logits = self.backbone.classify(features.pooled)
        plain, name = self.target.loss(logits.float(), targets), self.target.loss_name
        losses = {"loss": plain, name: plain}
        if isinstance(self.localization, RelativeLocalization) and weight is not None:
            grid = features.grid if clean is None else self.backbone(clean).grid
            localization, error = loss_at_pairs(self.localization, grid, pairs)
            losses = {
                "loss": plain + weight * localization,
                name: plain.detach(),
                "localization": localization.detach(),
                "localization_error": error,
            }
        if self.guide is not None:
            guidance, logged = self.guide.loss(features, guide_grid, guide_weight)
            losses = losses | logged | {"loss": losses["loss"] + guidance, name: plain.detach()}
        return losses if self.objectives is None else self.objectives(losses, [features], [images], targets)

    def _pairs(self, batch: Batch, *counts: int) -> Pairs:
        """Draw the token pairs of the localization loss. ``counts``: images of each part of the batch."""
        if not isinstance(self.localization, RelativeLocalization):
            return None
        size = self.backbone.grid_size((batch.images.shape[2], batch.images.shape[3]))
        generator = device_generator(self.share.seed, "pairs", batch.number, batch.images.device)
        parts = [self._draw(self.localization, size, count, generator) for count in counts or [len(batch.images)]]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, 1)  # type: ignore[arg-type]

    def _draw(
        self, head: RelativeLocalization, size: tuple[int, int], images: int, generator: torch.Generator
    ) -> Pairs:
        return draw_batch_pairs(head, size, images, generator, rank=self.share.rank, world=self.share.world)

    @property
    def compiles_by_default(self) -> bool:
        """False for hybrids: a compilation takes 40 s, which few runs win back."""
        return not isinstance(self.backbone.model, Hybrid)

    @property
    def cuda_graphs_blocker(self) -> str:
        dense = isinstance(self.localization, DenseLocalization)
        if self.objectives is not None:
            return "--objectives may use the number of the step"
        return "the localization loss of every block runs the network a second time" if dense else ""

    def compile_with(self, graphs: bool) -> None:
        """Compile the network and the localization head."""
        for part in (self.backbone, self.localization):
            if part is not None:
                part.compile(dynamic=False)
        self.use_cuda_graphs = graphs

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        if self.average_update is not None:
            # A low momentum early on keeps the random start out of a short run's average.
            self.average_update.update(min(self.ema, (1 + step) / (10 + step)), skipped)

    # -- parameters and scores

    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.layer_decay < 1:
            groups = layer_groups(self.backbone.model, self.weight_decay, self.layer_decay)
        else:
            named, undecayed = self.backbone.named_parameters(), no_weight_decay_names(self.backbone)
            groups = decay_groups(named, self.weight_decay, undecayed=undecayed)
        if self.localization is not None:
            named = self.localization.named_parameters("localization")
            groups += decay_groups(named, self.weight_decay, self.settings.lr_scale)
        if self.guide is not None:
            groups += decay_groups(self.guide.named_parameters("guide"), self.weight_decay)
        if self.objectives is not None:
            groups += decay_groups(self.objectives.named_parameters("objectives"), self.weight_decay)
        return merge_param_groups(groups)

    @property
    def result(self) -> Backbone:
        """The backbone to evaluate and export."""
        return self.average if self.average is not None else self.backbone

    def evaluate(self, step: int) -> dict[str, float]:
        scores = self.scores(self.evaluated)
        self.nonfinite_outputs, self.cached_scores = bool(scores.nonfinite), (self.evaluated, scores)
        rank = {} if scores.features is None else {"effective_rank": effective_rank(scores.features)}
        return scores.summary() | rank

    def score_facts(self) -> dict[str, Any]:
        return {} if self.cached_scores is None else self.cached_scores[1].facts(self.eval_split)

    def score(self, dataset: Any) -> Scores:
        """Return the scores of the current weights on a dataset, from the cache if they were just computed."""
        cached = self.cached_scores
        return cached[1] if cached is not None and cached[0] is dataset else self.scores(dataset)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Remember the error of the localization task and watch the health; never end the run."""
        if self.health is not None:
            self.health.warn(step, metrics)
        error = metrics.get("localization_error", math.nan)
        self.last_error = error if math.isfinite(error) else self.last_error
        return False

    def localization_summary(self) -> dict[str, float | str]:
        """Return the localization task's last error in grid cells, that of a constant answer, and its form."""
        heads = self.localization.levels if isinstance(self.localization, DenseLocalization) else [self.localization]
        head = heads[-1]
        if self.last_error is None or not isinstance(head, RelativeLocalization):
            return {}
        constant = head.constant_baseline_error(*self.backbone.grid_size(self.backbone.img_size))
        errors = {"localization_error": self.last_error, "constant_answer_error": constant}
        return errors | {"localization_variant": self.settings.variant}

    def pseudo_label_scores(self) -> dict[str, float]:
        return {}

    def pseudo_label_table(self, classes: Sequence[str]) -> Table:
        """Return the pseudo-labels of each class; only for a run with unlabelled images."""
        raise NotImplementedError

    def scores(self, dataset: Any, *, alone: bool = False) -> Scores:
        """Score the exported weights on a dataset, over all ranks, or ``alone`` on this one."""
        assert self.fabric is not None
        was_training = self.training
        self.eval()
        scores = self.target.make_scores(len(dataset.store), self.fabric.device)
        with torch.inference_mode(), self.fabric.autocast():
            rank, world = (0, 1) if alone else (self.fabric.global_rank, self.fabric.world_size)
            batches = eval_batches(dataset.store, dataset.transform, dataset.batch, rank=rank, world=world)
            count = len(range(rank, dataset.batches, world))
            for images, labels, index in console.progress(batches, count, "scoring"):
                assert labels is not None
                pooled = self.result(images).pooled
                # In bf16 the highest logits may tie, and the order of ties is arbitrary.
                with torch.autocast(pooled.device.type, enabled=False):
                    logits = self.result.classify(pooled.float())
                scores.add(logits, labels, index)
                scores.features = pooled.float() if scores.features is None else scores.features
        self.train(was_training)
        return scores if alone else scores.reduced(self.fabric)
