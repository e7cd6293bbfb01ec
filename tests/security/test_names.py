"""Names are somebody else's words: they are shown, never obeyed, and they stay inside their folder."""

from __future__ import annotations

import html.parser
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from tiny import TRAIN, write_config, write_images

from frugalvit import cli, console
from frugalvit.training.runs import new_run_folder

EVIL = ("<script>alert(1)", '"><img src=x onerror=alert(1)>', "{{7*7}}${7*7}'`")


class Tags(html.parser.HTMLParser):
    """The elements of a page, and those of their attributes that run or fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.risky: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            fetched = name in ("src", "href") and not (value or "").startswith(("data:", "#"))
            if name.startswith("on") or fetched:
                self.risky.append(f"{tag} {name}={value}")


def report_of(folder: Path, classes: tuple[str, ...]) -> tuple[Tags, str]:
    images = write_images(folder / "images", classes=classes)
    config = write_config(folder / "config.yaml", TRAIN, steps=2, report=True)
    words = ["train", str(images), "--config", str(config), "--out", str(folder / "run"), "--device", "cpu", "--quiet"]
    assert cli.main(words) == 0
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    found = Tags()
    found.feed(page)
    return found, page


def test_classes_with_markup_are_only_text(tmp_path: Path) -> None:
    plain, _ = report_of(tmp_path / "plain", ("cat", "dog", "horse"))
    marked, page = report_of(tmp_path / "marked", EVIL)
    assert marked.tags.count("script") == plain.tags.count("script")
    assert marked.risky == plain.risky == []
    assert "&lt;script&gt;alert(1)" in page and "<script>alert(1)" not in page


def test_escape_sequences_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither through mistakes, nor through warnings about files; half a letter (a name in no encoding) passes too."""
    name = "a\x1b]0;title\x07\x1b[31m\udcff.png"
    assert cli.main(["train", name]) == 2
    console.warn(f"left out: {name}")
    console.say(name)
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and said.count(".png") >= 3


@pytest.mark.parametrize("word", ["../../outside", "/etc/passwd", "..", "a\0b", "con\n\x1b[31mred", "~root"])
def test_a_run_folders_name_stays_inside(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder(None, word)
    assert folder.resolve().parent == tmp_path / "runs" and folder.name.isprintable()
