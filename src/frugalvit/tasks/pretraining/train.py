"""``frugalvit pretrain``: from images without labels to a backbone."""

from dataclasses import replace
from typing import Any

import torch

from frugalvit.backbones import Backbone
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.resolved import ResolvedPretrainConfig
from frugalvit.data.augmentation.transforms import MultiCrop
from frugalvit.engine.loop import TrainPlan
from frugalvit.engine.schedule import Cosine, Linear, warmup_steps
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.builders import make_localization
from frugalvit.experiment.defaults import Facts, resolve_pretraining
from frugalvit.experiment.extra_objectives import make_objectives
from frugalvit.objectives import RegionMatching, ViewMatching
from frugalvit.tasks.pretraining.collapse import Health
from frugalvit.tasks.pretraining.continue_run import ContinuedRun, import_checkpoint, start_from_heads
from frugalvit.tasks.pretraining.experiment import LabelFreeExperiment, make_network
from frugalvit.tasks.pretraining.task import PretrainingTask, make_teacher
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult


def pretrain(config: PretrainConfig) -> CommandResult:
    """Train a backbone without labels; the run folder then holds the teacher as ``model/``."""
    if config.data is None and config.resume is None and config.continue_from is None:
        raise UserError("There is no data to train on. Pass a folder of images: 'frugalvit pretrain images/'.")
    if sum(config.matching.weights()) <= 0:
        raise UserError("matching.view_weight and matching.region_weight are both 0: there is nothing to learn.")
    return PretrainExperiment(config).run()


class PretrainExperiment(LabelFreeExperiment[PretrainConfig, ResolvedPretrainConfig]):
    command = "pretrain"
    task: PretrainingTask
    source_run: ContinuedRun | None = None  # of --continue

    def __init__(self, options: PretrainConfig) -> None:
        super().__init__(options)
        if options.continue_from and not options.resume:
            self.source_run = ContinuedRun(options.continue_from)
            self.options = self.source_run.inherit_options(options, self.auto_values)  # also how to read the data

    def build_backbone(self, options: PretrainConfig) -> Backbone:
        torch.manual_seed(options.seed)
        stored = {} if self.source_run is None else self.source_run.network_keywords(options)
        return make_network(options, **stored)

    def resolve_values(self, options: PretrainConfig, facts: Facts) -> ResolvedPretrainConfig:
        return resolve_pretraining(options, facts, self.auto_values)

    def build_plan(self) -> TrainPlan:
        return make_plan(self.config, len(self.images), self.fabric.world_size)

    def log_values(self) -> None:
        super().log_values()
        if self.source_run is not None and (changes := self.source_run.describe_changes(self.config)):
            console.info(changes)

    def build_task(self) -> PretrainingTask:
        config, run, plan = self.config, self.run_folder, self.plan
        _check_regions(config, plan)
        task = make_task(config, self.backbone, plan)
        if config.init and builders.needs_initial_weights(config):
            start_from_heads(task, config.init)
        if config.continue_from and not run.has_checkpoint():  # before decoding: the checkpoint may not fit
            run.save_checkpoint(import_checkpoint(config.continue_from, task, plan.steps))
        return task

    def build_batches(self) -> None:
        config, student, task, plan = self.config, self.backbone, self.task, self.plan
        augment = MultiCrop(config.crops, student.img_size, student.mean, student.std)
        _check_crops(student, augment, config)
        settled = max(task.hold_last + plan.log_every, round(0.2 * plan.steps))
        stop = config.health.stop_on_collapse
        self.set_data(augment, Health(config.matching.prototypes, plan.steps, settled, stop=stop))


