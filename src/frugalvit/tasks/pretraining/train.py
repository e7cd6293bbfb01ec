"""``frugalvit pretrain``: from images without labels to a backbone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_folder import load_model_folder, save_model_folder
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.data.augment.transforms import MultiCrop
from frugalvit.data.dataset import DatasetSplits, ImageDataset, join
from frugalvit.engine.auto_batch import fit_to_memory
from frugalvit.engine.compile import compile_task
from frugalvit.engine.schedules import Cosine, Linear, warmup_steps
from frugalvit.engine.trainer import TrainPlan, fit
from frugalvit.errors import UserError
from frugalvit.experiment import builders, resume
from frugalvit.experiment.auto_values import (
    AutoValues,
    Facts,
    decide_common,
    decide_heads,
    decide_pretraining,
    log_recipe,
    matching_width,
)
from frugalvit.experiment.drloc_pairs import make_head
from frugalvit.experiment.experiment import adopt_init_architecture, run_experiment
from frugalvit.experiment.resume import read_facts
from frugalvit.experiment.summary import (
    augmentation_sheet,
    decisions_table,
    finite,
    run_facts,
    run_result,
    save_pictures,
    summary_table,
)
from frugalvit.objectives import RegionMatching, ViewMatching
from frugalvit.runs.data_record import record_data_usage
from frugalvit.runs.run_folder import RunFolder, find_run
from frugalvit.tasks.pretraining.continue_run import (
    describe_changes,
    import_checkpoint,
    inherit_options,
    start_from_heads,
)
from frugalvit.tasks.pretraining.health import FeatureMonitor, Health, health_table
from frugalvit.tasks.pretraining.task import PretrainingTask, make_teacher
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table

SAMPLE = "sample"
"""The split that lines of metrics name where the images that are looked at were learned from."""
_LEARNED = {"train": ("train",), "train+val": ("train", "val"), "all": ("train", "val", "test")}
"""The splits that each value of --images learns from."""


def pretrain(config: PretrainConfig) -> CommandResult:
    """Train a backbone without labels; the run folder holds the teacher as ``model/`` afterwards."""
    if config.data is None and config.resume is None and config.continue_from is None:
        raise UserError("What should be learned from? Give a folder of images: 'frugalvit pretrain images/'.")
    if sum(config.matching.weights()) <= 0:
        raise UserError("matching.view_weight and matching.region_weight are both 0: there is nothing to learn.")
    if config.continue_from and not config.resume:
        way = "--continue takes runs of 'frugalvit pretrain'"
        resume.check_kind(find_run(config.continue_from), PretrainConfig, way)
    decisions = AutoValues()
    config = inherit_options(config, decisions)  # first of all: it says how the data are read, too
    return run_experiment(config, "pretrain", _open, partial(_pretrain, decisions), _result)


def _open(config: PretrainConfig, fabric: Fabric) -> DatasetSplits:
    whole = config.images != "train" or _went_on_with_all(config)
    source = builders.open_source(config, fabric, labels=config.labels, loose=True, whole=whole)
    builders.check_enough(config, _images(source, config.images))
    source.notes += _note_flattering(source, config.images)
    return source


def _went_on_with_all(config: PretrainConfig) -> bool:
    """Whether a run continues one on shards that held none out: what it learned from is not fit to validate on."""
    if not config.continue_from or config.resume:
        return False
    survey = read_facts(config.continue_from).get("survey")
    return survey is not None and not survey.get("held")


def _pretrain(
    decisions: AutoValues, config: PretrainConfig, source: DatasetSplits, run: RunFolder, fabric: Fabric
) -> CommandResult:
    examples = _images(source, config.images)
    log_recipe(config, decisions)
    adopt_init_architecture(config, decisions)
    facts = Facts(
        len(examples), len(source.classes or ()), builders.median_side(examples.sample_images()), fabric.device.type
    )
    decide_common(config, facts, decisions)
    builders.decide_reading(config, examples, fabric, decisions)
    decide_pretraining(config, facts, decisions)
    torch.manual_seed(config.seed)
    student = make_network(config)
    decide_heads(config, student, decisions)
    builders.log_auto_values(source, decisions)
    if config.continue_from and not config.resume and (differing := describe_changes(config)):
        console.info(differing)
    builders.write_run_metadata(config, run, decisions, examples, source.classes or (), student)
    console.info(f"run folder: {run.folder}")

    plan = make_plan(config, len(examples), fabric.world_size)
    _check_regions(config, plan)
    builders.check_resumed_batch_size(config, plan, run, fabric)
    task = make_task(config, student, plan)
    if config.init and builders.starts_from_init(config):
        start_from_heads(task, config.init)
    if config.continue_from and not run.has_checkpoint():  # before the images are decoded: it may not fit
        run.save_checkpoint(import_checkpoint(config.continue_from, task, plan.steps))
    augment = MultiCrop(config.crops, student.img_size, student.mean, student.std)
    _check_crops(student, augment, config)
    batches = builders.make_batches(examples, student.img_size, plan, config, fabric, augment=augment)
    monitor, watched = make_monitor(config, source, student, fabric)
    assert isinstance(config.matching.prototypes, int)
    settled = max(task.hold_last + plan.log_every, round(0.2 * plan.steps))
    health = Health(config.matching.prototypes, plan.steps, settled, stop=config.health.stop_on_collapse)
    task.set_data(batches, monitor, health, fabric, watched)
    record_data_usage(run, source.notes, {"train": batches})
    if config.auto_batch:
        plan = fit_to_memory(config, plan, task, run, fabric)
    compile_task(task, config, plan, fabric)
    with builders.closing_readers(task):
        outcome = fit(task, plan, run, fabric)
        return _finish(config, source, run, task, outcome, decisions, health)


def _images(source: DatasetSplits, which: str) -> ImageDataset:
    """The images to learn from: one split, or several without their labels, and the loose images beside them."""
    names = _LEARNED[which]
    parts = [where[name] for where in (source.splits, source.loose) for name in names if name in where]
    if len(parts) > 1 and parts[0].streaming is not None:
        raise UserError(f"--images {which} joins splits, which --stream false can: or name all shards as one pattern.")
    if sum(len(part) for part in parts) < 2:
        raise UserError(f"{source.location} has no training images to learn from.")
    return join(*parts)


def _check_regions(config: PretrainConfig, plan: TrainPlan) -> None:
    """L_R may begin late, but after something else, and no run should be without it unnoticed."""
    matching = config.matching
    (view_weight, region_weight), begin = matching.weights(), matching.regions_from
    if region_weight == 0 or begin == 0:
        return
    if view_weight == 0 and config.localization.weight == 0:
        raise UserError(
            "--matching.view-weight 0 leaves nothing to learn before L_R begins: leave out --matching.regions-from."
        )
    if round(begin * plan.steps_per_epoch) >= plan.steps:  # no mistake in a run that --continue lengthens
        epochs = plan.steps / plan.steps_per_epoch
        console.warning(
            f"L_R takes no part in this run: --matching.regions-from {begin:g}, and it has {epochs:.4g} epochs"
        )


def make_plan(config: PretrainConfig, images: int, world: int) -> TrainPlan:
    """The run in steps."""
    plan = TrainPlan.from_config(config, images, world, lines=20)
    assert isinstance(config.lr, float)
    steps, per_epoch, optimizer = plan.steps, plan.steps_per_epoch, config.optimizer
    warm = warmup_steps(optimizer.warmup, per_epoch, steps)
    return replace(
        plan,
        lr=Cosine(config.lr, config.lr * optimizer.min_lr, steps, warm, whole=optimizer.whole_cosine),
        weight_decay=Cosine(optimizer.weight_decay, config.weight_decay_end, steps),
        evaluate_every=max(round(config.health.every * per_epoch), -(-steps // 50)),
    )


def make_network(config: PretrainConfig) -> Backbone:
    """The student of a run."""
    return builders.make_backbone(config, 0, **({} if config.drop_path == "auto" else {"drop_path": config.drop_path}))


def make_task(
    config: PretrainConfig, student: Backbone, plan: TrainPlan, kind: type[PretrainingTask] = PretrainingTask
) -> PretrainingTask:
    """Student, teacher, heads and schedules from the configuration."""
    matching = config.matching
    assert isinstance(matching.prototypes, int) and isinstance(matching.momentum, float)
    assert isinstance(matching.teacher_temp, float)
    heads: dict[str, Any] = {
        "prototypes": matching.prototypes,
        "hidden": matching_width(student.dim) if matching.hidden == "auto" else matching.hidden,
        "bottleneck": matching.bottleneck,
        "norm_last": matching.norm_last,
        "student_temp": matching.student_temp,
        "center_momentum": matching.center_momentum,
        "chunked": matching.chunked,
    }
    weight, (view_weight, region_weight) = config.localization.weight, matching.weights()
    assert isinstance(weight, float)
    warm = warmup_steps(matching.teacher_temp_warmup, plan.steps_per_epoch, plan.steps, share=1 / 3)
    grid = student.grid_size(student.img_size)  # of the global crops, the largest there is
    return kind(
        student,
        make_teacher(student),
        views=ViewMatching(student.pooled_dim, **heads) if view_weight > 0 else None,
        regions=RegionMatching(student.dim, **heads) if region_weight > 0 else None,
        localization=make_head(config.localization, student.dim, grid) if weight > 0 else None,
        weights=(view_weight, region_weight, weight),
        teacher_temp=Linear(matching.teacher_temp_start, matching.teacher_temp, warm),
        momentum=Cosine(matching.momentum, 1.0, plan.steps),
        regions_from=round(matching.regions_from * plan.steps_per_epoch),
        hold_last=min(round(matching.hold_last * plan.steps_per_epoch), plan.steps // 10),
        weight_decay=config.optimizer.weight_decay,
        crops_at_once=config.crops_at_once,
        health_every=plan.log_every,
    )


def make_monitor(
    config: PretrainConfig, source: DatasetSplits, backbone: Backbone, fabric: Fabric
) -> tuple[FeatureMonitor, str]:
    """A fixed sample of the images; with labels, training images as the bank and other images as questions.

    Comes with the split that lines of metrics name: that of the questions, or ``SAMPLE`` where they are learned from,
    which choose nothing. Without another split each image of the bank is asked about the others.
    """
    count = 8 * config.health.images if source.classes else config.health.images
    bank = _sample(source.splits[_first_split(source)].sample_images(), count)
    asked, queries = _asked_split(source), None
    if asked is not None:
        queries = builders.eval_set(_sample(source.splits[asked], config.health.images), backbone, config, fabric)
    monitor = FeatureMonitor(
        builders.eval_set(bank, backbone, config, fabric), queries, len(source.classes or ()), fabric
    )
    return monitor, SAMPLE if asked is None or asked in _LEARNED[config.images] else asked


def _asked_split(source: DatasetSplits) -> str | None:
    """Whose images k-NN asks about: val's, without it test's; not the bank's, of which each would find itself."""
    others = [split for split in ("val", "test") if split != _first_split(source) and source.splits.get(split)]
    return others[0] if others and source.classes else None


