"""``frugalvit pretrain``: from images without labels to a backbone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_folder import load_model_folder, save_model_folder
from frugalvit.config.data import SMALL_INPUT
from frugalvit.config.defaults import INSTANCES_UP_TO, Facts, ema_rate
from frugalvit.config.pretrain import LabelFreeConfig, PretrainConfig
from frugalvit.config.resolved import ResolvedLabelFreeConfig, ResolvedPretrainConfig
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import Augment, TrainAugment
from frugalvit.data.dataset import DatasetSplits, ImageDataset, join
from frugalvit.engine.loop import TrainPlan
from frugalvit.engine.schedules import Cosine, Linear, warmup_steps
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.builders import make_localization
from frugalvit.experiment.experiment import Experiment
from frugalvit.experiment.extra_objectives import make_objectives
from frugalvit.experiment.resolve import resolve_pretraining
from frugalvit.experiment.summary import augmentation_sheet, finite, run_facts, run_result, save_pictures
from frugalvit.objectives import RegionMatching, ViewMatching
from frugalvit.runs import layout
from frugalvit.runs.data_record import record_data_usage
from frugalvit.tasks.pretraining.collapse import FeatureMonitor, Health, health_table
from frugalvit.tasks.pretraining.continue_run import ContinuedRun, import_checkpoint, start_from_heads
from frugalvit.tasks.pretraining.instances import InstanceTask, number_images
from frugalvit.tasks.pretraining.task import FeatureTask, PretrainingTask, make_teacher
from frugalvit.utils import console
from frugalvit.utils.scores import read_scores
from frugalvit.utils.tables import CommandResult, Table

C = TypeVar("C", bound=LabelFreeConfig)
R = TypeVar("R", bound=ResolvedLabelFreeConfig)

SAMPLE = "sample"  # the split name in metrics for evaluation images that are also trained on
_TRAINED = {"train": ("train",), "train+val": ("train", "val"), "all": ("train", "val", "test")}
"""The splits that each value of --images trains on."""
_HEAD_OPTIONS = {"prototypes", "hidden", "bottleneck", "norm_last", "student_temp", "center_momentum"} | {
    *("centering", "chunked")
}


def pretrain(config: PretrainConfig) -> CommandResult:
    """Train a backbone without labels; the run folder then holds the teacher as ``model/``."""
    if sum(config.matching.weights()) <= 0:
        raise UserError("matching.view_weight and matching.region_weight are both 0: there is nothing to learn.")
    return PretrainExperiment(config).run()


class LabelFreeExperiment(Experiment[C, R]):
    """Learns features; the run folder then holds ``task.result`` as ``model/``."""

    data: DatasetSplits
    task: FeatureTask
    images: ImageDataset  # to train on
    health: Health

    def open_data(self, fabric: Fabric | None) -> DatasetSplits:
        options = self.options
        keep_all = options.images != "train"
        source = builders.open_source(options, fabric, labels=options.label_source, loose=True, keep_all=keep_all)
        self.images = choose_images(source, options.images)
        builders.check_enough_images(options, self.images)
        return source

    def facts(self) -> Facts:
        side = builders.median_side(self.images.sample_images())
        return Facts(len(self.images), len(self.data.classes or ()), side, self.fabric.device.type)

    def build_backbone(self, options: C) -> Backbone:
        return make_network(options)

    def build_plan(self) -> TrainPlan:
        return make_plan(self.config, len(self.images), self.fabric.world_size)

    def training_files(self) -> tuple[ImageDataset, Sequence[str], None]:
        return self.images, self.data.classes or (), None

    def set_data(self, images: ImageDataset, augment: Augment, health: Health, mixing: Mixing | None = None) -> None:
        """Pass the batches, the monitor of the features and the health checks to the task."""
        config, student = self.config, self.backbone
        views: dict[str, Any] = {"augment": augment, "mixing": mixing}
        batches = builders.make_batches(images, student.img_size, self.plan, config, self.fabric, **views)
        monitor, split = make_monitor(config, self.data, student, self.fabric)
        self.health = health
        self.task.set_data(batches, monitor, health, self.fabric, split)
        record_data_usage(self.run_folder, self.data.notes, {"train": batches})

    def score(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Summarize the run. The last weights are the result, because the learning rate or an EMA settles them."""
        task, lines = self.task, self.run_folder.metrics()
        last = next((line for line in reversed(lines) if line.get("split", "train") != "train"), {})
        losses = [line["loss"] for line in lines if line.get("split") == "train" and line.get("loss") is not None]
        return {
            "run": str(self.run_folder.folder),
            "task": self.command,
            "knn": last.get("knn"),
            "knn_on": None if last.get("knn") is None else task.eval_split,
            "best_knn": finite(outcome["best"]),
            **task.score_facts(),
            "health": self.health.verdict(),
            "alarms": [str(alarm) for alarm in self.health.raised.values()],
            "first_loss": losses[0] if losses else None,
            "loss": losses[-1] if losses else None,
            "effective_rank": last.get("effective_rank"),
            "largest_rank": min(task.student.pooled_dim, task.monitor.gallery.store.readable),
            "feature_deviation": last.get("feature_deviation"),
            **run_facts(self.config, outcome, task.student),
        }

    def save_results(self, summary: dict[str, Any]) -> dict[str, Any]:
        run, task = self.run_folder, self.task
        meta = {"data": self.data.name, "recipe": self.config.recipe, "knn": summary["knn"], "task": self.command}
        save_model_folder(task.result, run.path(layout.MODEL), meta=meta)
        batches: Any = task.batches  # --auto-batch may have replaced them
        record_data_usage(run, self.data.notes, {"train": batches})
        save_pictures(run, None, augmentation_sheet(batches, task.student))
        signs: dict[str, float | None] = {}  # the newest value of every metric
        for line in run.metrics():
            signs |= {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "epoch", "lr")}
        run.table("health", health_table(self.health.verdict(), signs, self.health.raised.values()))
        return {}

    def report_inputs(self) -> dict[str, Any]:
        images = self.data.splits.get("val") or self.data.splits[_first_split(self.data)].sample_images()
        # Loaded from the file: the network may be compiled, and compiling it for the CPU takes minutes.
        network, _ = load_model_folder(self.run_folder.path(layout.MODEL))
        return {"model": network, "examples": images}

    def result(self, summary: dict[str, Any]) -> CommandResult:
        names = ["first_loss", "loss", "effective_rank", "health"]
        title = {"pretrain": "pre-training", "distil": "distillation"}[self.command]
        table = Table([n.replace("_", " ") for n in names], [[summary.get(name) for name in names]], title)
        run = console.shell_quote(summary["run"])
        commands = [f"frugalvit probe knn {run} LABELLED_IMAGES/", f"frugalvit train LABELLED_IMAGES/ --init {run}"]
        return run_result(summary, table, commands, [f"{'score':<12}{score}" for score in read_scores(summary)])


