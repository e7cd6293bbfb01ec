"""An open run folder: configuration, metrics, checkpoints, tables. Everything a run knows is in its files."""

import contextlib
import datetime
import errno
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import yaml

from frugalvit.config.base import Config
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.runs.checkpoint import load_best_state, load_newest_state, save_state
from frugalvit.runs.layout import find_run
from frugalvit.runs.trackers import TensorBoard, Trackers
from frugalvit.utils import console
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import FolderLock, Read, make_folder, read_json, remove_parts, utf8_safe, write_text
from frugalvit.utils.tables import Table, to_json


def new_run_folder(out: str | None, *words: str, names: Iterable[str] = layout.RUN_FILES) -> Path:
    """Create the folder ``out``, or ``runs/DATE_words``; never one that already holds a run.

    names: files that the run will write
    """
    if out:
        if utf8_safe(out) != out:  # TensorBoard and the trackers need folder names that are text
            raise UserError(f"--out {out} is not UTF-8. Choose another name.")
        folder = Path(out)
        if layout.contains_run(folder):
            raise UserError(
                f"{folder} already holds a run. Resume it with --resume {shell_quote(folder)} (--resume auto resumes "
                "or starts the run in --out), or choose another --out."
            )
        layout.check_free_for_run(folder, names)
        return make_folder(folder)
    plain = (re.sub(r"[^\w.-]+", "-", word)[:60].strip("-.") or "data" for word in words)  # valid on every system
    stem = "_".join([datetime.date.today().isoformat(), *plain])
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}_{number}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"Cannot write to {folder} ({error.strerror}). Choose another folder with --out.") from None
        return folder
    raise UserError(f"runs/ already has 10,000 runs named {stem}. Choose a folder with --out.")


