"""Talking to the person at the terminal: progress and messages on standard error, results on standard output.

A live bar appears on a terminal only; elsewhere (files, CI, SLURM logs) plain lines say the same now and then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from frugalvit.utils.tables import CommandResult, Table, as_text, to_json

T = TypeVar("T")

_quiet = False
_hushes = 0
_secondary = False
_end_unsaid = False
_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BEFORE_FIRST = 2.0


def set_quiet(quiet: bool) -> None:
    """Silence ``say`` and ``progress`` (warnings and errors still speak)."""
    global _quiet
    _quiet = quiet


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is said inside (warnings and errors still are). Counted: threads end in another order than they began."""
    _hush(1)
    try:
        yield
    finally:
        _hush(-1)


def _hush(more: int) -> None:
    global _hushes
    with _terminal:
        _hushes += more


def _silent() -> bool:
    return _quiet or _hushes > 0


def set_secondary(secondary: bool) -> None:
    """Of several processes of one run only the first talks; warnings and errors of the others still speak."""
    global _secondary
    _secondary = secondary
    if secondary:
        set_quiet(True)


def is_secondary() -> bool:
    return _secondary


def info(message: str) -> None:
    """One line of information on standard error."""
    if not _silent():
        _spoke()
        _tell(f"{sanitize(message)}\n")


def warning(message: str) -> None:
    """One line on standard error that even ``--quiet`` shows."""
    _spoke()
    _tell(f"warning: {sanitize(message)}\n")


def error(message: str) -> None:
    """The one line that says why a command ended."""
    _spoke()
    if not _end_unsaid:
        _tell(f"frugalvit: {sanitize(message)}\n")


def suppress_final_error() -> None:
    """Whoever asked hears why the command ended from its answer."""
    global _end_unsaid
    _end_unsaid = True


def _tell(text: str) -> None:
    """On standard error, in letters that it knows. Words are not worth a run: a terminal may have been closed.

    A program without a window has no standard error at all, or one of its own making.
    """
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(_spelled(text, sys.stderr, "backslashreplace"))
        sys.stderr.flush()


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(AttributeError, ValueError):
        return bool(stream.isatty())
    return False


def sanitize(text: str) -> str:
    """Names are somebody else's: an escape sequence in one must not reach the terminal, nor half a letter stop us."""
    if text.isprintable():
        return text
    return "".join(letter if _harmless(letter) else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _harmless(letter: str) -> bool:
    """Python calls every space but one unprintable, and the joiners that Persian and emoji are written with."""
    return letter.isprintable() or letter in "\n\t\u200c\u200d" or unicodedata.category(letter) == "Zs"


def shell_quote(path: object) -> str:
    """A path as a shell reads it, for commands that people copy."""
    return shlex.quote(str(path))


def progress(iterable: Iterable[T], total: int | None = None, label: str = "") -> Iterator[T]:
    """Pass the items through while showing how far along they are, once it takes longer than two seconds."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    meter = ProgressBar(total, label)
    try:
        for done, item in enumerate(iterable, 1):
            yield item
            meter.show(done)
    finally:
        meter.close()


class ProgressBar:
    """A bar with rate, time left and a few words: live on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, total: int | None, label: str = "", start: int = 0) -> None:
        self.total, self.label, self.start = total, sanitize(label), start
        self.live = _is_terminal(sys.stderr) and not _silent()
        self.began = self.shown = time.monotonic()
        self.open_line = False

    def show(self, done: int, text: str = "") -> None:
        if _silent():
            return
        now = time.monotonic()
        if now - self.began < _SECONDS_BEFORE_FIRST or now - self.shown < (
            0.1 if self.live else _SECONDS_BETWEEN_LINES
        ):
            return
        self.shown = now
        line = self.line(done, now, text)
        if self.live:
            _spoke(bar=True)
            _tell(_CLEAR + line[: _terminal_width() - 1])
            self.open_line = True
        else:
            _tell(line + "\n")

    def line(self, done: int, now: float, text: str) -> str:
        rate = (done - self.start) / max(now - self.began, 1e-9)
        if not self.total:
            return f"{self.label} {done} ({rate:.3g}/s) {text}"
        left = clock((self.total - done) / rate) if rate > 0 else "?"
        filled = round(20 * done / self.total)
        bar = "━" * filled + "╌" * (20 - filled) if self.live else f"{100 * done / self.total:.0f} %"
        return f"{self.label} {bar} {done}/{self.total} · {rate:.3g}/s · {left} left {text}".strip()

    def close(self) -> None:
        if self.open_line:
            _spoke()
            _tell(_CLEAR)
            self.open_line = False


