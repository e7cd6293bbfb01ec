"""Metrics where people already watch them: W&B, MLflow, Trackio beside the run folder (metrics.jsonl is the truth).

A tracker has three methods: ``log(step, values)``, ``image(name, path)`` and ``close()``. The run's identity at the
service is kept in ``RUN/trackers.json``, so that a resumed run goes on in the same place there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from frugalvit import console
from frugalvit.errors import UserError, nearest
from frugalvit.files import write_text

PROJECT = "frugalvit"


class Tracker(Protocol):
    """Where numbers and pictures of a run go."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of one step; ``split`` ("train", "val") becomes the first part of their names."""
        ...

    def image(self, name: str, path: Path) -> None: ...

    def close(self) -> None: ...


class _WandB:
    """Weights & Biases. ``WANDB_MODE=offline`` keeps everything in the run folder."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.service = library
        self.run = library.init(
            project=PROJECT, name=folder.name, dir=str(folder), config=dict(config), id=identity, resume="allow"
        )
        self.identity = str(self.run.id)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(numbers(values), step=step)

    def image(self, name: str, path: Path) -> None:
        self.run.log({name: self.service.Image(str(path))})

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
        self.identity = self.client.create_run(where, run_name=folder.name).info.run_id
        for name, value in flat(config).items():
            self.client.log_param(self.identity, name, str(value)[:500])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(values).items():
            self.client.log_metric(self.identity, name, value, step=step)

    def image(self, name: str, path: Path) -> None:
        self.client.log_artifact(self.identity, str(path), artifact_path=name)

    def close(self) -> None:
        self.client.set_terminated(self.identity)


class _Trackio:
    """Trackio, local unless its own environment variables say otherwise."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], identity: str | None) -> None:
        self.service = library
        self.identity = identity or folder.name
        self.run = library.init(project=PROJECT, name=self.identity, config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(numbers(values), step=step)

    def image(self, name: str, path: Path) -> None:
        self.run.log({name: self.service.Image(str(path))})

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

    def image(self, name: str, path: Path) -> None:
        self._each(lambda tracker: tracker.image(name, path))

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
                console.warn(f"{name} gets nothing more of this run ({_reason(error)}); metrics.jsonl has everything")


def make_trackers(names: Iterable[str], run_folder: Path, config: Mapping[str, Any]) -> Trackers:
    """A tracker for every name; a wrong name or a library that is not installed is said before anything is trained."""
    wanted = list(dict.fromkeys(names))
    libraries = {name: _library(name) for name in wanted}
    file = run_folder / "trackers.json"
    known: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
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


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _library(name: str, load: bool = True) -> Any:
    if name not in TRACKERS:
        raise UserError(f"There is no tracker '{name}': choose {', '.join(TRACKERS)}.{nearest(name, TRACKERS)}")
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f'Tracking with {name} needs a package that is not installed: pip install "frugalvit[tracking]"'
        )
    return importlib.import_module(name) if load else None
