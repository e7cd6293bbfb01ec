"""The documentation is true: commands parse, marked ones run, Python blocks run, names and links exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

from frugalvit import arguments, cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "frugalvit"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
LAUNCHERS = {"srun", "time", "nice"}
RUN_MARK = "<!-- run -->"

# Commands that are really run get these on top, so that a page can show what people type and the test stays short.
SHORT = {
    "train": ["--steps", "2", "--batch", "8", "--backbone", "swin_nano", "--img-size", "32", "--device", "cpu"],
    "pretrain": [
        *("--steps", "2", "--batch", "4", "--backbone", "swin_nano", "--img-size", "32", "--device", "cpu"),
        *("--crops.local-crops", "2", "--crops.local-size", "16", "--matching.hidden", "16"),
    ],
}


class Block(NamedTuple):
    """A fenced block: its language, its text, the line it begins at, and whether it is to be run."""

    language: str
    text: str
    line: int
    run: bool


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = re.fullmatch(r"```(\w*).*", lines[number])
        if not opening:
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i].startswith("```"))
        marked = number > 0 and lines[number - 1].strip() == RUN_MARK
        yield Block(opening[1], "\n".join(lines[number + 1 : end]), number + 1, marked)
        number = end + 1


def commands(block: Block) -> Iterator[list[str]]:
    """The frugalvit commands in a block, as words; prompts, variables and launchers before them are left out."""
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        if "frugalvit" not in line or (block.language == "console" and not line.startswith("$ ")):
            continue  # in a console block other lines are output
        words = shlex.split(line.removeprefix("$ "), comments=True)
        for name in ("frugalvit", "frugalvit.cli"):
            before = words[: words.index(name)] if name in words else None
            if before is not None and (name != "frugalvit" or all("=" in w or w in LAUNCHERS for w in before)):
                yield words[words.index(name) + 1 :]
                break


def parse(words: list[str]) -> None:
    if not words or words[0] in ("--help", "--version"):
        return
    verb = cli.find_verb(words)
    if verb is None or "--help" in words:
        return
    rest = words[len(verb.words.split()) :]
    if "--config" in rest:  # the file is the reader's
        del rest[rest.index("--config") : rest.index("--config") + 2]
    arguments.parse(cli._load(verb.config), rest, f"frugalvit {verb.words}", verb.help)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("bash", "console", "sh", ""):
            for words in commands(block):
                try:
                    parse(words)
                except Exception as error:
                    pytest.fail(f"{page_id(page)}:{block.line}: frugalvit {shlex.join(words)}: {error}")


def test_inline_commands_name_real_verbs() -> None:
    for page in PAGES:
        for words in re.findall(r"`frugalvit ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
            cli.find_verb(words.split())


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text() or RUN_MARK in p.read_text()], ids=page_id
)
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python blocks and marked commands, in the page's order, in a folder with a few images."""
    monkeypatch.chdir(tmp_path)
    if any(block.run for block in blocks(page)):
        write_images(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            padding = "\n" * block.line  # so that a traceback names the line of the page
            exec(compile(padding + block.text, page_id(page), "exec"), names)
        elif block.run:
            for words in commands(block):
                status = cli.main([*words, *SHORT.get(words[0], [])])
                assert status == 0, f"{page_id(page)}:{block.line}: {shlex.join(words)}\n{capsys.readouterr().err}"


def write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    places = [folder / "photos" / name / f"{i}.jpg" for name in ("cat", "dog") for i in range(10)]
    places += [folder / "images" / f"{i}.png" for i in range(8)] + [folder / "photo.jpg"]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(place)


def symbols(path: Path) -> set[str]:
    """Names a file defines: functions, classes, constants, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_sentence_of_the_papers_has_its_file() -> None:
    text = (DOCS / "papers.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", text)
    assert len(named) > 80
    missing = [
        f"{file}::{name}" for file, name in named if not (SOURCE / file).exists() or name not in symbols(SOURCE / file)
    ]
    missing += [file for file in re.findall(r"`(recipes/[\w-]+\.yaml)`", text) if not (SOURCE / file).exists()]
    assert not missing
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "---" not in line and "| where |" not in line
    ]
    assert all(re.search(r"::|\.yaml", row) for row in rows), "every row names a file"


def test_files_and_links_exist() -> None:
    broken = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+?)(?:#[\w-]+)?\)", text):
            if not (page.parent / link).exists():
                broken.append(f"{page_id(page)}: {link}")
        for file in re.findall(r"`((?:src/frugalvit|examples|tests|docs|notebooks)/[\w/.]+\.\w+)`", text):
            if not (ROOT / file).exists():
                broken.append(f"{page_id(page)}: {file}")
    assert not broken


def test_reference_names_exist() -> None:
    for target in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        module, _, name = target.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:
            found = None
        assert (found or importlib.import_module(target)).__doc__, f"{target} has no docstring"


def test_navigation_names_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from pages(inner)

    listed = set(pages(navigation))
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert written == listed, "pages that no reader finds, or that are not there"


def test_docstrings_keep_their_columns() -> None:
    pytest.importorskip("griffe", reason="griffe is not installed; it comes with the docs extra")
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "tools" / "docstrings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "One of :data:`OWN`.\n\nname   what it is\n       and more\n\nArgs:\n    x:  a number"
    tidied = module.tidy(text)
    assert (
        "One of `OWN`." in tidied
        and "- **name**: what it is and more" in tidied
        and "\nArgs:\n    x:  a number" in tidied
    )