def clock(seconds: float) -> str:
    """A duration as people say it: 42 s, 3:07, 1:02:09."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Spinner:
    """On a terminal, while nothing else is shown for two seconds: which command is at work, and for how long.

    Loading PyTorch alone takes seconds; nobody should wonder whether anything happens.
    """

    def __init__(self, label: str) -> None:
        self.label, self.began = label, time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Spinner:
        if _is_terminal(sys.stderr) and not _silent():
            _spoke()
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        return self

    def _wait(self) -> None:
        while not self._over.wait(0.5):
            with _terminal:
                now = time.monotonic()
                if not _state.bar and not _silent() and now - _state.spoke > _SECONDS_BEFORE_FIRST:
                    line = f"{self.label} … {clock(now - self.began)}"
                    _tell(_CLEAR + line[: _terminal_width() - 1])
                    _state.waiting = True

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            _spoke()


class _State:
    """What is on the terminal's last line, and when something was last said."""

    spoke = 0.0
    bar = False
    waiting = False


_state = _State()
_terminal = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child forked while the line was being written must not wait for it forever
    os.register_at_fork(before=_terminal.acquire, after_in_parent=_terminal.release, after_in_child=_terminal.release)
_CLEAR = "\r\x1b[2K"


def _spoke(bar: bool = False) -> None:
    """Make room for what comes: the line that said we are waiting goes away."""
    with _terminal:
        if _state.waiting:
            _tell(_CLEAR)
        _state.spoke, _state.bar, _state.waiting = time.monotonic(), bar, False


def print_result(result: CommandResult) -> None:
    """Tables and notes on standard output: aligned columns, colours only on a terminal."""
    for table in result.tables:
        print_table(table)
    for note in result.notes:
        _print(sanitize(note))


def print_json(data: Any) -> None:
    """One line of JSON on standard output; what a terminal would obey, or cannot show, is written as JSON escapes."""
    text = to_json(data)
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
    print(text if text == _encodable(text) else to_json(data, ensure_ascii=True))


def print_table(table: Table) -> None:
    columns = [_cell(name) for name in table.columns]
    cells = [[_cell(as_text(value)) for value in row] for row in table.rows]
    widths = [max(_width(text) for text in column) for column in zip(columns, *cells, strict=True)]
    numeric = [all(_is_number(row[i]) for row in table.rows) and bool(table.rows) for i in range(len(widths))]

    def line(texts: list[str]) -> str:
        pairs = zip(texts, widths, numeric, strict=True)
        gaps = ((text, " " * (width - _width(text)), right) for text, width, right in pairs)
        return "  ".join(gap + text if right else text + gap for text, gap, right in gaps).rstrip()

    if table.title:
        _print(_bold(_cell(table.title)))
    _print(_bold(line(columns)))
    for row in cells:
        _print(line(row))
    _print("")


def _cell(text: str) -> str:
    """A name with a line's end in it must not tear its row apart."""
    return _encodable(sanitize(" ".join(text.splitlines()).replace("\t", " ")))


def _width(text: str) -> int:
    """The columns a text takes in a terminal: two for East Asian letters, none for marks on others and for joiners."""
    return sum(
        0
        if unicodedata.category(letter) in ("Mn", "Me", "Cf")
        else 1 + (unicodedata.east_asian_width(letter) in ("W", "F"))
        for letter in unicodedata.normalize("NFC", text)  # parts of a Korean syllable stand in one place
    )


def _print(text: str) -> None:
    """On standard output, whatever letters it knows: a result is not lost over a name."""
    print(_encodable(text))


def _encodable(text: str) -> str:
    return _spelled(text, sys.stdout, "replace")


def _spelled(text: str, stream: Any, errors: str) -> str:
    """The text in letters that a stream knows: ours have a spelling without accents, those of names are replaced."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a stream that a program put in its place may have none
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = "".join(_PLAIN.get(letter, letter) if _lacks(encoding, letter) else letter for letter in text)
    return text.encode(encoding, errors).decode(encoding)


def _lacks(encoding: str, letter: str) -> bool:
    return letter.encode(encoding, "ignore") == b""


_PLAIN = {"·": "|", "…": "...", "━": "=", "╌": "-", "×": "x", "→": "->", "±": "+-", "≤": "<=", "≥": ">=", "²": "^2"}
_PLAIN |= {"–": "-", "—": "-", "−": "-", "λ": "lambda", "σ": "sigma", "τ": "tau", "θ": "theta", "µ": "u", "\ufffd": "?"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if _is_terminal(sys.stdout) else text


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns
