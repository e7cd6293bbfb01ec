"""The course of a detection or segmentation run: the same loop, folder, resume and report as every training.

A :class:`Job` says what is particular; ``train`` is what both have in common.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.dense import TransferConfig
from frugalvit.data.dataset import FileExamples
from frugalvit.engine.distributed import collective_timeout, run_on_rank_zero
from frugalvit.engine.schedules import Schedule
from frugalvit.engine.trainer import TrainPlan, fit
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.auto_values import AutoValues, Facts, log_recipe
from frugalvit.experiment.experiment import adopt_init_architecture, run_experiment
from frugalvit.experiment.resume import network_keywords
from frugalvit.experiment.summary import decisions_table, finite, kept_weights, run_facts, summary_table
from frugalvit.runs.data_record import SkippedFile, write_data_usage
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.dense.auto_values import decide_drop_path, decide_input, decide_length, short_side
from frugalvit.tasks.dense.loader import ImageReader, StepLoader, worker_count
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table


class DenseJob(Protocol):
    """What detection and segmentation do each in their way."""

    verb: str
    columns: int  # random numbers an image needs in a step

    def open(self, config: Any) -> Any: ...
    def decide(self, config: Any, data: Any, backbone: Backbone, decisions: AutoValues) -> None: ...
    def task(self, config: Any, data: Any, backbone: Backbone) -> Any: ...
    def dataset(self, items: list[Any], data: Any, pictures: ImageReader, task: Any) -> Any: ...
    def schedule(self, config: Any, steps: int) -> Schedule: ...
    def score(self, task: Any, dataset: Any, folder: Path | None) -> dict[str, Any]: ...
    def facts(self, config: Any, data: Any, task: Any) -> dict[str, Any]: ...
    def result(self, summary: dict[str, Any]) -> CommandResult: ...


def train(config: Any, job: DenseJob) -> CommandResult:
    """Train on a backbone; the run folder holds everything afterwards."""
    if config.data is None and config.resume is None:
        raise UserError(f"What should be trained on? Give a folder: 'frugalvit {job.verb} train DATA'.")
    body = functools.partial(_train, job)
    return run_experiment(config, f"{job.verb} train", lambda settings, _: _open(job, settings), body, job.result)


def _open(job: DenseJob, config: Any) -> Any:
    """The data, if there is something to learn from and something to score on; a run folder is made only then."""
    data = job.open(config)
    choose_splits(data.splits, config.data, config.split)
    return data


def _train(job: DenseJob, config: Any, data: Any, run: RunFolder, fabric: Fabric) -> CommandResult:
    items, watched, split, unseen = choose_splits(data.splits, config.data, config.split)
    decisions = AutoValues()
    side = int(statistics.median(min(item.height, item.width) for item in items))
    facts = Facts(len(items), len(data.classes), side, fabric.device.type)
    log_recipe(config, decisions)
    decide_drop_path(config, decisions)
    torch.manual_seed(config.seed)  # the initial weights follow from it too
    backbone = make_backbone(config, facts, decisions)
    decide_length(config, facts.with_backbone(backbone), decisions)
    job.decide(config, data, backbone, decisions)
    plan = make_plan(config, len(items), fabric.world_size, job)
    decisions.resolve(config, "evaluate_every", plan.evaluate_every, plan.describe_evaluation())
    for note in [*data.notes, *(f"auto: {decision}" for decision in decisions), f"run folder: {run.folder}"]:
        console.info(note)
    truth = _listed(list(dict.fromkeys(item.truth for item in items))).fingerprint(times=False)
    listed = _listed([item.path for item in items])
    builders.write_run_metadata(config, run, decisions, listed, data.classes, backbone, truth=truth)
    builders.check_resumed_batch_size(config, plan, run, fabric)
    task = job.task(config, data, backbone)
    task.to(fabric.device)
    dataset = _learned(job, items, data, config, task, fabric)
    watch_set = _scored(job, watched, data, config, task, fabric)
    feeding = StepLoader(
        len(dataset),
        plan.images_per_step // plan.accumulate,
        dataset.load,
        job.columns,
        seed=config.seed,
        workers=worker_count(config.workers),
        rank=fabric.global_rank,
        world=fabric.world_size,
    )
    batch = max(1, min(16, plan.images_per_step // fabric.world_size))
    task.set_data(feeding, watch_set, split, fabric, batch)
    used = {"train": dataset, split: watch_set}
    _note_used(run, data, used)
    if config.compile is True:
        task.pyramid.compile(dynamic=True)
    outcome = fit(task, plan, run, fabric)
    final = _scored(job, unseen, data, config, task, fabric) if unseen is not None else watch_set
    scored_on = "test" if unseen is not None else split
    _note_used(run, data, used | {scored_on: final})
    return _finish(config, job, data, run, fabric, task, outcome, final, scored_on, decisions)


def _note_used(run: RunFolder, data: Any, parts: dict[str, Any]) -> None:
    """Keep what was said of the data, how many images each part has, and which were no pictures or cut short."""
    short = [SkippedFile(name, *entry) for name, part in parts.items() for entry in part.pictures.bad]
    used = {name: len(part) - len(part.pictures.faults) for name, part in parts.items()}
    under_way = ["train"] if not parts["train"].pictures.keeps else []
    write_data_usage(run, data.notes, used, [*data.bad, *short], under_way)


def _listed(paths: list[Path]) -> FileExamples:
    """Files as ``setup.record`` wants to know them: by their names, wherever the folder lies."""
    files = FileExamples([str(path) for path in paths], None)
    files.keys = [path.name for path in paths]
    return files


def choose_splits(
    splits: dict[str, list[Any]], where: str, mode: str
) -> tuple[list[Any], list[Any], str, list[Any] | None]:
    """Training images, those watched while training, which split these are, and those nobody looks at till the end.

    mode: how the splits were made (see --split)
    """
    if not splits.get("train"):
        raise UserError(f"{where} has no training images: found only {', '.join(splits) or 'nothing'}.")
    if splits.get("val"):
        return splits["train"], splits["val"], "val", splits.get("test") or None
    if splits.get("test"):
        return splits["train"], splits["test"], "test", None  # watched only: they choose nothing
    if mode in ("auto", "remake"):
        raise UserError(f"{where} has one image: two are needed at least, one to learn from and one to score on.")
    raise UserError(
        f"There is nothing to score on in {where}: no val, no test. Use --split auto, which holds out a part of train."
    )


def make_backbone(config: TransferConfig, facts: Facts, decisions: AutoValues) -> Backbone:
    """The backbone with its weights; a pre-trained folder says itself which network it is and how it was cut."""
    keywords: dict[str, Any] = {} if config.drop_path == "auto" else {"drop_path": config.drop_path}
    adopt_init_architecture(config, decisions, with_size=False)
    decide_input(config, facts, decisions)
    backbone = create_backbone(
        config.backbone,
        img_size=short_side(config),
        pretrained=config.pretrained and builders.starts_from_init(config),
        **network_keywords(config) | keywords,
    )
    return builders.load_initial_weights(backbone, config)


def _learned(job: DenseJob, items: list[Any], data: Any, config: TransferConfig, task: Any, fabric: Fabric) -> Any:
    """The images to learn from, decoded where they are kept; others stand in for the unreadable ones.

    Those that are not kept are not decoded twice: which cannot be shows in their turn, and their order is all images'
    wherever they are kept.
    """
    pictures = open_pictures(items, config.cache.where, fabric.device)
    bad = pictures.find_bad(worker_count(config.workers), config.cache.max_bad)
    builders.check_same_images(fabric, len(items) - len(bad), len(items), config)
    return job.dataset(items, data, pictures, task)


def _scored(job: DenseJob, items: list[Any], data: Any, config: TransferConfig, task: Any, fabric: Fabric) -> Any:
    """The images to score on; the unreadable ones named and left out, with what is marked in them."""
    whole, pictures = readable(items, config.cache.max_bad, config.workers, config.cache.where, fabric.device)
    builders.check_same_images(fabric, len(whole), len(items), config)
    return job.dataset(whole, data, pictures, task)


def readable(
    items: list[Any],
    max_bad: float = 1.0,
    workers: int | str = "auto",
    where: str = "auto",
    device: torch.device | None = None,
) -> tuple[list[Any], ImageReader]:
    """The items whose pictures can be read, and these; the others are named, and too many of them an error.

    All are decoded for it: a score must not depend on whether there is memory to keep them.
    """
    pictures = open_pictures(items, where, device)
    bad = set(pictures.find_bad(worker_count(workers), max_bad, decode=True))
    return [item for place, item in enumerate(items) if place not in bad], pictures.without_bad()


def open_pictures(items: list[Any], where: str = "auto", device: torch.device | None = None) -> ImageReader:
    sizes = [(item.height, item.width) for item in items]
    return ImageReader(
        [item.path for item in items], sizes, where=where, device=None if device is None else str(device)
    )


def make_plan(config: Any, images: int, world: int, job: DenseJob) -> TrainPlan:
    """The run in steps."""
    plan = TrainPlan.from_config(config, images, world)
    every = config.evaluate_every
    if every == "auto":
        every = max(plan.steps_per_epoch, -(-plan.steps // 10))
    return replace(plan, lr=job.schedule(config, plan.steps), evaluate_every=every)


def warmup_of(config: Any, steps: int) -> int:
    return min(config.optimizer.warmup, steps // 5)


def _finish(
    config: Any,
    job: DenseJob,
    data: Any,
    run: RunFolder,
    fabric: Fabric,
    task: Any,
    outcome: dict[str, Any],
    final: Any,
    scored_on: str,
    decisions: AutoValues,
) -> CommandResult:
    """Score the best weights on the images nobody looked at, and leave everything a person needs in the folder."""
    from frugalvit.tasks.dense.checkpoint import save_trained

    best = run_on_rank_zero(
        fabric, run.load_best
    )  # the first process wrote them: others may not see them yet, or never
    if best is not None and best["step"] != outcome["steps"]:
        task.load_state_dict(best["task"])
        task.seen = None
    with collective_timeout(fabric, config.peer_timeout):
        scores = job.score(task, final, run.folder if run.writer else None)
    summary: dict[str, Any] = {"run": str(run.folder), "task": job.verb, **scores}
    summary |= {
        "scored_on": scored_on,
        "scored_images": len(final),
        f"val_{task.best_metric}": finite(outcome["best"]),
        **kept_weights(outcome, task.eval_split),
        **run_facts(config, outcome, task.net),
    }
    if run.writer:
        meta = {"data": data.name, "task": job.verb, "recipe": config.recipe}
        save_model_folder(task.backbone, run.folder / "model", meta=meta)
        save_trained(run.folder, task, {"kind": job.verb, **job.facts(config, data, task)})
        more = {"classes": list(data.classes), "auto": [vars(decision) for decision in decisions]}
        _track(run, summary, decisions)
        run.save_json("summary.json", summary | more)
        if config.report:
            from frugalvit.report.page import write_report

            write_report([run.folder], run.folder / "report.html")
    return job.result(summary)


def _track(run: RunFolder, summary: dict[str, Any], decisions: AutoValues) -> None:
    """Tables and pictures for the trackers, from what was written for the report."""
    run.table("summary", summary_table(summary))
    run.table("decisions", decisions_table(decisions))
    material = run.read_json("transfer_report.json")
    run.table("per_class", Table(**material["per_class"], title="Each class"))
    for picture in sorted((run.folder / "pictures").iterdir()):
        run.picture(f"pictures/{picture.stem}", picture)
