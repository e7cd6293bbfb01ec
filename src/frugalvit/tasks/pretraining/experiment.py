"""LabelFreeExperiment: what pre-training and distillation share, from images without labels to a scored backbone."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_folder import load_model_folder, save_model_folder
from frugalvit.config.pretrain import LabelFreeConfig
from frugalvit.config.resolved import ResolvedLabelFreeConfig
from frugalvit.data.augmentation.transforms import Augment
from frugalvit.data.dataset import DatasetSplits, ImageDataset, join
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.defaults import Facts
from frugalvit.experiment.experiment import Experiment
from frugalvit.experiment.summary import augmentation_sheet, finite, run_facts, run_result, save_pictures
from frugalvit.runs import layout
from frugalvit.runs.data_record import record_data_usage
from frugalvit.tasks.pretraining.collapse import FeatureMonitor, Health, health_table
from frugalvit.tasks.pretraining.task import FeatureTask
from frugalvit.utils import console
from frugalvit.utils.scores import read_scores
from frugalvit.utils.tables import CommandResult, Table

C = TypeVar("C", bound=LabelFreeConfig)
R = TypeVar("R", bound=ResolvedLabelFreeConfig)

SAMPLE = "sample"
"""The split name in metrics for evaluation images that are also trained on."""
_TRAINED = {"train": ("train",), "train+val": ("train", "val"), "all": ("train", "val", "test")}
"""The splits that each value of --images trains on."""


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
        torch.manual_seed(options.seed)
        return make_network(options)

    def training_files(self) -> tuple[ImageDataset, Sequence[str], None]:
        return self.images, self.data.classes or (), None

    def set_data(self, augment: Augment, health: Health) -> None:
        """Pass the batches, the monitor of the features and the health checks to the task."""
        config, student = self.config, self.backbone
        batches = builders.make_batches(self.images, student.img_size, self.plan, config, self.fabric, augment=augment)
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
        health = health_table(self.health.verdict(), _last_values(run.metrics()), self.health.raised.values())
        run.table("health", health)
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


def make_network(config: LabelFreeConfig, **keywords: Any) -> Backbone:
    """Build the student of a run."""
    keywords |= {} if config.drop_path == "auto" else {"drop_path": config.drop_path}
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
    split, queries = _query_split(source), None
    if split is not None:
        queries = builders.eval_set(_sample(source.splits[split], config.health.images), backbone, config, fabric)
    monitor = FeatureMonitor(
        builders.eval_set(gallery, backbone, config, fabric), queries, len(source.classes or ()), fabric
    )
    return monitor, SAMPLE if split is None or split in _TRAINED[config.images] else split


def _query_split(source: DatasetSplits) -> str | None:
    """Return the split of the k-NN queries: val, else test; never the gallery's."""
    others = [split for split in ("val", "test") if split != _first_split(source) and source.splits.get(split)]
    return others[0] if others and source.classes else None


def _first_split(source: DatasetSplits) -> str:
    """Return train, or the first split if there is no train."""
    return "train" if "train" in source.splits else next(iter(source.splits))


def _sample(examples: ImageDataset, count: int) -> ImageDataset:
    if len(examples) <= count:
        return examples
    return examples.subset(np.sort(np.random.default_rng(0).permutation(len(examples))[:count]))


def _last_values(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the newest value of every metric."""
    values: dict[str, float | None] = {}
    for line in lines:
        values |= {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "epoch", "lr")}
    return values
