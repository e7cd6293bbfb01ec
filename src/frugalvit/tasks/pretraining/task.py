"""PretrainingTask: label-free pre-training with EsViT. L = ½ L_V + ½ L_R (Algorithm 1; §2.2 prints the plain sum).

The student sees every crop, the teacher only the global crops. Drloc and KoLeo on the student's global crops can be
further losses.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from timm.layers.drop import DropPath
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from frugalvit.backbones import Backbone
from frugalvit.backbones.architectures.hybrid import Hybrid
from frugalvit.backbones.factory import from_spec
from frugalvit.data.loader import Batch, BatchShard, BatchSource
from frugalvit.data.rng import device_generator
from frugalvit.engine.ema import EMA
from frugalvit.engine.param_groups import decay_groups, no_weight_decay_names
from frugalvit.engine.schedules import Schedule
from frugalvit.engine.task import Task
from frugalvit.experiment.extra_objectives import ExtraObjectives
from frugalvit.features import Features
from frugalvit.objectives import RegionMatching, RelativeLocalization, ViewMatching, koleo_loss
from frugalvit.objectives.drloc import Pairs, draw_batch_pairs, loss_at_pairs
from frugalvit.tasks.pretraining.collapse import Health

Losses = dict[str, Tensor]


class FeatureTask(Task):
    """What pre-training and distillation share: a student, its batches, and the scores of ``result``."""

    best_metric = "knn"
    export_last = True
    eval_split = "val"
    health: Health

    def __init__(self, student: Backbone, weight_decay: float) -> None:
        super().__init__()
        self.student, self.weight_decay = student, weight_decay
        self.fabric: Fabric | None = None
        self.monitor: Any = None
        self.share = BatchShard()

    @property
    def result(self) -> Backbone:
        """The backbone to evaluate and export."""
        return self.student

    def set_data(
        self, batches: BatchSource, monitor: Any, health: Health, fabric: Fabric, eval_split: str = "val"
    ) -> None:
        """Set the training crops, the feature monitor and the health checks. Only "val" chooses the best weights."""
        self.eval_split = eval_split
        self.batches, self.monitor, self.health, self.fabric = batches, monitor, health, fabric
        self.share = BatchShard(batches.seed, batches.rank, batches.world)

    def batch_at(self, step: int) -> Batch:
        return self.batches.batch_at(step)

    @property
    def compiles_by_default(self) -> bool:
        """False for hybrids: a compilation takes 40 s, which few runs win back."""
        return not isinstance(self.student.model, Hybrid)

    def compile_with(self, graphs: bool) -> None:
        self.student.compile(dynamic=False)
        self.use_cuda_graphs = graphs

    def parameter_groups(self) -> list[dict[str, Any]]:
        # decay_groups leaves out a teacher and its heads: they require no gradients.
        return decay_groups(self.named_parameters(), self.weight_decay, undecayed=no_weight_decay_names(self))

    def evaluate(self, step: int) -> dict[str, float]:
        if self.monitor is None:
            return {}
        was_training = self.training
        self.eval()
        scores = self.monitor.evaluate(self.result)
        self.nonfinite_outputs = not math.isfinite(scores.get("effective_rank", 0.0))
        self.train(was_training)
        return scores

    def score_facts(self) -> dict[str, Any]:
        facts = {} if self.monitor is None else self.monitor.facts()
        return {"scored_on": self.eval_split, **facts} if facts else {}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Log new alarms; return True if the run has collapsed and should end."""
        self.health.warn(step, metrics)
        return self.health.stop and self.health.collapsed


