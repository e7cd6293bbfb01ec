"""What is said while a program runs must not end it, whatever stands in for a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from frugalvit.utils import console


class ToLog:
    """As people write them: nothing but what print needs."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, ToLog, closed], ids=["none", "own", "closed"])
def test_any_standard_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    console.info("said")
    console.warning("warned")
    with console.Spinner("waiting"):
        assert list(console.progress(range(3), label="counted")) == [0, 1, 2]
    if isinstance(stream, ToLog):
        assert "said" in stream.text and "warning: warned" in stream.text


def test_a_standard_output_that_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ToLog()
    monkeypatch.setattr(sys, "stdout", stream)
    console.print_table(console.Table(["name"], [["a"]]))
    assert "name" in stream.text and "\x1b" not in stream.text
