"""Names from files are shown, never interpreted, and stay inside their folder."""

import html.parser
import io
import json
import sys
from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import new_run_folder
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table
from helpers.tiny_runs import TRAIN, write_config, write_images

EVIL = ("<script>alert(1)", '"><img src=x onerror=alert(1)>', "{{7*7}}${7*7}'`")
ESCAPES = "a\x1b]0;title\x07\x1b[31m\x9b2J\udcff"


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
    tags = Tags()
    tags.feed(page)
    return tags, page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("names")


@pytest.fixture(scope="module")
def odd(folder: Path) -> tuple[str, ...]:
    """Names of bytes in no encoding, if the file system allows them."""
    names = ("caf\udce8", "caf\udce9")
    try:
        (folder / names[0]).touch()
    except OSError:
        return ()
    return names


@pytest.fixture(scope="module")
def marked(folder: Path, odd: tuple[str, ...]) -> tuple[Tags, str]:
    return report_of(folder / "marked", EVIL + odd)


def test_markup_in_class_names_is_text(tmp_path: Path, marked: tuple[Tags, str]) -> None:
    plain, other = report_of(tmp_path / "plain", ("cat", "dog", "horse"))
    tags, page = marked
    # Each chart has one; equal curves share a chart.
    counts = [
        found.tags.count("script") - text.count('class="chart"') for found, text in ((tags, page), (plain, other))
    ]
    assert counts[0] == counts[1]
    assert tags.risky == plain.risky == []
    assert "&lt;script&gt;alert(1)" in page and "<script>alert(1)" not in page


def test_names_outside_of_any_encoding(
    folder: Path, odd: tuple[str, ...], marked: tuple[Tags, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As class folders and image files, in the report and the look commands."""
    if not odd:
        pytest.skip("this file system has only names in an encoding")
    assert all(name in marked[1] for name in (r"caf\udce8", r"caf\udce9")), "two classes have different names"
    monkeypatch.chdir(folder)
    image = folder / "marked" / "images" / "val" / odd[0] / "0.png"
    image = image.rename(image.with_name("photo \udce9.png"))
    run, given = str(folder / "marked" / "run"), ["--device", "cpu", "--quiet"]
    assert cli.main(["look", "attend", run, str(image), *given]) == 0
    assert cli.main(["look", "explore", run, str(image), *given]) == 0
    assert cli.main(["report", run, "--images", str(image), *given]) == 0
    assert cli.main(["report", run, "--quiet"]) == 0, "what was seen does not harm the run"
    page = (folder / "marked" / "run" / "report.html").read_text(encoding="utf-8")
    assert "photo \N{REPLACEMENT CHARACTER}" in page


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_escape_sequences_do_not_reach_standard_output(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is printed in any encoding; JSON holds the exact name."""
    name = f"{ESCAPES}\nünd\t漢字"
    result = CommandResult({"class": name}, [Table([name, "n"], [[name, 1]], name)], [name])
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    console.print_result(result)
    stream.flush()
    shown = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert len(shown.splitlines()) == 6, "a title, the columns, a row, an empty line, and a note of two lines"
    assert set(shown) <= {letter for letter in shown if letter.isprintable()} | {"\n", "\t"}
    start = len(stream.buffer.getvalue())  # type: ignore[attr-defined]
    console.print_json(result.data)
    stream.flush()
    text = stream.buffer.getvalue()[start:].decode(encoding)  # type: ignore[attr-defined]
    assert text.rstrip("\n").isprintable() and json.loads(text) == {"class": name}


@pytest.mark.parametrize(
    "name", ["Bildschirmfoto 9.41\u202fPM", "a\u00a0b", "می\u200cخواهم", "\U0001f469\u200d\U0001f33e"]
)
def test_spaces_and_joiners_are_kept(name: str) -> None:
    assert console.sanitize(name) == name
    assert console.sanitize(f"{name}\x1b[31m\u202e") == f"{name}\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("name", "columns"), [("日本 花", 7), ("cafe\u0301", 4), ("한글", 4), ("\u1112\u1161\u11ab", 2)]
)
def test_columns_of_a_table_are_aligned(name: str, columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(Table(["class", "images"], [[name, "many"], ["plain name", "few"]]))
    _, foreign, plain, *_ = capsys.readouterr().out.splitlines()
    assert foreign == f"{name}{' ' * (12 - columns)}many" and plain == "plain name  few"


def test_escape_sequences_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither through errors nor through warnings about files."""
    name = f"{ESCAPES}.png"
    assert cli.main(["train", name]) == 2
    console.warning(f"left out: {name}")
    console.info(name)
    print(console.ProgressBar(2, name).label, file=sys.stderr)
    printed = capsys.readouterr().err
    assert "\x1b" not in printed and "\x07" not in printed and printed.count(".png") >= 4


@pytest.mark.parametrize("word", ["../../outside", "/etc/passwd", "..", "a\0b", "con\n\x1b[31mred", "~root"])
def test_run_folder_stays_inside_of_runs(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder(None, word)
    assert folder.resolve().parent == tmp_path / "runs" and folder.name.isprintable()


def test_run_folder_is_valid_utf8(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        new_run_folder(str(tmp_path / "\udce9"), "photos")
