"""Messages and progress on standard error, results on standard output.

A terminal gets live bars, colours and tables by rich. Files, CI and SLURM logs get plain lines.
Only rank 0 logs; another rank prints errors alone, with its rank in front.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import shlex
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from frugalvit.utils.tables import CommandResult, Table, as_text, to_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

T = TypeVar("T")

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_BEFORE_FIRST = 2.0

_quiet = False
_rank = 0


def set_quiet(quiet: bool) -> None:
    """Silence ``info`` and progress; warnings and errors are still printed."""
    global _quiet
    _quiet = quiet


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence ``info`` and progress inside the context; warnings and errors are still printed."""
    before = _quiet
    set_quiet(True)
    try:
        yield
    finally:
        set_quiet(before)


@functools.cache
def info_once(message: str) -> None:
    """Print a line only once in a command. Each command begins with ``cache_clear``."""
    info(message)


def set_rank(rank: int) -> None:
    """Set the rank of this process: any rank but 0 prints errors only."""
    global _rank
    _rank = rank


def get_rank() -> int:
    return _rank


def _is_silent() -> bool:
    return _quiet or _rank > 0


def info(message: str) -> None:
    if not _is_silent():
        _write_line(message)


def warning(message: str) -> None:
    """Print one line that ``--quiet`` does not silence."""
    if _rank == 0:
        _write_line(f"warning: {message}", style="yellow")


def error(message: str) -> None:
    rank = f"rank {_rank}: " if _rank else ""
    _write_line(f"frugalvit: {rank}{message}", style="red")


def _write_line(message: str, style: str = "") -> None:
    """Write to standard error. A missing or closed stream must not end a run."""
    text = sanitize(message)
    with contextlib.suppress(OSError, ValueError):
        if _is_terminal(sys.stderr):
            from rich.console import Console
            from rich.text import Text

            console = Console(stderr=True) if _live is None else _live.console
            console.print(Text(text, style), soft_wrap=True)
        elif sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(AttributeError, ValueError):
        return bool(stream.isatty())
    return False


def sanitize(text: str) -> str:
    """Replace control characters: names come from other people's files, and a terminal would obey them."""
    # Python counts other spaces and the joiners of Persian and emoji as unprintable.
    return "".join(
        letter
        if letter.isprintable() or letter in "\n\t\u200c\u200d" or unicodedata.category(letter) == "Zs"
        else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def shell_quote(path: object) -> str:
    """Quote a path for a command that people copy into a shell."""
    return shlex.quote(str(path))


# -- progress


_live: Progress | None = None  # the live rows at the bottom of a terminal


def _live_rows() -> Progress:
    """Return the live rows; they are started with the first."""
    global _live
    if _live is None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        label_column = TextColumn("{task.description}", markup=False)
        details_column = TextColumn("{task.fields[details]}", markup=False)
        rows = Progress(
            *(SpinnerColumn(), label_column, BarColumn(20), details_column, TimeElapsedColumn()),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        rows.start()
        _live = rows
    return _live


def progress(iterable: Iterable[T], total: int | None = None, label: str = "") -> Iterator[T]:
    """Yield the items and show a progress bar if they take longer than two seconds."""
    bar = ProgressBar((operator.length_hint(iterable) or None) if total is None else total, label)
    try:
        for done, item in enumerate(iterable, 1):
            yield item
            bar.show(done)
    finally:
        bar.close()


class ProgressBar:
    """A bar with the time left: live on a terminal, a plain line every ten seconds elsewhere.

    unit: what is counted, to show a rate ("steps": 12.3 steps/s)
    """

    def __init__(self, total: int | None, label: str = "", start: int = 0, unit: str = "") -> None:
        self.total, self.label, self.start, self.unit = total, sanitize(label), start, unit
        self.is_live = _is_terminal(sys.stderr) and not _is_silent()
        self.started = self.shown = time.monotonic()
        self.row: TaskID | None = None

    def show(self, done: int, text: str = "") -> None:
        now = time.monotonic()
        interval = _SECONDS_BETWEEN_FRAMES if self.is_live else _SECONDS_BETWEEN_LINES
        if _is_silent() or now - self.started < _SECONDS_BEFORE_FIRST or now - self.shown < interval:
            return
        self.shown = now
        if not self.is_live:
            percent = f"{100 * done / self.total:.0f} % " if self.total else ""
            _write_line(f"{self.label} {percent}{self.details(done, now, text)}")
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            rows = _live_rows()
            if self.row is None:
                self.row = rows.add_task(self.label, total=self.total, details="")
            rows.update(self.row, completed=done, details=sanitize(self.details(done, now, text)))

    def details(self, done: int, now: float, text: str) -> str:
        rate = (done - self.start) / max(now - self.started, 1e-9)
        shown = f" · {rate:.3g} {self.unit}/s" if self.unit else ""
        if not self.total:
            return f"{done}{shown} {text}".strip()
        left = clock((self.total - done) / rate) if rate > 0 else "?"
        return f"{done}/{self.total}{shown} · {left} left {text}".strip()

    def close(self) -> None:
        global _live
        if self.row is None or _live is None:
            return
        with contextlib.suppress(OSError, ValueError):
            _live.remove_task(self.row)
            if not _live.tasks:
                rows, _live = _live, None
                rows.stop()
        self.row = None


def clock(seconds: float) -> str:
    """Format a duration: 42 s, 3:07, 1:02:09."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# -- results


def print_result(result: CommandResult) -> None:
    for table in result.tables:
        print_table(table)
    for note in result.notes:
        print(_encodable(sanitize(note)))


def print_json(data: Any) -> None:
    """Print one line of JSON, in ASCII if it holds control characters or cannot be encoded."""
    text = to_json(data)
    is_safe = text.isprintable() and text == _encodable(text)
    print(text if is_safe else to_json(data, ensure_ascii=True))


def print_table(table: Table) -> None:
    """Print a table: in colour and folded to the width on a terminal, as plain text elsewhere."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    rich_table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(table.columns):
        cells = [row[i] for row in table.rows]
        is_numeric = bool(cells) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)
        rich_table.add_column(Text(_cell(name)), justify="right" if is_numeric else "left", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*(Text(_cell(as_text(value))) for value in row))
    parts = [*([Text(_cell(table.title), "bold")] if table.title else []), rich_table, Text()]
    if _is_terminal(sys.stdout):
        Console().print(*parts, sep="\n")
        return
    plain = Console(file=io.StringIO(), width=1_000_000, color_system=None)
    with plain.capture() as capture:
        plain.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _cell(text: str) -> str:
    """Return the text of a cell on one line."""
    return _encodable(sanitize(" ".join(text.splitlines()).replace("\t", " ")))


def _encodable(text: str) -> str:
    """Replace the characters that standard output cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a stream of the caller may have none
    return text.encode(encoding, "replace").decode(encoding)
