"""Experiment: one training command, from its options to a finished run folder."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone
from frugalvit.config.defaults import Facts
from frugalvit.config.resolved import ResolvedRunConfig
from frugalvit.config.train import RunConfig
from frugalvit.data.dataset import ImageDataset
from frugalvit.engine import distributed
from frugalvit.engine.auto_batch import fit_to_memory
from frugalvit.engine.compile import compile_task
from frugalvit.engine.loop import RunInterrupted, TrainPlan, fit
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.extra_objectives import load_plugins
from frugalvit.experiment.load_model import adopt_init_architecture, find_init
from frugalvit.experiment.resolve import AutoValues, add_backbone_facts, record_recipe, resolve_input
from frugalvit.report.html import write_report
from frugalvit.runs import layout, resume
from frugalvit.runs.run_folder import RunFolder, finished_summary
from frugalvit.runs.trackers import check_trackers
from frugalvit.utils import console, launch_env
from frugalvit.utils.tables import CommandResult, Table, as_text

C = TypeVar("C", bound=RunConfig)
R = TypeVar("R", bound=ResolvedRunConfig)


class Experiment(ABC, Generic[C, R]):
    """A training command; subclasses define the abstract methods. ``run`` calls, in this order:

    open_data, resolve, build_task, build_batches, fit, score, save, report.
    """

    command: ClassVar[str]  # what the user types after ``frugalvit``
    files: ClassVar[Sequence[str]] = layout.RUN_FILES  # what the run writes
    init_sets_size: ClassVar[bool] = True  # whether --init also sets the input size
    config: R  # the resolved options; set by ``resolve``
    data: Any
    task: Any
    fabric: Fabric
    run_folder: RunFolder
    backbone: Backbone
    plan: TrainPlan

    def __init__(self, options: C) -> None:
        self.options = options
        self.auto_values = AutoValues()

    # -- the steps of a command

    @abstractmethod
    def open_data(self, fabric: Fabric | None) -> Any:
        """Open the data of ``self.options`` (with ``name`` and ``notes``); raise if training on it is impossible."""

    @abstractmethod
    def facts(self) -> Facts:
        """Return what the rules for "auto" need to know about the data."""

    def resolve_input(self, options: C, facts: Facts) -> C:
        """Resolve what the backbone and a stream need: name, input size, readers."""
        options = resolve_input(options, facts, self.auto_values)
        images = self.training_files()[0]
        options = builders.resolve_pixels(options, images, self.auto_values)
        return builders.resolve_readers(options, images, self.fabric, self.auto_values)

    @abstractmethod
    def build_backbone(self, options: C) -> Backbone:
        """Build the backbone with its initial weights."""

    @abstractmethod
    def resolve_values(self, options: C, facts: Facts) -> R:
        """Resolve all other values; ``facts`` now include those of the backbone."""

    @abstractmethod
    def build_plan(self) -> TrainPlan:
        """Build the schedule of the run, in steps."""

    @abstractmethod
    def training_files(self) -> tuple[ImageDataset, Sequence[str], str | None]:
        """Return training images, class names, and the fingerprint of annotation files or None."""

    def evaluation_files(self) -> Mapping[str, ImageDataset]:
        """Return the files that scores depend on, by split."""
        return {split: files for split, files in self.data.splits.items() if split != "train"}

    @abstractmethod
    def build_task(self) -> Any:
        """Build the task."""

    @abstractmethod
    def build_batches(self) -> None:
        """Build the batches and the evaluation images, and pass them to the task."""

    @abstractmethod
    def score(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Score the final weights; return the summary. ``outcome`` is what ``loop.fit`` returned."""

    @abstractmethod
    def save_results(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write model, tables and pictures; return what summary.json holds besides the summary."""

    def report_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of ``write_report``: model and images to show."""
        return {}

    @abstractmethod
    def result(self, summary: dict[str, Any]) -> CommandResult:
        """Return what the command prints about a finished run."""

    def compile_task(self) -> None:
        compile_task(self.task, self.config, self.plan, self.fabric)

    # -- what all commands share

    @builders.stores.shared()
    def run(self) -> CommandResult:
        """Run the command in a new folder, or resume a run. Show the result of a finished run."""
        requested = self.options
        if not (requested.data or requested.resume or getattr(requested, "continue_from", None)):
            raise UserError(
                f"There is no data to train on. Pass a folder of images: 'frugalvit {self.command} photos/'."
            )
        check_trackers(requested.track)
        load_plugins(requested.plugin)
        if requested.resume:
            self.options = resume.load_resumed_config(requested)
        else:
            if requested.init:
                find_init(requested.init)
            world = math.prod(launch_env.devices_and_nodes(requested.devices, requested.nodes))
            local = requested.data is not None and not any(sign in requested.data for sign in ":*{[")  # no pattern
            if world > 1 and local and not Path(str(requested.data)).exists():
                self._open_data(requested, None)  # fails before several processes start
        fabric = self.fabric = builders.make_fabric(self.options)
        distributed.check_same_resume(fabric, bool(requested.resume), requested.out)
        if requested.resume and (finished := finished_summary(requested.resume)):
            return self.result(finished)
        with distributed.fail_on_lost_rank(
            fabric, Path(requested.resume) if requested.resume else None, distributed.SETUP_TIMEOUT
        ):
            self.data = self._open_data(requested, fabric)
            created = layout.missing_parents(Path(requested.out)) if requested.out and not requested.resume else []
            label = self.command if requested.backbone == "auto" else requested.backbone.replace("/", "-")
            run = self.run_folder = builders.open_run(self.options, fabric, label, self.data.name, files=self.files)
            created = [run.folder] if not requested.out and not requested.resume else created
        try:
            with distributed.fail_on_lost_rank(fabric, run.folder, distributed.SETUP_TIMEOUT):
                distributed.check_shared_filesystem(fabric, run.folder)
                result = self._train()
                result.stop_requested = run.stop_requested
                return result
        except RunInterrupted as stop:
            counts = ((name, getattr(self.options, name)) for name in ("devices", "nodes"))
            options = "".join(f" --{name} {count}" for name, count in counts if count != 1)
            command = f"frugalvit {self.command} --resume {console.shell_quote(run.folder)}{options}"
            console.warning(f"{stop}: saved; resume with '{command}'")
            return CommandResult({"run": str(run.folder), "stopped": str(stop), "resume": command, "exit": 3})
        except UserError:
            run.close()
            if run.writer:
                layout.remove_empty_run(created)
            raise
        finally:
            run.close()

    def _train(self) -> CommandResult:
        self.resolve()
        self.log_values()
        images, classes, truth = self.training_files()
        builders.write_run_metadata(
            self.config, self.run_folder, self.auto_values, images, tuple(classes), self.backbone, truth,
            self.evaluation_files(),
        )  # fmt: skip
        builders.restore_threads(self.run_folder, self.fabric)
        console.info(f"run folder: {self.run_folder.folder}")
        builders.check_resumed_batch_size(self.config, self.plan, self.run_folder, self.fabric)
        self.task = self.build_task()
        self.build_batches()
        try:
            summary = self.score(self.fit())
            if self.run_folder.writer:
                self.save(summary)
                self.report()
        finally:
            if self.task.batches is not None:
                self.task.batches.close()  # the reader processes of a stream
        return self.result(summary)

    def resolve(self) -> None:
        """Resolve every "auto", once: sets ``config``, ``auto_values``, ``backbone`` and ``plan``."""
        facts = self.facts()
        record_recipe(self.options, self.auto_values)
        options = adopt_init_architecture(self.options, self.auto_values, with_size=self.init_sets_size)
        options = self.resolve_input(options, facts)
        torch.manual_seed(options.seed)
        self.backbone = self.build_backbone(options)
        self.config = self.resolve_values(options, add_backbone_facts(facts, self.backbone))
        self.plan = self.build_plan()

    def log_values(self) -> None:
        """Log the notes about the data and the values that "auto" chose."""
        for note in [*self.data.notes, "\n".join(self.auto_values.summarize())]:
            if note:
                console.info_once(note)

    def fit(self) -> dict[str, Any]:
        if self.config.auto_batch:
            self.plan = fit_to_memory(self.config, self.plan, self.task, self.run_folder, self.fabric)
        self.compile_task()
        return fit(self.task, self.plan, self.run_folder, self.fabric)

    def load_best(self, outcome: dict[str, Any], weights: str) -> bool:
        """Load the best weights, also if the last have non-finite outputs; False if the last or no weights are best."""
        if weights == "last" and not outcome["broken"]:
            return False
        # Rank 0 wrote the file; other ranks may not see it yet.
        best = distributed.run_on_rank_zero(self.fabric, self.run_folder.load_best)
        if best is None or best["step"] == outcome["steps"]:
            return False
        self.task.load_state_dict(best["task"])
        return True

    def save(self, summary: dict[str, Any]) -> None:
        """Write the results; summary.json last, because it marks the run as finished."""
        run = self.run_folder
        details = self.save_results(summary)
        numbers: list[list[object]] = [
            [name, as_text(value)] for name, value in summary.items() if isinstance(value, int | float | str)
        ]
        run.table("summary", Table(["result", "value"], numbers, "Result"))
        decisions: list[list[object]] = [[value.name, str(value.value), value.reason] for value in self.auto_values]
        run.table("decisions", Table(["option", "value", "reason"], decisions, 'What "auto" chose'))
        run.save_json(layout.SUMMARY, summary | details | {"auto": [vars(value) for value in self.auto_values]})

    def report(self) -> None:
        if self.config.report:
            run = self.run_folder
            write_report([run.folder], run.path(layout.REPORT), **self.report_inputs())

    def _open_data(self, requested: RunConfig, fabric: Fabric | None) -> Any:
        try:
            return self.open_data(fabric)
        except UserError as error:
            source_run = requested.resume or getattr(requested, "continue_from", None)
            if not source_run or requested.is_set("data"):
                raise
            raise type(error)(f"{error} If the data of {source_run} has moved, pass its new path.") from None
