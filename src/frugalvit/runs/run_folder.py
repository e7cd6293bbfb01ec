"""An open run folder: configuration, metrics, checkpoints, tables. Everything a run knows is in its files."""

import contextlib
import datetime
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import pydantic
import yaml

from frugalvit.config.base import Config
from frugalvit.config.yaml import read_yaml
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey
from frugalvit.engine.checkpoint import load_newest_state, load_or_warn, save_state
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.runs.trackers import TensorBoard, Trackers
from frugalvit.utils import console, files
from frugalvit.utils.console import shell_quote
from frugalvit.utils.tables import Table, to_json
from frugalvit.utils.text import short_message


def new_run_folder(out: str | None, *words: str, names: Iterable[str] = layout.RUN_FILES) -> Path:
    """Create ``out``, or ``runs/DATE_words``, for the files ``names``; never a folder that already holds a run."""
    if out:
        if files.utf8_safe(out) != out:  # TensorBoard and the trackers cannot write such a name
            raise UserError(f"--out {out} is not UTF-8. Choose another name.")
        folder = Path(out)
        if layout.contains_run(folder):
            raise UserError(
                f"{folder} already holds a run. Resume it with --resume {shell_quote(folder)} (--resume auto resumes "
                "or starts the run in --out), or choose another --out."
            )
        layout.check_free_for_run(folder, names)
        return files.make_folder(folder)
    plain = (re.sub(r"[^\w.-]+", "-", word)[:60].strip("-.") or "data" for word in words)  # valid on every system
    stem = "_".join([datetime.date.today().isoformat(), *plain])
    folder, number = files.make_folder(Path("runs")) / stem, 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{stem}_{number}")