def _note_flattering(source: DatasetSplits, images: str) -> list[str]:
    """A word where k-NN asks about images that are learned from: as good as its numbers look, they are no scores."""
    asked, bank = _asked_split(source), _first_split(source)
    has_knn = len(source.classes or ()) > 1 and source.splits[bank].sample_images().labels is not None
    if not has_knn or (asked or bank) not in _LEARNED[images]:
        return []
    which = "images that are learned from" if asked is None else f"{asked}, which --images {images} learns from"
    return [f"k-NN watches {which}: it flatters, is called {SAMPLE} and chooses no best.pt."]


def _first_split(source: DatasetSplits) -> str:
    """Train, where there is one: --images all, or train+val, learns from the other splits alone, too."""
    return "train" if "train" in source.splits else next(iter(source.splits))


def _sample(examples: ImageDataset, count: int) -> ImageDataset:
    if len(examples) <= count:
        return examples
    return examples.subset(np.sort(np.random.default_rng(0).permutation(len(examples))[:count]))


def _check_crops(backbone: Backbone, augment: MultiCrop, config: PretrainConfig) -> None:
    # Asked before anything is compiled: a compiled network cannot find out how a new size is padded.
    height, width = backbone.grid_size(augment.out_size)
    local_grid = backbone.grid_size(augment.local_size) if augment.config.local_crops else None
    if config.matching.region_weight == 0 and config.localization.weight == 0:
        return  # the view level alone looks at no grid
    if height * width < 2:
        raise UserError(
            f"{backbone.name} ends in a {height}×{width} grid at {augment.out_size[0]}×{augment.out_size[1]} px: "
            "there are no regions to match. Use a larger --img-size, or --matching.region-weight 0."
        )
    local = augment.local_size
    if local_grid == (1, 1):
        # One region finds its like among the teacher's as well as nine do; but it tells no place from another.
        console.info(f"local crops of {local[0]}×{local[1]} px end in one region each; --crops.local-size makes more")