class RunFolder:
    """An open run folder. Only rank 0 of a run writes; a second process on the same folder is refused."""

    def __init__(self, folder: Path, *, writer: bool = True) -> None:
        self.folder, self.writer = folder, writer
        self.checkpoints = folder / layout.CHECKPOINTS
        self._lock = FolderLock(folder, layout.write_error_hint(folder))
        self._metrics: IO[str] | None = None
        self._board: TensorBoard | None = None
        self._step = 0
        self._resumed_at: int | None = None
        self._saved_step: int | None = None  # of the newest checkpoint, if this process knows it
        self.stop_requested = False  # by a signal in the last step: the run itself is finished
        self.trackers = Trackers({})
        if writer:
            make_folder(folder, layout.write_error_hint(folder))
            make_folder(self.checkpoints, layout.write_error_hint(folder))
            self._lock.__enter__()
            remove_parts(folder)

    def path(self, name: str) -> Path:
        """Return the path of one of the files of ``runs/layout.py``."""
        return self.folder / name

    # -- configuration and result

    def save_config(self, config: Config) -> None:
        """Write config.yaml. ``resume`` is not part of it: it describes one start of the run, not the run."""
        self._write(layout.CONFIG, config.model_copy(update={"resume": None}).to_yaml())

    def update_data_path(self, data: str) -> None:
        """Store the new location of the data for the next resume; the rest of config.yaml stays."""
        path = self.path(layout.CONFIG)
        if not self.writer or read_yaml(path).get("data") == data:
            return
        text, entry = path.read_text(encoding="utf-8"), yaml.safe_dump({"data": data}, allow_unicode=True)
        # A long name continues in indented lines; a name with a line break continues after an empty line.
        old = re.compile(r"^data:.*\n(?:[ \t].*\n|\n)*", re.MULTILINE)
        self._write(layout.CONFIG, old.sub(lambda _: entry, text, count=1))

    def save_json(self, name: str, value: object) -> None:
        self._write(name, to_json(value, indent=1))

    def _write(self, name: str, text: str) -> None:
        if not self.writer:
            return
        try:
            write_text(self.path(name), text)
        except OSError as error:
            raise UserError(self._write_error(name, error)) from error

    def read_json(self, name: str, kind: type[Read] = dict) -> Read:
        """Read a file that must exist."""
        value = read_json(self.path(name), kind)
        if value is None:
            raise UserError(f"{self.path(name)} is missing. Restore it, or start a new run in another --out.")
        return value

    # -- metrics

    def log(self, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl and send it to TensorBoard and the trackers."""
        if not self.writer:
            return
        try:
            if self._metrics is None:
                self._metrics = self.path(layout.METRICS).open("a", encoding="utf-8")
            self._metrics.write(to_json({"step": step, **values}) + "\n")
            self._metrics.flush()
            self._tensorboard().log(step, values)
        except OSError as error:
            raise UserError(self._write_error("metrics", error)) from error
        self._step = step
        self.trackers.log(step, values)

    def picture(self, name: str, path: Path) -> None:
        """Send a picture file to TensorBoard and the trackers."""
        if not self.writer:
            return
        try:
            self._tensorboard().image(self._step, name, path)
        except OSError as error:
            raise UserError(self._write_error(f"the picture {path.name}", error)) from error
        self.trackers.image(self._step, name, path)

    def table(self, name: str, table: Table) -> None:
        """Send a table to TensorBoard and the trackers."""
        if not self.writer or not table.rows:
            return
        try:
            self._tensorboard().table(self._step, name, table)
        except OSError as error:
            raise UserError(self._write_error(f"the table {name}", error)) from error
        self.trackers.table(self._step, name, table)

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after the last checkpoint: the resumed run writes them again."""
        self._resumed_at = step if step >= 0 else None
        self._step = max(0, step)
        path = self.path(layout.METRICS)
        if self.writer and path.exists():
            self._write(layout.METRICS, "".join(line for line, values in _lines(path) if values["step"] <= step))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        path = self.path(layout.METRICS)
        return [values for _, values in _lines(path)] if path.exists() else []

    # -- checkpoints

    def save_checkpoint(self, state: dict[str, Any], *, best: bool = False) -> None:
        """Write ``last.pt`` or ``best.pt``."""
        if not self.writer:
            return
        try:
            save_state(self.folder, state, best=best)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its writer
            if isinstance(error.__context__, KeyboardInterrupt):  # the writer was interrupted
                raise KeyboardInterrupt from error
            raise UserError(self._write_error(layout.BEST if best else layout.LAST, error)) from error
        if not best:
            self._saved_step = state["step"]

    def has_checkpoint(self) -> bool:
        return layout.has_checkpoint(self.folder)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Load the newest intact checkpoint; None without one."""
        state = load_newest_state(self.folder, set_aside=self.writer)
        self._saved_step = None if state is None else state["step"]
        return state

    def load_best(self) -> dict[str, Any] | None:
        """Load the best checkpoint; None if missing, or damaged (with a warning)."""
        return load_best_state(self.folder)

    def _write_error(self, what: str, error: Exception) -> str:
        """Return the error text for a full or read-only disk, with the checkpoint that a resume starts from."""
        # Torch's error names a line of its code; the error of the disk is its context.
        disk = error if isinstance(error, OSError) else error.__context__
        reason = (disk.strerror if isinstance(disk, OSError) else None) or " ".join(str(error).split())[:120]
        full = isinstance(disk, OSError) and disk.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "Free some space" if full else "Fix that"
        resume = f"--resume {shell_quote(self.folder)}"
        names = (name for name in (layout.LAST, layout.PREVIOUS) if (self.checkpoints / name).exists())
        newest = next(names, None)
        if newest is not None:
            step = "" if self._saved_step is None else f" (step {self._saved_step:,})"
            advice = f"{newest}{step} is intact. {fix}, then resume from it with {resume}."
        elif self.path(layout.CONFIG).exists():
            advice = f"There is no checkpoint yet. {fix}, then start at step 0 with {resume}."
        else:
            advice = f"Nothing was saved yet. {fix}, then start the run again."
        return f"Could not save {what} in {self.folder} ({reason}). {advice}"

    def close(self) -> None:
        """Close all files, and the lock last. Errors of the last flush were reported before."""
        try:
            for closable in (self._metrics, self._board):
                with contextlib.suppress(OSError):
                    if closable is not None:
                        closable.close()
            self.trackers.close()
        finally:
            if self.writer:
                self._lock.__exit__(None, None, None)

    def _tensorboard(self) -> TensorBoard:
        if self._board is None:
            first = None if self._resumed_at is None else self._resumed_at + 1
            self._board = TensorBoard(self.path(layout.TENSORBOARD), first)
        return self._board


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines of a metrics file and their values.

    A killed writer leaves half a line; after a power failure there may be anything.
    """
    lines: list[tuple[str, dict[str, Any]]] = []
    *complete, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in complete:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append((f"{line}\n", values))
        elif line.strip():
            console.warning(f"skipping a damaged line of {path}")
    return lines


def read_data_facts(folder: str | Path) -> dict[str, Any]:
    """Return data.json of a run; empty if the run was killed before it wrote that."""
    return read_json(Path(folder) / layout.DATA, dict) or {}


def finished_summary(path: str | Path) -> dict[str, Any] | None:
    """Return the result of a finished run and say so; None if it is not finished."""
    summary = read_summary(find_run(path))
    if not summary:
        return None
    console.info(f"{path} is finished: this is its result. To start from its weights: --init {shell_quote(path)}")
    return summary | {"run": str(path)}  # the folder may have been moved since


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return summary.json of a run; None if the run is not finished."""
    return read_json(folder / layout.SUMMARY, dict)


class Stopwatch:
    """Monotonic seconds that continue after a resume."""

    def __init__(self, before: float = 0.0) -> None:
        self._before, self._began = before, time.monotonic()

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began