class RunFolder:
    """An open run folder. Only rank 0 of a run writes; a second process on the same folder is refused."""

    def __init__(self, folder: Path, *, writer: bool = True) -> None:
        self.folder, self.writer = folder, writer
        self.checkpoints = folder / layout.CHECKPOINTS
        self._lock = files.FolderLock(folder, layout.write_error_hint(folder))
        self._metrics: IO[str] | None = None
        self._board: TensorBoard | None = None
        self._step = 0
        self._resumed_at: int | None = None
        self.stop_requested = False  # by a signal in the last step: the run itself is finished
        self.trackers = Trackers({})
        if writer:
            files.make_folder(folder, layout.write_error_hint(folder))
            files.make_folder(self.checkpoints, layout.write_error_hint(folder))
            self._lock.__enter__()
            files.remove_parts(folder)

    def path(self, name: str) -> Path:
        """Return the path of one of the files of ``runs/layout.py``."""
        return self.folder / name

    # -- configuration and result

    def save_config(self, config: Config) -> None:
        """Write config.yaml. ``resume`` is not part of it: it describes one start of the run, not the run."""
        self._write(layout.CONFIG, config.model_copy(update={"resume": None}).to_yaml())

    def update_data_path(self, data: str) -> None:
        """Store the new location of the data for the next resume; the rest of config.yaml stays."""
        values = read_yaml(self.path(layout.CONFIG))
        if not self.writer or values.get("data") == data:
            return
        values["data"] = data
        self._write(layout.CONFIG, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def save_json(self, name: str, value: object) -> None:
        self._write(name, to_json(value, indent=1))

    def _write(self, name: str, text: str) -> None:
        if self.writer:
            with self._explain_errors(name):
                files.write_text(self.path(name), text)

    def read_json(self, name: str, kind: type[files.Read] = dict) -> files.Read:
        """Read a file that must exist."""
        value = files.read_json(self.path(name), kind)
        if value is None:
            raise UserError(f"{self.path(name)} is missing. Restore it, or start a new run in another --out.")
        return value

    # -- metrics

    def log(self, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl and send it to TensorBoard and the trackers."""
        if not self.writer:
            return
        with self._explain_errors("metrics"):
            if self._metrics is None:
                self._metrics = self.path(layout.METRICS).open("a", encoding="utf-8")
            self._metrics.write(to_json({"step": step, **values}) + "\n")
            self._metrics.flush()
            self._tensorboard().log(step, values)
        self._step = step
        self.trackers.log(step, values)

    def picture(self, name: str, path: Path) -> None:
        if self.writer:
            with self._explain_errors(path.name):
                self._tensorboard().image(self._step, name, path)
            self.trackers.image(self._step, name, path)

    def table(self, name: str, table: Table) -> None:
        if self.writer and table.rows:
            with self._explain_errors(f"the table {name}"):
                self._tensorboard().table(self._step, name, table)
            self.trackers.table(self._step, name, table)

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after the last checkpoint: the resumed run writes them again."""
        self._resumed_at = step if step >= 0 else None
        self._step = max(0, step)
        path = self.path(layout.METRICS)
        if self.writer and path.exists():
            self._write(layout.METRICS, "".join(line for line, values in _lines(path) if values["step"] <= step))

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path(layout.METRICS)
        return [values for _, values in _lines(path)] if path.exists() else []

    # -- checkpoints

    def save_checkpoint(self, state: dict[str, Any], name: str = layout.LAST) -> None:
        """Write a checkpoint; ``good.pt`` has the weights that a collapsed run goes back to."""
        if self.writer:
            with self._explain_errors(name, (OSError, RuntimeError)):
                save_state(self.folder, state, name)

    def has_checkpoint(self) -> bool:
        return layout.has_checkpoint(self.folder)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Load the newest intact checkpoint; None without one."""
        return load_newest_state(self.folder, set_aside=self.writer)

    def load_best(self) -> dict[str, Any] | None:
        """Load the best checkpoint; None if missing, or damaged (with a warning)."""
        path = self.checkpoints / layout.BEST
        return load_or_warn(path, "using the last weights instead of the best") if path.exists() else None

    def load_good(self) -> dict[str, Any] | None:
        """Load ``good.pt``; None if missing or damaged (with a warning)."""
        return load_or_warn(self.checkpoints / layout.GOOD, "cannot go back to it; the run continues as it is")

    def remove_good(self) -> None:
        if self.writer:
            (self.checkpoints / layout.GOOD).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explain_errors(self, item: str, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
        """Raise ``UserError`` for a full or read-only disk; it names the checkpoint to resume from."""
        try:
            yield
        except kinds as error:
            # Torch reports a full disk, and an interrupted writer, as a RuntimeError with the cause as its context.
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            reason = (cause.strerror if isinstance(cause, OSError) else None) or short_message(error)
            names = (name for name in (layout.LAST, layout.PREVIOUS) if (self.checkpoints / name).exists())
            newest = next(names, None)
            advice = "Nothing was saved yet. Fix this, then start the run again."
            if newest is not None:
                advice = f"{newest} is intact. Fix this, then resume from it with --resume {shell_quote(self.folder)}."
            raise UserError(f"Could not save {item} in {self.folder} ({reason}). {advice}") from error

    def close(self) -> None:
        """Close all files, then release the lock. Errors of the last flush are already reported."""
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
    """Return the lines of a metrics file and their values; a kill or power failure may leave damaged ones."""
    lines: list[tuple[str, dict[str, Any]]] = []
    *complete, _ = files.read_user_text(path, errors="replace").split("\n")
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


class _EvaluationFacts(pydantic.BaseModel, strict=True):
    files: int
    content: str


class _LeftOutFacts(pydantic.BaseModel, strict=True):
    files: list[dict[Literal["name", "split", "reason"], str]] = []


class _DataFacts(pydantic.BaseModel, strict=True):
    """The facts of data.json that a resumed run computes with."""

    images: int
    classes: list[str]
    network: dict[str, Any]
    content: str
    processes: Annotated[int, pydantic.Field(ge=1)]
    threads: Annotated[int, pydantic.Field(ge=1, le=1024)] | None = None
    evaluation: dict[str, _EvaluationFacts] = {}
    left_out: _LeftOutFacts = _LeftOutFacts()
    survey: ShardSurvey | None = None


def read_data_facts(folder: str | Path) -> dict[str, Any]:
    """Return data.json of a run; empty if the run was killed before it wrote the file."""
    path = Path(folder) / layout.DATA
    facts = files.read_json(path, dict)
    if facts is None:
        return {}
    files.check_stored(_DataFacts, facts, path)
    if refused := sorted(facts["network"].keys() & {"name", "pretrained"}):  # a resumed run downloads no weights
        raise UserError(f"{path}: network has the keyword {refused[0]!r}. The file is damaged.")
    return facts


def finished_summary(path: str | Path) -> dict[str, Any] | None:
    """Return the result of a finished run and log that it is finished; None if it is not."""
    summary = read_summary(layout.find_run(path))
    if not summary:
        return None
    console.info(f"{path} is finished: this is its result. To start from its weights: --init {shell_quote(path)}")
    return summary | {"run": str(path)}  # the folder may have been moved since


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return summary.json of a run; None if the run is not finished."""
    return files.read_json(folder / layout.SUMMARY, dict)