class PretrainExperiment(LabelFreeExperiment[PretrainConfig, ResolvedPretrainConfig]):
    command = "pretrain"
    task: PretrainingTask | InstanceTask
    source_run: ContinuedRun | None = None  # of --continue

    def __init__(self, options: PretrainConfig) -> None:
        super().__init__(options)
        if options.continue_from and not options.resume:
            self.source_run = ContinuedRun(options.continue_from)
            self.options = self.source_run.inherit_options(options, self.auto_values)  # also how to read the data

    def build_backbone(self, options: PretrainConfig) -> Backbone:
        return make_network(options, **({} if self.source_run is None else self.source_run.network_keywords(options)))

    def resolve_values(self, options: PretrainConfig, facts: Facts) -> ResolvedPretrainConfig:
        return resolve_pretraining(options, facts, self.auto_values)

    def log_values(self) -> None:
        super().log_values()
        fits = suits_instances(len(self.images), min(self.backbone.img_size))
        if fits and not self.config.is_set("method") and self.source_run is None:
            console.info("few images: --method instances usually learns better features (docs/guides/no_labels.md)")
        if self.source_run is not None and (changes := self.source_run.describe_changes(self.config)):
            console.info(changes)

    def build_task(self) -> PretrainingTask | InstanceTask:
        config, run, plan = self.config, self.run_folder, self.plan
        if config.method == "instances":
            if config.continue_from:
                raise UserError("--continue needs --method esvit. To start from the weights of a run, use --init.")
            return make_instance_task(config, self.backbone, plan, len(self.images))
        _check_regions(config, plan)
        task = make_task(config, self.backbone, plan)
        if config.init and builders.needs_initial_weights(config):
            start_from_heads(task, config.init)
        if config.continue_from and not run.has_checkpoint():  # before decoding: the checkpoint may not fit
            run.save_checkpoint(import_checkpoint(config.continue_from, task, plan.steps))
        return task

    def build_batches(self) -> None:
        config, student, task, plan = self.config, self.backbone, self.task, self.plan
        stop = config.health.stop_on_collapse
        if isinstance(task, InstanceTask):
            views = TrainAugment(config.augment, student.img_size, student.mean, student.std)
            health = Health(0, plan.steps, round(0.2 * plan.steps), stop=stop)
            self.set_data(number_images(self.images), views, health, Mixing(config.mixing, len(self.images)))
            return
        augment = MultiCrop(config.crops, student.img_size, student.mean, student.std)
        _check_crops(student, augment, config)
        settled = max(task.hold_last + plan.log_every, round(0.2 * plan.steps))
        self.set_data(self.images, augment, Health(config.matching.prototypes, plan.steps, settled, stop=stop))


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


