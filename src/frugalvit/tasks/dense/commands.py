"""What the commands of detection and segmentation share: train, eval, predict."""

import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import DetectEvalConfig, SegmentEvalConfig, TransferConfig
from frugalvit.config.resolved import ResolvedTransferConfig
from frugalvit.config.train import same_value
from frugalvit.config.yaml import read_yaml
from frugalvit.data.dataset import FileExamples
from frugalvit.engine.distributed import collective_timeout
from frugalvit.engine.loop import TrainPlan
from frugalvit.engine.schedules import Schedule
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.experiment import Experiment
from frugalvit.experiment.resolve_dense import resolve_dense_input
from frugalvit.experiment.summary import describe_weights, finite, run_facts, run_result
from frugalvit.runs import layout
from frugalvit.runs.data_record import record_data_usage
from frugalvit.tasks.dense.checkpoint import save_trained
from frugalvit.tasks.dense.loader import ImageReader, StepLoader, worker_count
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, write_text
from frugalvit.utils.scores import read_scores, score_table
from frugalvit.utils.tables import CommandResult, Table, to_json

LEARN_MORE = "Train longer (--epochs), raise --lr, or start from trained weights (--pretrained, --init)"
_SHOWN_CLASSES = 20

C = TypeVar("C", bound=TransferConfig)
R = TypeVar("R", bound=ResolvedTransferConfig)
E = TypeVar("E", DetectEvalConfig, SegmentEvalConfig)


