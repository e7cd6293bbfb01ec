"""The folder a run lives in. Files are the truth: whatever a run knows can be read off its folder, at any moment.

config.yaml       every value; re-runs the run. What "auto" decided from the data and the network stands there decided;
                  "auto" stays where each machine chooses for itself (device, precision, compile, workers, cache), for
                  how data are read (split, stream, labels, ignore_index, label_count) and where the value follows from
                  the others (drop_path, epochs beside steps, crops.local_size, matching.view_weight and chunked,
                  test.window, all of a loss that is off)
metrics.jsonl     one line per logged step
checkpoints/      last.pt, previous.pt (the one before), best.pt
model/            model.safetensors + config.json, for timm and for us
summary.json      the final result
report.html       one page to read
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import re
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from frugalvit.config.base import Config
from frugalvit.config.run import contains_run as contains_run
from frugalvit.config.run import write_error_hint
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.runs.layout import RUN_FILES, check_free_for_run
from frugalvit.runs.trackers import TensorBoard, Trackers
from frugalvit.utils import console
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import (
    FolderLock,
    Read,
    make_folder,
    read_json,
    remove_parts,
    utf8_safe,
    write_atomically,
    write_text,
)
from frugalvit.utils.tables import Table, to_json

CHECKPOINTS = ("best.pt", "last.pt", "previous.pt")


def new_run_folder(out: str | None, *words: str, names: Iterable[str] = RUN_FILES) -> Path:
    """The folder asked for, or ``runs/DATE_words``; never one that already holds a run.

    names: under which the run will write
    """
    if out:
        if utf8_safe(out) != out:  # TensorBoard and the trackers write into folders whose names are text
            raise UserError(f"--out {out} is not in UTF-8; choose another name.")
        folder = Path(out)
        if contains_run(folder):
            raise UserError(
                f"{folder} already holds a run. Continue it with --resume {shell_quote(folder)} (--resume auto continues "
                "what --out holds, or begins it), or choose another --out."
            )
        check_free_for_run(folder, names)
        return make_folder(folder)
    plain = (re.sub(r"[^\w.-]+", "-", word)[:60].strip("-.") or "data" for word in words)  # a name on every system
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
    raise UserError("runs/ holds ten thousand runs of this name; choose a folder with --out.")


class RunFolder:
    """An open run folder. Only the main process of a run writes; a second process on the same folder is refused."""

    def __init__(self, folder: Path, *, writer: bool = True) -> None:
        self.folder, self.writer = folder, writer
        self.checkpoints = folder / "checkpoints"
        self._lock = FolderLock(folder, write_error_hint(folder))
        self._metrics: IO[str] | None = None
        self._board: TensorBoard | None = None
        self._step = 0
        self._went_on_after: int | None = None
        self._saved_step: int | None = None  # of the newest checkpoint, where this process knows it
        self.asked_to_stop = False  # in its last step: the run itself ends as it would have
        self.trackers = Trackers({})
        if writer:
            make_folder(folder, write_error_hint(folder))
            make_folder(self.checkpoints, write_error_hint(folder))
            self._lock.__enter__()
            remove_parts(folder)

    # -- configuration and result

    def save_config(self, config: Config) -> None:
        self._write("config.yaml", config.to_yaml())

    def update_data_path(self, data: str) -> None:
        """Note where the data lies now, for whoever resumes the run next; the rest of the file stays as it is."""
        path = self.folder / "config.yaml"
        if not self.writer or read_yaml(path).get("data") == data:
            return
        text, entry = path.read_text(encoding="utf-8"), yaml.safe_dump({"data": data}, allow_unicode=True)
        # A long name goes on in indented lines, one with a line's end in it over an empty one.
        old = re.compile(r"^data:.*\n(?:[ \t].*\n|\n)*", re.MULTILINE)
        self._write("config.yaml", old.sub(lambda _: entry, text, count=1))

    def save_json(self, name: str, value: object) -> None:
        self._write(name, to_json(value, indent=1))

    def _write(self, name: str, text: str) -> None:
        if not self.writer:
            return
        try:
            write_text(self.folder / name, text)
        except OSError as error:
            raise UserError(self._not_written(name, error)) from error

    def read_json(self, name: str, kind: type[Read] = dict) -> Read:
        """What a file of the folder that must be there holds."""
        value = read_json(self.folder / name, kind)
        if value is None:
            raise UserError(f"{self.folder / name} is missing: bring it back, or begin anew in another --out.")
        return value

    # -- metrics

    def log(self, step: int, **values: Any) -> None:
        """One line of metrics.jsonl, and the same to TensorBoard and whatever else tracks the run."""
        if not self.writer:
            return
        try:
            if self._metrics is None:
                self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
            self._metrics.write(to_json({"step": step, **values}) + "\n")
            self._metrics.flush()
            self._tensorboard().log(step, values)
        except OSError as error:
            raise UserError(self._not_written("metrics", error)) from error
        self._step = step
        self.trackers.log(step, values)

    def picture(self, name: str, path: Path) -> None:
        """Show a picture that lies in the folder to TensorBoard and whatever else tracks the run."""
        if not self.writer:
            return
        try:
            self._tensorboard().image(self._step, name, path)
        except OSError as error:
            raise UserError(self._not_written(f"the picture {path.name}", error)) from error
        self.trackers.image(self._step, name, path)

    def table(self, name: str, table: Table) -> None:
        """Show a table to TensorBoard and whatever else tracks the run."""
        if not self.writer or not table.rows:
            return
        try:
            self._tensorboard().table(self._step, name, table)
        except OSError as error:
            raise UserError(self._not_written(f"the table {name}", error)) from error
        self.trackers.table(self._step, name, table)

    def truncate_metrics(self, step: int) -> None:
        """Drop lines a killed run wrote after its last checkpoint: the resumed run writes them again."""
        self._went_on_after = step if step >= 0 else None
        self._step = max(0, step)
        path = self.folder / "metrics.jsonl"
        if self.writer and path.exists():
            kept = [line for line, values in _lines(path) if values["step"] <= step]
            self._write("metrics.jsonl", "".join(kept))

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [values for _, values in _lines(path)] if path.exists() else []

    # -- checkpoints

    def save_checkpoint(self, state: dict[str, Any], *, best: bool = False) -> None:
        """Write ``last.pt`` (keeping the one before as ``previous.pt``) or ``best.pt``, atomically."""
        if not self.writer:
            return
        target = self.checkpoints / ("best.pt" if best else "last.pt")
        keep = None if best else self.checkpoints / "previous.pt"
        try:
            write_atomically(target, lambda handle: torch.save(state, handle), keep=keep)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its writer
            if isinstance(error.__context__, KeyboardInterrupt):  # its writer was left half-way, and minds
                raise KeyboardInterrupt from error
            raise UserError(self._not_written(target.name, error)) from error
        if not best:
            self._saved_step = state["step"]

    def _not_written(self, what: str, error: Exception) -> str:
        """The line for a disk that is full or has become read-only, with what a resume would begin from."""
        # Torch's writer says where in its code it noticed; the error of the disk that it met stands behind.
        disk = error if isinstance(error, OSError) else error.__context__
        reason = (disk.strerror if isinstance(disk, OSError) else None) or " ".join(str(error).split())[:120]
        full = isinstance(disk, OSError) and disk.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "free some space" if full else "mend that"
        found = next((name for name in ("last.pt", "previous.pt") if (self.checkpoints / name).exists()), None)
        if found is not None:
            step = "" if self._saved_step is None else f" (step {self._saved_step:,})"
            left = (
                f"{found}{step} is intact: {mend}, then continue from there with --resume {shell_quote(self.folder)}."
            )
        elif (self.folder / "config.yaml").exists():
            left = (
                f"No checkpoint was saved yet: {mend}, then begin at step 0 with --resume {shell_quote(self.folder)}."
            )
        else:
            left = f"Nothing of the run was saved yet: {mend}, then start it again."
        return f"Could not save {what} in {self.folder} ({reason}). {left}"

    def has_checkpoint(self) -> bool:
        return has_checkpoint(self.folder)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; a damaged one is named, laid aside, and the one before taken."""
        damaged: list[str] = []
        for name in ("last.pt", "previous.pt"):
            path = self.checkpoints / name
            if not path.exists():
                continue
            state, fault = read_state(path)
            if state is not None:
                if damaged:
                    console.warning(f"going back to {path}, step {state['step']}")
                self._saved_step = state["step"]
                return state
            damaged.append(name)
            console.warning(f"{path} is damaged ({fault})")
            if self.writer:
                # Laid aside, so that the next save does not keep it in the place of the good one.
                path.replace(path.with_suffix(".damaged"))
        if damaged:
            best = self.checkpoints / "best.pt"
            anew = "start again with another --out"
            advice = f"take its best weights with --init {shell_quote(best)}" if best.exists() else anew
            raise UserError(f"No checkpoint of {self.folder} is whole ({' and '.join(damaged)} are damaged); {advice}.")
        return None

    def load_best(self) -> dict[str, Any] | None:
        """The state that scored best; None where there is none, or where it is damaged, which is said."""
        path = self.checkpoints / "best.pt"
        if not path.exists():
            return None
        state, fault = read_state(path)
        if state is None:
            console.warning(f"{path} is damaged ({fault}); the last weights are taken instead of the best")
        return state

    def close(self) -> None:
        """Close what is open, the lock last and in any case; what cannot be flushed any more has been said before."""
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
            after = None if self._went_on_after is None else self._went_on_after + 1
            self._board = TensorBoard(self.folder / "tensorboard", after)
        return self._board


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved a state to go on from."""
    return any((folder / "checkpoints" / name).exists() for name in ("last.pt", "previous.pt"))


def read_state(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The state in a checkpoint file, or None and what is wrong with it. Nothing in the file is executed."""
    fault = damage(path)
    if fault is not None:
        return None, fault
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any byte may be damaged, so any error may come
        return None, " ".join(str(error).split())[:100]
    whole = isinstance(state, dict) and "step" in state and "task" in state
    return (state, "") if whole else (None, "it holds no state of a run")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file, or None. Torch's format is a zip with a checksum for every record."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # zipfile raises half a dozen kinds, depending on the byte that is wrong
        return " ".join(str(error).split()) or type(error).__name__
    return f"checksum of {bad} does not match" if bad else None


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a file of metrics and what they say.

    Its writer may have been killed in the middle of the last one; after a power failure there may be anything.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in whole:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found.append((f"{line}\n", values))
        elif line.strip():
            console.warning(f"a line of {path} is damaged and left out")
    return found


def find_run(where: str | Path) -> Path:
    """A folder that holds a run, or a clear line."""
    folder = Path(where)
    if not (folder / "config.yaml").exists():
        raise UserError(
            f"{folder} holds no run (no config.yaml in it). Give the folder that a run printed at its start."
        )
    return folder


def finished_summary(where: str | Path) -> dict[str, Any] | None:
    """The result of a run that has ended, said as such; None while it has not."""
    summary = read_summary(find_run(where))
    if not summary:
        return None
    way = f"Start a new run from its weights with --init {shell_quote(where)}."
    console.info(f"{where} is finished; this is its result. {way}")
    return summary | {"run": str(where)}  # where it lies now: it may have been moved since


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The result that a run wrote when it ended; None where it has not."""
    return read_json(folder / "summary.json", dict)


class Stopwatch:
    """Seconds that go on counting over a resume: a clock that jumps does not matter, since it is monotonic."""

    def __init__(self, before: float = 0.0) -> None:
        self._before, self._began = before, time.monotonic()

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began
