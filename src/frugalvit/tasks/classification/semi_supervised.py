"""Learn from labelled and unlabelled images together: ``frugalvit train DATA --unlabelled IMAGES``.

    L = L_ce(labelled) + ramp · weight · L_u(unlabelled) + λ · L_drloc(all) + region_weight · L_R(unlabelled)

The run begins as supervised training: the first pseudo-labels would be wrong. From ``--semi.start`` on, the EMA weights
predict a pseudo-label from a weak view of each unlabelled image, and the network learns it on a strong view
(``objectives/pseudo_labels.py``), mixed with another one. ViTs need the EMA for this: their current weights give labels
that are too noisy. Mixing is from the same paper (Cai et al., "Semi-supervised Vision Transformers at Scale", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit.backbones import Backbone
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.semi_supervised import REST, SemiConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.mixup import Blend, mix_images, partners
from frugalvit.data.augmentation.transforms import WeakStrongViews
from frugalvit.data.dataset import DatasetSplits, ImageDataset, join
from frugalvit.data.loader import Batch, BatchSource
from frugalvit.data.rng import generator_for, to_device_packed
from frugalvit.data.splits import leave_out_files, subsample_labels
from frugalvit.data.webdataset.shards import is_shards
from frugalvit.data.webdataset.streaming_dataset import should_stream
from frugalvit.engine.ema import EMA
from frugalvit.engine.param_groups import decay_groups, merge_param_groups
from frugalvit.engine.schedules import Delayed, Linear, Schedule
from frugalvit.engine.step import TrainPlan
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.features import Features
from frugalvit.objectives import RegionMatching, RelativeLocalization, pseudo_labels
from frugalvit.objectives.drloc import Pairs, loss_at_pairs
from frugalvit.probing.propagation import UNKNOWN
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.utils.tables import Table
from frugalvit.utils.text import pluralize

# -- data


def separate_streams(config: TrainConfig) -> tuple[TrainConfig, TrainConfig | None]:
    """Return the options for DATA, and for --unlabelled if it is other data. Of shards, both or none are streamed."""
    if config.unlabelled in (None, REST):
        return config, None
    paths = [str(config.data), str(config.unlabelled)]
    shards = [is_shards(path) for path in paths]
    wanted = any(should_stream(path, config.stream) for path, shard in zip(paths, shards, strict=True) if shard)
    streams = [wanted and shard for shard in shards] if any(shards) else [config.stream] * 2
    other = {"data": config.unlabelled, "classes": None, "split": "given", "resume": None, "stream": streams[1]}
    return config.model_copy(update={"stream": streams[0]}), config.model_copy(update=other)


def open_unlabelled(
    config: TrainConfig, source: DatasetSplits, fabric: Fabric | None, scored: Sequence[ImageDataset]
) -> ImageDataset:
    """Return the unlabelled images, without those of ``scored``. Hidden labels stay, to measure; others are UNKNOWN."""
    other = separate_streams(config)[1]
    if other is None:
        images = _find_rest(config, source)
    else:
        opened = builders.open_source(other, fabric, labels="ignore", keep_all=True)
        if "train" not in opened.splits:
            raise UserError(f"--unlabelled {config.unlabelled} has no training images: use another folder.")
        images = opened.splits["train"]
        source.notes.extend(opened.notes)
        images = leave_out_files(images, scored, source.notes)
    if images.streaming is not None and config.semi.method == "flexmatch":
        raise UserError(
            "--semi.method flexmatch remembers every unlabelled image, which a stream does not allow. Use softmatch, "
            "or --stream false."
        )
    where = source.location if other is None else config.unlabelled
    source.notes.append(f"Learning from {pluralize(len(images), 'unlabelled image')} of {where} too.")
    return images


def _find_rest(config: TrainConfig, source: DatasetSplits) -> ImageDataset:
    """Return the training images that --labels leaves out, and those without a label."""
    train, parts = source.splits["train"], []
    if train.streaming is not None:
        raise UserError("--unlabelled rest needs access to single images: use --stream false, or name other shards.")
    if config.labels != 1 and train.labels is not None:
        hidden = np.ones(len(train), dtype=bool)
        hidden[subsample_labels(train.labels, config.labels, config.seed)] = False
        parts = [train.subset(hidden)] if hidden.any() else []
    if "train" in source.loose:
        loose = source.loose["train"].subset(np.arange(len(source.loose["train"])))
        loose.labels = np.full(len(loose), UNKNOWN)
        parts.append(loose)
    if not parts:
        raise UserError(
            f"--unlabelled rest: every training image of {source.location} has a label. Put images into a folder "
            "'unlabelled', leave labels empty in the table, use --labels, or name a folder: --unlabelled IMAGES."
        )
    return join(*parts)


@dataclass(kw_only=True)
class SemiBatch(Batch):
    """A labelled batch with R unlabelled images for each labelled image."""

    weak: Tensor  # (B, R, C, h, w)
    strong: Tensor  # (B, R, C, h, w), mixed with their partners as ``blend`` says
    truth: Tensor  # (B, R) classes, or UNKNOWN
    rows: Tensor  # (B, R) indices in the store of unlabelled images, on the CPU; -1 in a stream
    blend: Blend


class SemiBatches(BatchSource):
    """Labelled and unlabelled batches, each a function of (seed, step); strong views are mixed like images."""

    def __init__(self, labelled: BatchSource, unlabelled: BatchSource, *, mix_strong: bool) -> None:
        self.labelled, self.unlabelled, self.mix_strong = labelled, unlabelled, mix_strong
        self.batch, self.ratio = labelled.batch, unlabelled.batch // labelled.batch
        self.seed, self.rank, self.world = labelled.seed, labelled.rank, labelled.world
        self.augment, self.mixing, self.keep_clean = labelled.augment, labelled.mixing, labelled.keep_clean

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return max(self.labelled.steps_per_epoch, self.unlabelled.steps_per_epoch)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        return self.labelled.unreadable + self.unlabelled.unreadable

    @property
    def readable(self) -> int | None:
        return self.labelled.readable

    def parts(self) -> dict[str, BatchSource]:
        """Return both sources, by the names that data.json gives them."""
        return {"train": self.labelled, "unlabelled": self.unlabelled}

    def batch_at(self, step: int) -> SemiBatch:
        batch, other = self.labelled.batch_at(step), self.unlabelled.batch_at(step)
        truth = torch.full_like(other.index, UNKNOWN).to(batch.images.device) if other.labels is None else other.labels
        weak, strong, blend = *other.images, Blend(1.0)
        if self.mix_strong and self.mixing is not None:
            size = strong.shape[-2], strong.shape[-1]
            blend = self.mixing.draw(size, generator_for(self.seed, "mixing of strong views", batch.number))
            strong = mix_images(strong, blend)
        parts = (part.unflatten(0, (-1, self.ratio)) for part in (weak, strong, truth, other.index))
        weak, strong, truth, rows = parts
        return SemiBatch(**vars(batch), weak=weak, strong=strong, truth=truth, rows=rows, blend=blend)

    def peek(self, step: int) -> Batch:
        """Return the labelled batch; its images are three views: labelled, weak and strong."""
        batch = self.labelled.peek(step)
        return replace(batch, images=[batch.images, *self.unlabelled.peek(step).images])

    def with_batch_size(self, batch: int) -> SemiBatches:
        other = self.unlabelled.with_batch_size(batch * self.ratio)
        return SemiBatches(self.labelled.with_batch_size(batch), other, mix_strong=self.mix_strong)

    def close(self) -> None:
        self.labelled.close()
        self.unlabelled.close()


def add_unlabelled(
    labelled: BatchSource,
    images: ImageDataset,
    backbone: Backbone,
    plan: TrainPlan,
    config: ResolvedTrainConfig,
    fabric: Fabric,
) -> SemiBatches:
    """Put unlabelled batches beside the labelled ones. Their random numbers have a seed of their own."""
    assert config.semi.ratio != "auto"
    augment = WeakStrongViews(config.augment, config.semi, backbone.img_size, backbone.mean, backbone.std)
    larger = replace(plan, images_per_step=plan.images_per_step * config.semi.ratio)
    other = config.model_copy(update={"seed": config.seed + 2**63})
    unlabelled = builders.make_batches(images, backbone.img_size, larger, other, fabric, augment=augment)
    # The cells of a mixed view have no counterpart in the weak one, so region matching needs plain views.
    return SemiBatches(labelled, unlabelled, mix_strong=config.semi.mixing and not config.semi.region_weight)


# -- task


class SemiSupervisedTask(ClassificationTask):
    """A classifier with the losses of labelled and unlabelled images.

    start:         the step from which unlabelled images count; before it, the task is a plain ClassificationTask
    window_counts: (4, C) by pseudo-label, since the last evaluation: predictions, sum of their weights, of the weights
                   with a known truth, and of those that are right.   last_counts: those before the last evaluation
    """

    def __init__(
        self,
        *arguments: Any,
        semi: SemiConfig,
        start: int,
        ramp: Schedule,
        labels: pseudo_labels.PseudoLabels,
        regions: RegionMatching | None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        assert self.average is not None
        self.semi, self.start, self.ramp, self.labels, self.regions = semi, start, ramp, labels, regions
        # The student's batch norms see strong views. The teacher has its own: weak views look like test images.
        self.weights_update = EMA(self.average, self.backbone, buffers=False)
        self.window_counts: Tensor
        self.last_counts: Tensor
        for name in ("window_counts", "last_counts"):
            self.register_buffer(name, torch.zeros(4, self.backbone.num_classes))

    def train(self, mode: bool = True) -> SemiSupervisedTask:
        super().train(mode)
        self.result.eval()  # the EMA weights predict pseudo-labels without dropout
        for mine, other in zip(self.result.modules(), self.backbone.modules(), strict=True):
            if isinstance(mine, _BatchNorm):
                mine.train(other.training)
        return self

    # -- a step

    def forward(self, batch: SemiBatch, step: int) -> dict[str, Tensor]:  # type: ignore[override]
        return self.compute_losses(*self.step_inputs(batch, step))

    def step_inputs(self, batch: SemiBatch, step: int) -> tuple[Any, ...]:  # type: ignore[override]
        images, targets, _, pairs, weight, *_ = super().step_inputs(batch, step)
        if step < self.start:
            labelled = None if pairs is None else pairs[:, : len(images)]
            return images, targets, labelled, weight
        weak, strong = batch.weak.flatten(0, 1), batch.strong.flatten(0, 1)
        rows = to_device_packed([batch.rows.flatten()], images.device)[0]
        ramp, share = torch.tensor([self.ramp.at(step), batch.blend.share], device=images.device)
        return images, targets, pairs, weight, ramp, weak, strong, batch.truth.flatten(), rows, share

    def compute_losses(  # type: ignore[override]
        self, images: Tensor, targets: Tensor, pairs: Pairs, weight: Tensor | None, *unlabelled_inputs: Tensor
    ) -> dict[str, Tensor]:
        """Compute the losses from tensors, in one pass of the student; those of labelled images before the start."""
        if not unlabelled_inputs:
            losses = super().compute_losses(images, targets, None, pairs, weight)
            if self.regions is not None:  # DDP needs the same parameters in every step
                losses["loss"] = losses["loss"] + 0.0 * sum(part.sum() for part in self.regions.parameters())
            return losses
        ramp, weak, strong, truth, index, share = unlabelled_inputs
        with torch.no_grad():
            teacher = self.result(weak)
            probs = self.result.classify(teacher.pooled).float().softmax(1)
        features = self.backbone(torch.cat((images, strong)))
        logits = self.backbone.classify(features.pooled).float()
        first, rest = slice(len(images)), slice(len(images), None)
        labelled, unlabelled = (Features(*(part[rows] for part in features)) for rows in (first, rest))
        with torch.autocast(logits.device.type, enabled=False):
            weights, temperature = self.labels(probs, index), self.semi.temperature
            self._count(probs.argmax(1), weights, truth)
            cross_entropy = self.target.loss(logits[first], targets)
            # ``share`` of the loss of a mixed view is that of the view itself, the rest that of its partner.
            partner = partners(len(probs), probs.device)
            own = pseudo_labels.pseudo_label_loss(logits[rest], probs, weights, temperature)
            other = pseudo_labels.pseudo_label_loss(logits[rest], probs[partner], weights[partner], temperature)
            pseudo = share * own + (1 - share) * other
        losses = {"cross_entropy": cross_entropy, "pseudo_label_loss": pseudo}
        total = cross_entropy + ramp * self.semi.weight * pseudo
        if isinstance(self.localization, RelativeLocalization) and weight is not None:
            losses["localization"], losses["localization_error"] = loss_at_pairs(
                self.localization, features.grid, pairs
            )
            total = total + weight * losses["localization"]
        if self.regions is not None:
            # The matching skips the pair of a crop with itself, so the weak view is the student's first crop too.
            losses["region_loss"] = self.regions([teacher, unlabelled], [teacher], hold_center=True)
            total = total + self.semi.region_weight * losses["region_loss"]
        losses = {name: loss.detach() for name, loss in losses.items()}
        losses |= {"loss": total, "pseudo_labels_used": 100 * weights.mean()}
        return losses if self.objectives is None else self.objectives(losses, [labelled], [images], targets)

    def compile_with(self, graphs: bool) -> None:
        super().compile_with(graphs)
        self.result.compile(dynamic=False)

    def _pairs(self, batch: SemiBatch, *counts: int) -> Pairs:  # type: ignore[override]
        """Draw the token pairs of labelled and strong images."""
        return super()._pairs(batch, len(batch.images), batch.rows.numel())

    @torch.no_grad()
    def _count(self, label: Tensor, weights: Tensor, truth: Tensor) -> None:
        """Count the pseudo-labels of this step, for the evaluation and the report."""
        if self.training:
            rows = torch.stack((torch.ones_like(weights), weights, weights * (truth >= 0), weights * (truth == label)))
            by_class = label[:, None] == torch.arange(self.window_counts.shape[1], device=label.device)
            self.window_counts += pseudo_labels.sum_over_processes(rows @ by_class.to(rows))

    def before_optimizer(self, step: int) -> None:
        if self.regions is not None and step >= self.start:
            self.regions.move_center()

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        if step < self.start:
            super().after_step(step, skipped)
            return
        momentum = min(self.ema, (1 + step) / (10 + step))
        self.weights_update.update(momentum, skipped)
        if self.regions is not None:
            self.regions.update_teacher(momentum, skipped)

    # -- parameters and scores

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        if self.regions is not None:
            groups += decay_groups(self.regions.named_parameters("regions"), self.weight_decay)
        return merge_param_groups(groups)

    def evaluate(self, step: int) -> dict[str, float]:
        if self.window_counts[0].any():
            self.last_counts.copy_(self.window_counts)
            self.window_counts.zero_()
        return super().evaluate(step) | self.pseudo_label_scores()

    def pseudo_label_scores(self) -> dict[str, float]:
        """Return the share of pseudo-labels in use, and of these the share that is right, where it is known."""
        drawn, used, known, right = self.last_counts.sum(1).tolist()
        scores = {"pseudo_labels_used": round(100 * used / drawn, 2)} if drawn else {}
        return scores | ({"pseudo_labels_right": round(100 * right / known, 2)} if known else {})

    def pseudo_label_table(self, classes: Sequence[str]) -> Table:
        """Return how each class was predicted, used and right; None where no truth is known."""
        drawn, used, known, right = self.last_counts.tolist()
        parts = [(n, sum(drawn)) for n in drawn], zip(used, drawn, strict=True), zip(right, known, strict=True)
        shares = ([round(100 * part / total, 2) if total else None for part, total in pairs] for pairs in parts)
        rows = [list(row) for row in zip(classes, *shares, strict=True)]
        return Table(["class", "predicted %", "used %", "right %"], rows, "Pseudo-labels before the last evaluation")


def make_semi_task(
    config: ResolvedTrainConfig, images: int, steps: int, backbone: Backbone, *arguments: Any, **keywords: Any
) -> SemiSupervisedTask:
    """Build the task for ``images`` unlabelled images; further arguments are those of ClassificationTask."""
    semi, classes, regions = config.semi, backbone.num_classes, None
    momentum = 0.999 if semi.momentum == "auto" else semi.momentum
    labels = {
        "fixmatch": lambda: pseudo_labels.FixMatch(semi.threshold),
        "flexmatch": lambda: pseudo_labels.FlexMatch(classes, images, semi.threshold),
        "softmatch": lambda: pseudo_labels.SoftMatch(classes, momentum),
    }[semi.method]()
    if semi.region_weight:
        assert semi.prototypes != "auto"
        regions = RegionMatching(backbone.dim, semi.prototypes, min(2048, 4 * backbone.dim))
    start = round(semi.start * steps)
    ramp = Delayed(Linear(0.0, 1.0, round(semi.warmup * steps)), start)
    keywords |= {"semi": semi, "start": start, "ramp": ramp, "labels": labels}
    return SemiSupervisedTask(backbone, *arguments, regions=regions, **keywords).train()
