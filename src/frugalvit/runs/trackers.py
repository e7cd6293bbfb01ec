"""Trackers: TensorBoard always; W&B, MLflow and Trackio with --track.

A tracker takes numbers (``log``), pictures (``image``) and tables (``table``), each with its step; ``split`` ("train",
"val") becomes the first part of a number's name. RUN/trackers.json stores the run's identity at each service, so that a
resumed run continues there.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.config.base import flatten
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.utils import console
from frugalvit.utils.files import read_json, write_text
from frugalvit.utils.tables import Table, as_markdown, markdown_text
from frugalvit.utils.text import short_message

PROJECT = "frugalvit"
_SEED = re.compile(r"seed_\d+")


class TensorBoard:
    """Event files in a folder. A resumed run purges the events from step ``purge`` on, and writes them again."""

    def __init__(self, folder: Path, purge: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, path: Path) -> None:
        from PIL import Image

        with Image.open(path) as picture:
            self.writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def table(self, step: int, name: str, table: Table) -> None:
        self.writer.add_text(name, markdown(table), step)  # TensorBoard shows text as Markdown

    def close(self) -> None:
        self.writer.close()


def run_name(folder: Path) -> str:
    """Return a run's name at a service. The name of a comparison's run (``seed_0``) includes its setting."""
    return f"{folder.resolve().parent.name}-{folder.name}" if _SEED.fullmatch(folder.name) else folder.name


class _LogRun:
    """A service whose run has ``log``: W&B and Trackio."""

    service: Any
    run: Any

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(numbers(values), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self.run.log({name: self.service.Image(str(path))}, step=step)


class _WandB(_LogRun):
    """Weights & Biases. ``WANDB_MODE=offline`` writes to the run folder only."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.service = library
        self.run = library.init(
            project=PROJECT, name=run_name(folder), dir=str(folder), config=dict(config), id=identity, resume="allow"
        )
        self.identity = str(self.run.id)

    def table(self, step: int, name: str, table: Table) -> None:
        shown = self.service.Table(columns=table.columns, data=table.rows, allow_mixed_types=True)
        self.run.log({name: shown}, step=step)

    def close(self) -> None:
        self.run.finish()


class _MLflow:
    """MLflow, at ``MLFLOW_TRACKING_URI`` or its default location."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.client = library.MlflowClient()
        if identity is not None:
            self.identity = identity
            self.client.update_run(identity, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(PROJECT)
        identifier = experiment.experiment_id if experiment else self.client.create_experiment(PROJECT)
        self.identity = self.client.create_run(identifier, run_name=run_name(folder)).info.run_id
        for name, value in flatten(config).items():
            self.client.log_param(self.identity, name, str(value)[:500])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(values).items():
            self.client.log_metric(self.identity, name, value, step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self.client.log_artifact(self.identity, str(path), artifact_path=name)

    def table(self, step: int, name: str, table: Table) -> None:
        columns = {column: [row[index] for row in table.rows] for index, column in enumerate(table.columns)}
        self.client.log_table(self.identity, columns, f"{name}.json")

    def close(self) -> None:
        self.client.set_terminated(self.identity)


class _Trackio(_LogRun):
    """Trackio, local by default."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.service = library
        # Trackio tells runs apart by name alone, and many folders have the same name.
        self.identity = identity or f"{run_name(folder)}-{secrets.token_hex(3)}"
        resume = "allow" if identity else "never"
        self.run = library.init(project=PROJECT, name=self.identity, config=dict(config), resume=resume)

    def table(self, step: int, name: str, table: Table) -> None:
        # As dicts: releases before 0.20 drop column names that are passed separately.
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        self.run.log({name: self.service.Table(data=rows)}, step=step)

    def close(self) -> None:
        self.service.finish()  # not run.finish(): the library would finish the run again at exit


# Each tracker, and what to try if its service does not start.
TRACKERS: dict[str, tuple[type, str]] = {
    "wandb": (_WandB, "Log in with 'wandb login', or set WANDB_MODE=offline."),
    "mlflow": (_MLflow, "Set MLFLOW_TRACKING_URI to your server, or run a local one: pip install mlflow"),
    "trackio": (_Trackio, "Check that 'trackio show' works."),
}


class Trackers:
    """Several trackers as one. A tracker that fails is dropped with a warning: it must not end a run."""

    def __init__(self, trackers: Mapping[str, Any]) -> None:
        self.trackers = dict(trackers)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._call("log", step, values)

    def image(self, step: int, name: str, path: Path) -> None:
        self._call("image", step, name, path)

    def table(self, step: int, name: str, table: Table) -> None:
        self._call("table", step, name, Table(table.columns, [row_of(row) for row in table.rows], table.title))

    def close(self) -> None:
        self._call("close")
        self.trackers = {}

    def _call(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                with contextlib.redirect_stdout(sys.stderr):  # standard output is for results: Trackio prints there
                    getattr(tracker, method)(*arguments)
            except Exception as error:
                del self.trackers[name]
                console.warning(
                    f"{name} is dropped for the rest of this run ({short_message(error)}); {layout.METRICS} has "
                    "everything"
                )


def make_trackers(names: Iterable[str], run_folder: Path, config: Mapping[str, Any]) -> Trackers:
    """Start a tracker for every name."""
    wanted = list(dict.fromkeys(names))
    file = run_folder / layout.TRACKERS
    identities: dict[str, str] = read_json(file, dict) or {}
    trackers: dict[str, Any] = {}
    for name in wanted:
        kind, hint = TRACKERS[name]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                tracker = kind(importlib.import_module(name), run_folder, config, identities.get(name))
        except Exception as error:
            raise UserError(f"--track {name} failed to start ({short_message(error)}). {hint}") from error
        identities[name] = tracker.identity
        trackers[name] = tracker
    if wanted:
        write_text(file, json.dumps(identities, indent=1))
    return Trackers(trackers)


def check_trackers(names: Iterable[str]) -> None:
    """Raise for a missing library, without starting anything."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f'--track {name} needs a package that is not installed: pip install "frugalvit[tracking]"')


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values to plot: ``{"split": "val", "top1": 71.2}`` -> ``{"val/top1": 71.2}``."""
    split = values.get("split", "train")
    return {
        f"{split}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def row_of(row: Iterable[object]) -> list[object]:
    """Return cells that every service takes: numbers and text, None for non-finite numbers."""
    finite = (None if isinstance(value, float) and not math.isfinite(value) else value for value in row)
    return [value if value is None or isinstance(value, int | float | str) else str(value) for value in finite]


def markdown(table: Table) -> str:
    title = f"**{markdown_text(table.title)}**\n\n" if table.title else ""
    return title + as_markdown(table.columns, table.rows)