class DenseExperiment(Experiment[C, R]):
    """A detection or segmentation run."""

    kind: ClassVar[str]  # "detect" or "segment"
    columns: ClassVar[int]  # random numbers per image and step
    files = layout.DENSE_FILES
    init_sets_size = False
    items: list[Any]  # to train on
    eval_items: list[Any]
    eval_split: str
    unseen: list[Any] | None  # test, if there is also val

    # -- functions of each task, defined above its experiment

    open_annotations: Callable[[Any], Any]  # options -> data
    make_task: Callable[[Any, Any, Backbone], DenseTask]  # config, data, backbone -> task
    make_schedule: Callable[[Any, int], Schedule]  # config, steps -> learning rate
    score_task: Callable[[Any, Any, Path | None], dict[str, Any]]  # see ``evaluate_model``

    @abstractmethod
    def model_facts(self) -> dict[str, Any]:
        """Return what is needed to build the model again."""

    # -- what all dense tasks share

    def open_data(self, fabric: Fabric | None) -> Any:
        data, options = self.open_annotations(self.options), self.options
        chosen = builders.choose_splits(data.splits, options.data)
        self.items, self.eval_items, self.eval_split, self.unseen = chosen
        return data

    def facts(self) -> Facts:
        side = int(statistics.median(min(item.height, item.width) for item in self.items))
        facts = Facts(len(self.items), len(self.data.classes), side, self.fabric.device.type)
        return replace(facts, tested=self.unseen is not None)

    def resolve_input(self, options: C, facts: Facts) -> C:
        return resolve_dense_input(options, facts, self.auto_values)

    def build_backbone(self, options: C) -> Backbone:
        pretrained = options.pretrained and builders.needs_initial_weights(options)
        return builders.make_backbone(options, 0, pretrained=pretrained)

    def build_plan(self) -> TrainPlan:
        plan = TrainPlan.from_config(self.config, len(self.items), self.fabric.world_size)
        return replace(plan, lr=self.make_schedule(self.config, plan.steps), evaluate_every=self.config.evaluate_every)

    def build_task(self) -> DenseTask:
        return self.make_task(self.config, self.data, self.backbone)

    def training_files(self) -> tuple[FileExamples, Sequence[str], str]:
        annotations = list(dict.fromkeys(item.truth for item in self.items))
        truth = _list_files(annotations).fingerprint(times=False)
        return _list_files([item.path for item in self.items]), self.data.classes, truth

    def evaluation_files(self) -> dict[str, FileExamples]:
        parts = {split: items for split, items in self.data.splits.items() if split != "train"}
        return {
            split: _list_files(list(dict.fromkeys(path for item in items for path in (item.path, item.truth))))
            for split, items in parts.items()
        }

    def build_batches(self) -> None:
        config, task, plan, fabric = self.config, self.task, self.plan, self.fabric
        task.to(fabric.device)
        dataset = self._open_training_set()
        self.eval_set = self._open_eval_set(self.eval_items)
        loader = StepLoader(
            len(dataset),
            plan.images_per_step // plan.accumulate,
            dataset.load,
            self.columns,
            seed=config.seed,
            workers=worker_count(config.workers),
            rank=fabric.global_rank,
            world=fabric.world_size,
        )
        batch = max(1, min(16, plan.images_per_step // fabric.world_size))
        task.set_data(loader, self.eval_set, self.eval_split, fabric, batch)
        self.used = {"train": dataset, self.eval_split: self.eval_set}
        self._record_usage()

    def _open_training_set(self) -> Any:
        """Open the images to train on. Uncached ones are not decoded yet: their order never depends on the cache."""
        config, items = self.config, self.items
        pictures = open_pictures(items, config.cache.location, self.fabric.device)
        bad = pictures.find_bad(worker_count(config.workers), config.cache.max_bad)
        builders.check_same_images(self.fabric, len(items) - len(bad), len(items), config)
        return self.task.make_dataset(items, self.data, pictures)

    def _open_eval_set(self, items: list[Any]) -> Any:
        """Open the images to score on; warn of unreadable ones and leave them out."""
        config, pictures = self.config, open_pictures(items, self.config.cache.location, self.fabric.device)
        intact = pictures.drop_bad(items, worker_count(config.workers), config.cache.max_bad)
        builders.check_same_images(self.fabric, len(intact), len(items), config)
        return self.task.make_dataset(intact, self.data, pictures)

    def _record_usage(self) -> None:
        parts = {name: part.pictures for name, part in self.used.items()}
        record_data_usage(self.run_folder, self.data.notes, parts, self.data.bad)

    def compile_task(self) -> None:
        if self.config.compile is True:
            self.task.compile_with(graphs=False)

    def score(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Score the best weights on test; without it, on the images of the evaluations."""
        final = self.eval_set if self.unseen is None else self._open_eval_set(self.unseen)
        scored_on = self.eval_split if self.unseen is None else "test"
        self.used |= {scored_on: final}
        self._record_usage()
        run, task = self.run_folder, self.task
        if self.load_best(outcome, self.config.weights):
            task.last_evaluation = None
        with collective_timeout(self.fabric, self.config.peer_timeout):
            scores = self.score_task(task, final, run.folder if run.writer else None)
        for alarm in scores["alarms"]:
            console.warning(alarm)
        return {
            "run": str(run.folder),
            "task": self.kind,
            **scores,
            "scored_on": scored_on,
            "scored_images": len(final),
            f"val_{task.best_metric}": finite(outcome["best"]),
            **describe_weights(outcome, task.eval_split, self.config.weights),
            **run_facts(self.config, outcome, task.net),
        }

    def save_results(self, summary: dict[str, Any]) -> dict[str, Any]:
        run = self.run_folder
        meta = {"data": self.data.name, "task": self.kind, "recipe": self.config.recipe}
        save_model_folder(self.task.backbone, run.path(layout.MODEL), meta=meta)
        save_trained(run.folder, self.task, {"kind": self.kind, **self.model_facts()})
        material = run.read_json(layout.DENSE_REPORT)
        run.table("per_class", Table(**material["per_class"], title="Each class"))
        for picture in sorted(run.path(layout.PICTURES).iterdir()):
            run.picture(f"{layout.PICTURES}/{picture.stem}", picture)
        return {"classes": list(self.data.classes)}

    def result(self, summary: dict[str, Any]) -> CommandResult:
        tables = make_tables(summary)
        commands = [f"frugalvit {self.kind} predict {console.shell_quote(summary['run'])} IMAGE…"]
        notes = [f"{'alarm':<12}{alarm}" for alarm in summary.get("alarms", ())]
        return replace(run_result(summary, tables[0], commands, notes), tables=tables)


def make_tables(summary: dict[str, Any]) -> list[Table]:
    """Return the scores, and those of each class in per cent, worst first."""
    scores, per_class = read_scores(summary), summary.get("per_class") or {"rows": []}
    tables = [score_table(scores, title="" if scores else "no objects to score on")]
    shown = per_class["rows"][:_SHOWN_CLASSES]
    rows: list[Any] = [[f"{100 * cell:.1f} %" if isinstance(cell, float) else cell for cell in row] for row in shown]
    if len(rows) > 1:
        title = f"each class, worst first ({len(rows)} of {len(per_class['rows'])})"
        tables.append(Table(per_class["columns"], rows, title))
    return tables


def save_material(folder: Path, **material: Any) -> None:
    write_text(folder / layout.DENSE_REPORT, to_json(material, indent=1))


def _list_files(paths: list[Path]) -> FileExamples:
    """Return files as images whose fingerprint depends on their names, not on the folder."""
    files = FileExamples([str(path) for path in paths], None)
    files.keys = [path.name for path in paths]
    return files


def open_pictures(items: list[Any], where: str = "auto", device: torch.device | None = None) -> ImageReader:
    sizes = [(item.height, item.width) for item in items]
    return ImageReader([item.path for item in items], sizes, where=where, device=device)


# -- eval and predict


def evaluate_model(
    config: E,
    open_model: Callable[[E], tuple[DenseTask, Any, str]],
    score: Callable[[Any, Any, Path | None], dict[str, Any]],
) -> CommandResult:
    """Score a trained model on a split; with --out write pictures and the table of classes.

    open_model: returns the task, the data with one split, and the name of what is scored
    score:      task, dataset, folder -> scores; it writes the material of the report into the folder
    """
    start = time.monotonic()
    folder = None if config.out is None else make_folder(check_empty_folder(config.out))
    task, data, scored_on = open_model(config)
    if config.split == "train" and same_data(config.model, config.data):
        console.warning(f"{config.model} learned from these images (train): its scores on new images will be lower")
    for note in data.notes:
        console.info(note)
    (split,) = data.splits.values()
    pictures = open_pictures(split)
    items = pictures.drop_bad(split, worker_count("auto"), 1.0)
    scores = score(task, task.make_dataset(items, data, pictures), folder)
    task.refuse_nonfinite(config.model)
    seconds = round(time.monotonic() - start, 2)
    details = {"scored_on": scored_on, "scored_images": len(items), "seconds": seconds}
    summary = {"run": config.model, **scores, **details}
    notes = [f"{'alarm':<12}{alarm}" for alarm in scores["alarms"]]
    notes += [f"{'pictures':<12}{folder}/{layout.PICTURES}"] if folder else []
    return CommandResult(summary, make_tables(summary), notes)


def splitting_of(model: str, data: str) -> dict[str, Any]:
    """Return how the run split this data, so that eval scores the val that training made; else the stored splits."""
    if not same_data(model, data):
        return {"split": "given"}
    run = read_yaml(Path(model) / layout.CONFIG)
    return {"split": run["split"], "val_fraction": run["val_fraction"]}


def same_data(model: str, data: str) -> bool:
    file = Path(model) / layout.CONFIG
    return file.is_file() and same_value("data", str(read_yaml(file).get("data")), data)


def unique_names(paths: list[Path]) -> list[str]:
    """Return a unique name for every file: its stem, with a number if two files have the same."""
    stems = [path.stem for path in paths]
    is_unique = len(set(stems)) == len(stems)
    return stems if is_unique else [f"{stem}_{number}" for number, stem in enumerate(stems, 1)]


def check_empty_folder(out: str) -> Path:
    """Return the folder if it is empty: earlier results, or the images themselves, are never overwritten."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists and is not empty. Choose another folder with --out.")
    return folder