def _finish(
    config: PretrainConfig,
    source: DatasetSplits,
    run: RunFolder,
    task: PretrainingTask,
    outcome: dict[str, Any],
    decisions: AutoValues,
    health: Health,
) -> CommandResult:
    """The teacher's last weights are the result: the average over the end of the run is better than any one moment."""
    lines = run.metrics()
    # Of whatever split: earlier versions wrote "val" for a sample of the images learned from.
    last = next((line for line in reversed(lines) if line.get("split", "train") != "train"), {})
    losses = [line["loss"] for line in lines if line.get("split") == "train" and line.get("loss") is not None]
    summary: dict[str, Any] = {
        "run": str(run.folder),
        "task": "pretrain",
        "knn": last.get("knn"),
        "knn_on": None if last.get("knn") is None else task.eval_split,
        "best_knn": finite(outcome["best"]),
        "health": health.verdict(),
        "alarms": [str(alarm) for alarm in health.raised.values()],
        "first_loss": losses[0] if losses else None,
        "loss": losses[-1] if losses else None,
        "effective_rank": last.get("effective_rank"),
        "largest_rank": min(task.student.pooled_dim, task.monitor.gallery.store.readable),
        "feature_deviation": last.get("feature_deviation"),
        **run_facts(config, outcome, task.student),
    }
    if run.writer:
        meta = {"data": source.name, "recipe": config.recipe, "knn": summary["knn"], "task": "pretrain"}
        save_model_folder(task.teacher, run.folder / "model", meta=meta)
        assert task.batches is not None
        record_data_usage(run, source.notes, {"train": task.batches})
        save_pictures(run, None, augmentation_sheet(task.batches, task.student))
        run.table("summary", summary_table(summary))
        run.table("health", health_table(health.verdict(), _last_signs(lines), health.raised.values()))
        run.table("decisions", decisions_table(decisions))
        run.save_json("summary.json", summary | {"auto": [vars(decision) for decision in decisions]})
        if config.report:
            from frugalvit.report.page import write_report

            shown = source.splits.get("val") or source.splits[_first_split(source)].sample_images()
            # As it was saved: the teacher itself may be compiled, and would be so once more for a CPU, for minutes.
            teacher, _ = load_model_folder(run.folder / "model")
            write_report([run.folder], run.folder / "report.html", model=teacher, examples=shown)
    return _result(summary)


def _last_signs(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """The newest value of everything that was measured, of whatever split."""
    signs: dict[str, float | None] = {}
    for line in lines:
        signs |= {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "epoch", "lr")}
    return signs


def _result(summary: dict[str, Any]) -> CommandResult:
    names = ["first_loss", "loss", "knn", "effective_rank", "health", "seconds"]
    table = Table(names, [[summary.get(name) for name in names]], "pre-training")
    where = console.shell_quote(summary["run"])
    then = [f"frugalvit probe knn {where} LABELLED_IMAGES/", f"frugalvit train LABELLED_IMAGES/ --init {where}"]
    return run_result(summary, table, then)