def make_plan(config: ResolvedLabelFreeConfig, images: int, world: int) -> TrainPlan:
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
    matching = config.matching
    heads = matching.model_dump(include=_HEAD_OPTIONS)
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


def make_instance_task(config: ResolvedPretrainConfig, student: Backbone, plan: TrainPlan, images: int) -> InstanceTask:
    """Build student, classifier and EMA for this many images."""
    return InstanceTask(student, images, ema_rate(plan.steps)[0], config.optimizer.weight_decay)


def suits_instances(images: int, side: int) -> bool:
    """Whether ``--method instances`` usually learns better features than EsViT."""
    return images <= INSTANCES_UP_TO and side > SMALL_INPUT


def make_network(config: LabelFreeConfig, **keywords: Any) -> Backbone:
    return builders.make_backbone(config, 0, **keywords)


def choose_images(source: DatasetSplits, images: str) -> ImageDataset:
    """Return the images to train on: one or several splits, and the unlabelled images beside them."""
    names = _TRAINED[images]
    parts = [splits[name] for splits in (source.splits, source.loose) for name in names if name in splits]
    if len(parts) > 1 and parts[0].streaming is not None:
        raise UserError(
            f"--images {images} joins splits, which needs --stream false. Or pass all shards as one pattern."
        )
    if sum(len(part) for part in parts) < 2:
        raise UserError(f"{source.location} has no training images.")
    return join(*parts)


def make_monitor(
    config: ResolvedLabelFreeConfig, source: DatasetSplits, backbone: Backbone, fabric: Fabric
) -> tuple[FeatureMonitor, str]:
    """Build the feature monitor from fixed samples: training images as gallery, others as queries.

    Return it with the split name for the metrics: that of the queries, or ``SAMPLE`` if the run trains on them: such a
    score cannot choose the best weights. Without another split each gallery image is a query against the others.
    """
    count = 8 * config.health.images if source.classes else config.health.images
    gallery = _sample(source.splits[_first_split(source)].sample_images(), count)
    # The queries are val, else test; never the gallery.
    others = [split for split in ("val", "test") if split != _first_split(source) and source.splits.get(split)]
    split, queries = others[0] if others and source.classes else None, None
    if split is not None:
        queries = builders.eval_set(_sample(source.splits[split], config.health.images), backbone, config, fabric)
    monitor = FeatureMonitor(
        builders.eval_set(gallery, backbone, config, fabric), queries, len(source.classes or ()), fabric
    )
    return monitor, SAMPLE if split is None or split in _TRAINED[config.images] else split


def _first_split(source: DatasetSplits) -> str:
    """Return train, or the first split if there is no train."""
    return "train" if "train" in source.splits else next(iter(source.splits))


def _sample(examples: ImageDataset, count: int) -> ImageDataset:
    if len(examples) <= count:
        return examples
    return examples.subset(np.sort(np.random.default_rng(0).permutation(len(examples))[:count]))