def _check_regions(config: PretrainConfig, plan: TrainPlan) -> None:
    """Raise if nothing is learned before L_R starts; warn if L_R never starts."""
    matching = config.matching
    (view_weight, region_weight), start = matching.weights(), matching.regions_from
    if region_weight == 0 or start == 0:
        return
    if view_weight == 0 and config.localization.weight == 0:
        raise UserError(
            "--matching.view-weight 0 leaves nothing to learn before L_R starts. Drop --matching.regions-from."
        )
    if round(start * plan.steps_per_epoch) >= plan.steps:  # correct in a run that --continue extends later
        epochs = plan.steps / plan.steps_per_epoch
        console.warning(f"L_R never starts: --matching.regions-from {start:g} is not below the {epochs:.4g} epochs")


def make_plan(config: ResolvedPretrainConfig, images: int, world: int) -> TrainPlan:
    """Build the schedule of a run in steps, for ``images`` training images on ``world`` processes."""
    plan = TrainPlan.from_config(config, images, world, lines=20)
    steps, per_epoch, optimizer = plan.steps, plan.steps_per_epoch, config.optimizer
    warm = warmup_steps(optimizer.warmup, per_epoch, steps)
    return replace(
        plan,
        lr=Cosine(config.lr, config.lr * optimizer.min_lr, steps, warm, from_zero=optimizer.cosine_from_start),
        weight_decay=Cosine(optimizer.weight_decay, config.weight_decay_end, steps),
        evaluate_every=max(round(config.health.every * per_epoch), -(-steps // 50)),
    )


def make_task(
    config: ResolvedPretrainConfig, student: Backbone, plan: TrainPlan, kind: type[PretrainingTask] = PretrainingTask
) -> PretrainingTask:
    """Build student, teacher, heads and schedules."""
    matching = config.matching
    heads: dict[str, Any] = {
        "prototypes": matching.prototypes,
        "hidden": matching.hidden,
        "bottleneck": matching.bottleneck,
        "norm_last": matching.norm_last,
        "student_temp": matching.student_temp,
        "center_momentum": matching.center_momentum,
        "centering": matching.centering,
        "chunked": matching.chunked,
    }
    weight, (view_weight, region_weight) = config.localization.weight, matching.weights()
    further = {"localization": weight > 0, "koleo": matching.koleo > 0}
    warm = warmup_steps(matching.teacher_temp_warmup, plan.steps_per_epoch, plan.steps, share=1 / 3)
    grid = student.grid_size(student.img_size)  # of the global crops, the largest
    return kind(
        student,
        make_teacher(student),
        views=ViewMatching(student.pooled_dim, **heads) if view_weight > 0 else None,
        regions=RegionMatching(student.dim, **heads) if region_weight > 0 else None,
        localization=make_localization(config.localization, student.dim, grid) if weight > 0 else None,
        weights=(view_weight, region_weight, weight),
        koleo_weight=matching.koleo,
        teacher_temp=Linear(matching.teacher_temp_start, matching.teacher_temp, warm),
        momentum=Cosine(matching.momentum, 1.0, plan.steps),
        regions_from=round(matching.regions_from * plan.steps_per_epoch),
        hold_last=min(round(matching.hold_last * plan.steps_per_epoch), plan.steps // 10),
        weight_decay=config.optimizer.weight_decay,
        crops_at_once=config.crops_at_once,
        health_every=plan.log_every,
        objectives=make_objectives(config.objectives, student.dim, [name for name, on in further.items() if on]),
    )


def _check_crops(backbone: Backbone, augment: MultiCrop, config: PretrainConfig) -> None:
    """Raise if the grid of the global crops has no regions to match."""
    # Before anything is compiled: a compiled network cannot compute the padding of a new size.
    height, width = backbone.grid_size(augment.out_size)
    if augment.config.local_crops:
        backbone.grid_size(augment.local_size)
    if config.matching.region_weight == 0 and config.localization.weight == 0:
        return  # the view level uses no grid
    if height * width < 2:
        raise UserError(
            f"{backbone.name} ends in a {height}×{width} grid at {augment.out_size[0]}×{augment.out_size[1]} px: "
            "there are no regions to match. Use a larger --img-size, or --matching.region-weight 0."
        )
