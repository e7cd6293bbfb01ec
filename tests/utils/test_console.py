"""Messages must not end a program, whatever standard error is, and only rank 0 logs."""

import io
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from frugalvit.utils import console


class Log:
    """A stream with the fewest methods that print needs."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.text = ""
        self.is_terminal = is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self.is_terminal


class ClosedTerminal(Log):
    def write(self, text: str) -> int:
        super().write(text)
        raise OSError(5, "Input/output error")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.fixture(autouse=True)
def _rank_zero() -> Iterator[None]:
    yield
    console.set_rank(0)


@pytest.mark.parametrize(
    "make",
    [lambda: None, Log, closed, ClosedTerminal, lambda: ClosedTerminal(True), lambda: Log(True)],
    ids=["none", "log", "closed", "gone", "terminal gone", "terminal"],
)
def test_any_standard_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "_SECONDS_BEFORE_FIRST", 0.0)
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_FRAMES", 0.0)
    console.info("an information")
    console.warning("a problem")
    assert list(console.progress(range(3), label="counting")) == [0, 1, 2]
    if isinstance(stream, Log):
        assert "an information" in stream.text and "warning: a problem" in stream.text


def test_terminal_shows_bars_and_removes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Log(is_terminal=True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "_SECONDS_BEFORE_FIRST", 0.0)
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_FRAMES", 0.0)
    for step in console.progress(range(3), label="[red]name[/red]"):
        time.sleep(0.15)
        console.info(f"step {step} [bold]")
    assert "2/3" in stream.text
    assert "[red]name[/red]" in stream.text and "step 2 [bold]" in stream.text, "names are not markup"
    assert console._live is None


def test_plain_progress_is_one_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Log()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "_SECONDS_BEFORE_FIRST", 0.0)
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.0)
    assert list(console.progress(range(2), label="decoding")) == [0, 1]
    first, second = stream.text.splitlines()
    assert first.startswith("decoding 50 % 1/2") and second.startswith("decoding 100 % 2/2")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_tables(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Log(is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console.print_table(console.Table(["name", "images"], [["[red]cats[/red]\x1b[31m", 3]], "Classes"))
    assert "[red]cats[/red]" in stream.text and "images" in stream.text and "\x1b[31m" not in stream.text
    assert ("\x1b[1" in stream.text) == is_terminal


def test_other_ranks_print_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        console.set_rank(rank)
        console.info("an information")
        console.warning("a problem")
        console.error("an error")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["an information", "warning: a problem", "frugalvit: an error", "frugalvit: rank 1: an error"]


def test_quiet_contexts_may_nest(capsys: pytest.CaptureFixture[str]) -> None:
    with console.quiet():
        with console.quiet():
            pass
        console.info("inside")
    console.info("after")
    assert capsys.readouterr().err == "after\n"