class PretrainingTask(FeatureTask):
    """Student, EMA teacher, and the losses that compare them."""

    def __init__(
        self,
        student: Backbone,
        teacher: Backbone,
        *,
        views: ViewMatching | None,
        regions: RegionMatching | None,
        localization: RelativeLocalization | None = None,
        weights: tuple[float, float, float] = (0.5, 0.5, 0.0),
        koleo_weight: float = 0.0,
        teacher_temp: Schedule,
        momentum: Schedule,
        regions_from: int = 0,
        hold_last: int = 0,
        weight_decay: float = 0.04,
        crops_at_once: int = 0,
        health_every: int = 10,
        objectives: ExtraObjectives | None = None,
    ) -> None:
        super().__init__(student, weight_decay)
        self.teacher = teacher.requires_grad_(False)
        self.teacher.load_state_dict(student.state_dict())
        self.teacher_update = EMA(self.teacher, student, buffers=False)
        self.views, self.regions, self.localization = views, regions, localization
        self.weights, self.koleo_weight, self.objectives = weights, koleo_weight, objectives
        self.teacher_temp, self.momentum = teacher_temp, momentum
        self.regions_from, self.hold_last = regions_from, hold_last
        self.crops_at_once, self.health_every = crops_at_once, health_every

    @property
    def result(self) -> Backbone:
        return self.teacher

    # -- a step

    @property
    def global_crops(self) -> int:
        """The number of global crops. They come first in a batch, and the teacher sees only them."""
        return self.batches.augment.config.global_crops

    def step_inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        """Return the arguments of :meth:`compute_losses`."""
        crops: list[Tensor] = batch.images  # type: ignore[assignment]
        if self.objectives is not None:
            self.objectives.step = step
        temperature = crops[0].new_full((), self.teacher_temp.at(step), dtype=torch.float32)
        with_health = step % self.health_every == 0
        return temperature, self._pairs(batch.number, crops), step >= self.regions_from, with_health, *crops

    def compute_losses(
        self, temperature: Tensor, pairs: Pairs, with_regions: bool, with_health: bool, *crops: Tensor
    ) -> Losses:
        """Compute the losses of the crops (global ones first), and with ``with_health`` the health metrics."""
        count = self.global_crops
        with torch.no_grad():
            teacher = _run_per_size(self.teacher, crops[:count])
        student = self._student(crops)
        losses: Losses = {}
        view_weight, region_weight, localization_weight = self.weights
        total = crops[0].new_zeros((), dtype=torch.float32)
        if self.views is not None:
            losses["view_loss"] = self.views(student, teacher, temperature, hold_center=True)
            total = total + view_weight * losses["view_loss"]
        if self.regions is not None:
            if with_regions:
                losses["region_loss"] = self.regions(student, teacher, temperature, hold_center=True)
                total = total + region_weight * losses["region_loss"]
            else:
                # DDP needs the same parameters on every rank and step: these take part with weight zero.
                total = total + 0.0 * sum(parameter.sum() for parameter in self.regions.student.parameters())
        if self.localization is not None:
            grids = torch.cat([crop.grid for crop in student[:count]])
            losses["localization"], losses["localization_error"] = loss_at_pairs(self.localization, grids, pairs)
            total = total + localization_weight * losses["localization"]
        if self.koleo_weight:  # never between two views of one image
            parts = [koleo_loss(crop.pooled, all_processes=self.training) for crop in student[:count]]
            losses["koleo"] = torch.stack(parts).sum()
            total = total + self.koleo_weight * losses["koleo"]
        if with_health:
            losses |= self._health_metrics(student, teacher, temperature, with_regions)
        losses = {"loss": total, **losses}
        if self.objectives is None:
            return losses
        return self.objectives(losses, student[:count], crops[:count], teacher=teacher)

    def _pairs(self, number: int, crops: Sequence[Tensor]) -> Pairs:
        """Draw the token pairs of the localization loss on the global crops."""
        if self.localization is None:
            return None
        size = self.student.grid_size((crops[0].shape[2], crops[0].shape[3]))
        share, count = self.share, self.global_crops
        generator = device_generator(share.seed, "pairs", number, crops[0].device)
        images = count * len(crops[0])
        return draw_batch_pairs(
            self.localization, size, images, generator, rank=share.rank, world=share.world, views=count
        )

    def is_capturable(self, step: int) -> bool:
        """True after the first steps, in which the region loss is off or the last layer is frozen."""
        return step >= max(self.regions_from, self.hold_last)

    def peak_memory_step(self) -> int:
        """The first step with the region loss and health metrics."""
        return -(-self.regions_from // self.health_every) * self.health_every

    @property
    def cuda_graphs_blocker(self) -> str:
        return "--objectives may use the number of the step" if self.objectives is not None else ""

    def compile_with(self, graphs: bool) -> None:
        """Compile the networks, once per crop size, and the localization head."""
        super().compile_with(graphs)
        for part in (self.teacher, self.localization):
            if part is not None:
                part.compile(dynamic=False)

    def _student(self, crops: Sequence[Tensor]) -> list[Features]:
        """Run the student on all crops: one pass per size, or a few crops at a time, recomputed in backward."""
        if not self.crops_at_once or not torch.is_grad_enabled():
            return _run_per_size(self.student, crops)
        features: list[Features] = []
        for group in _same_size(crops, self.crops_at_once):
            output: Any = checkpoint(self.student, torch.cat(group), use_reentrant=False)
            features += _split(output, len(group))
        return features

    @torch.no_grad()
    def _health_metrics(
        self, student: list[Features], teacher: list[Features], temperature: Tensor, with_regions: bool
    ) -> Losses:
        """Return the health of both levels, the region level's as ``region_…`` (without a view level also plain)."""
        metrics: Losses = {}
        if self.views is not None:
            metrics |= self.views.health(student, teacher, temperature)
        if self.regions is not None and with_regions:
            regions = self.regions.health(student, teacher, temperature)
            metrics |= (regions if self.views is None else {}) | {f"region_{n}": value for n, value in regions.items()}
        return metrics

    def before_optimizer(self, step: int) -> None:
        """Update the centres once per step; freeze the last layer or the region head in the first steps."""
        for level in (self.views, self.regions):
            if level is None:
                continue
            if level is self.regions and step < self.regions_from:
                level.drop_head_grads()
                continue
            level.move_center()
            if step < self.hold_last:
                level.drop_last_layer_grads()

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        """Update the teacher's parameters, θ_t ← λ θ_t + (1 - λ) θ_s; its batch norms keep statistics of their own."""
        momentum = self.momentum.at(step)
        self.teacher_update.update(momentum, skipped)
        for level in (self.views, self.regions):
            if level is not None:
                level.update_teacher(momentum, skipped)


def _run_per_size(backbone: Any, crops: Sequence[Tensor]) -> list[Features]:
    """Run the network on crops, one pass per size; return the features of each crop."""
    return [features for group in _same_size(crops) for features in _split(backbone(torch.cat(group)), len(group))]


def _same_size(crops: Sequence[Tensor], limit: int = 0) -> list[list[Tensor]]:
    """Group neighbouring crops of equal shape, at most ``limit`` per group (0: any number)."""
    groups: list[list[Tensor]] = []
    for crop in crops:
        if groups and groups[-1][0].shape == crop.shape and (not limit or len(groups[-1]) < limit):
            groups[-1].append(crop)
        else:
            groups.append([crop])
    return groups


def _split(features: Features, parts: int) -> list[Features]:
    return [
        Features(grid, pooled)
        for grid, pooled in zip(features.grid.chunk(parts), features.pooled.chunk(parts), strict=True)
    ]


def make_teacher(backbone: Backbone) -> Backbone:
    """Make the EMA teacher: the student's network and weights without dropout or stochastic depth.

    The teacher runs in training mode, so that batch norms use the batch's statistics; dropout would act there too.
    """
    drops = any(isinstance(module, DropPath) for module in backbone.modules())
    teacher = from_spec(backbone.spec(), **({"drop_path": 0.0} if drops else {}))
    teacher.load_state_dict(backbone.state_dict())
    for module in teacher.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if hasattr(module, "drop_rate"):  # timm's convolutional networks call F.dropout
            cast(Any, module).drop_rate = 0.0
    return teacher
