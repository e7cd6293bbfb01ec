"""Metrics where people already watch them: TensorBoard always; W&B, MLflow, Trackio by option (files are the truth).

A tracker takes numbers (``log``), pictures (``image``) and tables (``table``), each with the step it belongs to. The
run's identity at a service is kept in ``RUN/trackers.json``, so that a resumed run goes on in the same place there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from frugalvit.config.base import flatten
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils import console
from frugalvit.utils.files import read_json, write_text
from frugalvit.utils.tables import Table, as_markdown, markdown_text

PROJECT = "frugalvit"
_SEED = re.compile(r"seed_\d+")


class Tracker(Protocol):
    """Where numbers, pictures and tables of a run go."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of one step; ``split`` ("train", "val") becomes the first part of their names."""
        ...

    def image(self, step: int, name: str, path: Path) -> None: ...

    def table(self, step: int, name: str, table: Table) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder. What a resumed run will write again, from step ``purge`` on, is forgotten first."""

    def __init__(self, folder: Path, purge: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, path: Path) -> None:
        """The file as it is: ``add_image`` would encode it anew, a quarter of a second for every picture."""
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        with Image.open(path) as picture:
            (width, height), bands = picture.size, len(picture.getbands())
        shown = Summary.Image(height=height, width=width, colorspace=bands, encoded_image_string=path.read_bytes())
        events = self.writer.file_writer
        assert events is not None, "the writer is closed"
        events.add_summary(Summary(value=[Summary.Value(tag=name, image=shown)]), step)

    def table(self, step: int, name: str, table: Table) -> None:
        self.writer.add_text(name, markdown(table), step)  # TensorBoard shows text as Markdown

    def close(self) -> None:
        self.writer.close()


def shown_name(folder: Path) -> str:
    """A run's name at a service; that of a comparison's run, ``seed_0``, says nothing without its setting."""
    return f"{folder.resolve().parent.name}-{folder.name}" if _SEED.fullmatch(folder.name) else folder.name


class _WandB:
    """Weights & Biases. ``WANDB_MODE=offline`` keeps everything in the run folder."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.service = library
        self.run = library.init(
            project=PROJECT, name=shown_name(folder), dir=str(folder), config=dict(config), id=identity, resume="allow"
        )
        self.identity = str(self.run.id)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(numbers(values), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self.run.log({name: self.service.Image(str(path))}, step=step)

    def table(self, step: int, name: str, table: Table) -> None:
        rows = [row_of(row) for row in table.rows]
        self.run.log({name: self.service.Table(columns=table.columns, data=rows, allow_mixed_types=True)}, step=step)

    def close(self) -> None:
        self.run.finish()


class _MLflow:
    """MLflow, at ``MLFLOW_TRACKING_URI``, or where it keeps things by itself."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.client = library.MlflowClient()
        if identity is not None:
            self.identity = identity
            self.client.update_run(identity, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(PROJECT)
        where = experiment.experiment_id if experiment else self.client.create_experiment(PROJECT)
        self.identity = self.client.create_run(where, run_name=shown_name(folder)).info.run_id
        for name, value in flatten(config).items():
            self.client.log_param(self.identity, name, str(value)[:500])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(values).items():
            self.client.log_metric(self.identity, name, value, step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self.client.log_artifact(self.identity, str(path), artifact_path=name)

    def table(self, step: int, name: str, table: Table) -> None:
        rows = [row_of(row) for row in table.rows]
        columns = {column: [row[place] for row in rows] for place, column in enumerate(table.columns)}
        self.client.log_table(self.identity, columns, f"{name}.json")

    def close(self) -> None:
        self.client.set_terminated(self.identity)


class _Trackio:
    """Trackio, local unless its own environment variables say otherwise."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.service = library
        # The name is all that tells runs apart there, and folders in many places have the same.
        self.identity = identity or f"{shown_name(folder)}-{secrets.token_hex(3)}"
        how = "allow" if identity else "never"
        self.run = library.init(project=PROJECT, name=self.identity, config=dict(config), resume=how)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(numbers(values), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self.run.log({name: self.service.Image(str(path))}, step=step)

    def table(self, step: int, name: str, table: Table) -> None:
        # As dicts: releases before 0.20 leave the names of the columns out when they are given apart.
        rows = [dict(zip(table.columns, row_of(row), strict=True)) for row in table.rows]
        self.run.log({name: self.service.Table(data=rows)}, step=step)

    def close(self) -> None:
        self.service.finish()  # not run.finish(): the library would finish it once more at exit, and say so


# What to try when a service does not start.
TRACKERS: dict[str, tuple[type, str]] = {
    "wandb": (_WandB, "Log in with 'wandb login', or set WANDB_MODE=offline."),
    "mlflow": (
        _MLflow,
        "Set MLFLOW_TRACKING_URI to your server, or install all of it for a local one: pip install mlflow",
    ),
    "trackio": (_Trackio, "Try 'trackio show' to see whether it works here."),
}


class Trackers:
    """Several trackers as one. One that fails is said and left out: a service that is down must not end a run."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self.trackers = dict(trackers)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def image(self, step: int, name: str, path: Path) -> None:
        self._each(lambda tracker: tracker.image(step, name, path))

    def table(self, step: int, name: str, table: Table) -> None:
        self._each(lambda tracker: tracker.table(step, name, table))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self.trackers = {}

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                with _results_kept_clean():
                    act(tracker)
            except Exception as error:
                del self.trackers[name]
                console.warning(
                    f"{name} gets nothing more of this run ({_reason(error)}); metrics.jsonl has everything"
                )


def make_trackers(names: Iterable[str], run_folder: Path, config: Mapping[str, Any]) -> Trackers:
    """A tracker for every name; a wrong name or a library that is not installed is said before anything is trained."""
    wanted = list(dict.fromkeys(names))
    libraries = {name: _library(name) for name in wanted}
    file = run_folder / "trackers.json"
    known: dict[str, str] = read_json(file, dict) or {}
    trackers: dict[str, Tracker] = {}
    for name in wanted:
        kind, hint = TRACKERS[name]
        try:
            with _results_kept_clean():
                tracker = kind(libraries[name], run_folder, config, known.get(name))
        except Exception as error:
            raise UserError(f"{name} cannot be started ({_reason(error)}). {hint}") from error
        known[name] = tracker.identity
        trackers[name] = tracker
    if wanted:
        write_text(file, json.dumps(known, indent=1))
    return Trackers(trackers)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _results_kept_clean() -> contextlib.redirect_stdout[Any]:
    """Trackio talks on standard output, which belongs to results."""
    return contextlib.redirect_stdout(sys.stderr)


def check_trackers(names: Iterable[str]) -> None:
    """Raise for a wrong name or a missing library, without starting anything: for the first second of a command."""
    for name in names:
        _library(name, load=False)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """``{"split": "val", "top1": 71.2}`` -> ``{"val/top1": 71.2}``: what can be drawn as a curve."""
    split = values.get("split", "train")
    return {
        f"{split}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def row_of(row: Iterable[object]) -> list[str | int | float | bool | None]:
    """Cells as every service takes them: plain numbers and words, nothing where a number is not one."""
    return [_cell(value) for value in row]


def _cell(value: object) -> str | int | float | bool | None:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)


def markdown(table: Table) -> str:
    """A table in Markdown, under its title."""
    title = f"**{markdown_text(table.title)}**\n\n" if table.title else ""
    return title + as_markdown(table.columns, table.rows)


def _library(name: str, load: bool = True) -> Any:
    if name not in TRACKERS:
        raise UserError(f"There is no tracker '{name}': choose {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}")
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f'Tracking with {name} needs a package that is not installed: pip install "frugalvit[tracking]"'
        )
    return importlib.import_module(name) if load else None
