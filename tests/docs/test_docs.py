"""The documentation is true: every command and every Python block runs, names and links exist, the pages build."""

import ast
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from frugalvit.backbones import create_backbone
from frugalvit.cli import main as cli
from frugalvit.cli import parser
from helpers.dense_samples import make_coco, make_scenes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "frugalvit"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
LAUNCHERS = {"srun", "time", "nice"}
SHELL = ("bash", "console")
# What a command gets when it is run here, whatever the page says: the reader has more time and more hardware.
TRAINING = {"steps": "2", "batch": "8", "img-size": "32", "device": "cpu", "report": None}
HEADS = {"matching.prototypes": "16", "matching.hidden": "16", "matching.bottleneck": "8"}
CROPS = {"crops.local-crops": "2", "crops.local-size": "16"}
SCENES = {"steps": "1", "batch": "2", "img-size": "64", "device": "cpu", "report": None}
SHORTER: dict[str, dict[str, str | None]] = {  # None: the option is switched off
    "train": TRAINING,
    "pretrain": TRAINING | HEADS | CROPS,
    "compare": TRAINING | {"seeds": "1"},
    "detect train": SCENES | {"detector.channels": "16", "detector.proposals": "20"},
    "segment train": SCENES | {"decoder.channels": "16"},
    "advise": {"trial": "1", "device": "cpu"},
    "bench": {"steps": "1", "batch": "1", "img-size": "64", "reference": "none"},
    "demo": {"seeds": "1", "epochs": "1"},
}
# Options that ask for what a test cannot have: other processes, a network, hours.
LEFT_OUT = {"devices": 1, "nodes": 1, "epochs": 1, "pretrained": 0}
# These are tried elsewhere, or need what is not here: an index of packages, the rest of a table.
NOT_RUN = {
    "pip": "tests/test_wheel.py installs",
    "python": "'python -c' is run, 'python -m venv' makes an environment",
    ".": "enters the environment",
    "make": "its targets are checked",
    "if": "asks for the status of the command before it",
    "status=$?": "keeps the status of the command before it",
    "tensorboard": "a server, which does not end",
}


class Block(NamedTuple):
    """A fenced block: its language, its text and the line it begins at."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = re.fullmatch(r"```(\w*).*", lines[number])
        if not opening:
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i].startswith("```"))
        yield Block(opening[1], "\n".join(lines[number + 1 : end]), number + 1)
        number = end + 1


def lines_to_type(block: Block) -> Iterator[list[str]]:
    """The commands in a block, as words; of a console block those behind a prompt, since the rest is output."""
    if block.language not in SHELL:
        return
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        if block.language != "bash" and not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


def commands(block: Block) -> Iterator[list[str]]:
    """The frugalvit commands in a block; variables and launchers before them are left out."""
    for words in lines_to_type(block):
        for name in ("frugalvit", "frugalvit.cli"):
            before = words[: words.index(name)] if name in words else None
            if before is not None and (name != "frugalvit" or all("=" in w or w in LAUNCHERS for w in before)):
                yield words[words.index(name) + 1 :]
                break


def parse(words: list[str]) -> None:
    if not words or words[0] in ("--help", "--version"):
        return
    verb = cli.find_command(words)
    if verb is None or "--help" in words:
        return
    rest = words[len(verb.name.split()) :]
    if "--config" in rest:  # the file is the reader's
        del rest[rest.index("--config") : rest.index("--config") + 2]
    parser.parse(verb.load_config(), rest, f"frugalvit {verb.name}", verb.help)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_parse(page: Path) -> None:
    refused = []
    for block in blocks(page):
        for words in commands(block):
            try:
                parse(words)
            except Exception as error:
                refused.append(f"{page_id(page)}:{block.line}: frugalvit {shlex.join(words)}: {error}")
    assert refused == []


def test_no_command_is_shown_that_nobody_tries() -> None:
    """Commands stand in bash or console blocks; elsewhere readers would see them and no test would."""
    for page in PAGES:
        for block in blocks(page):
            for words in lines_to_type(block):
                known = words[0] in NOT_RUN or "frugalvit" in words or "frugalvit.cli" in words
                assert known, f"{page_id(page)}:{block.line}: nobody tries '{shlex.join(words)}'"
            if block.language not in SHELL:
                assert not re.search(r"^(\$ |frugalvit )", block.text, re.MULTILINE), f"{page_id(page)}:{block.line}"
        outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^    (\$|frugalvit|pip|python|make|tensorboard) ", outside, re.MULTILINE), page_id(page)


def test_make_has_the_targets_that_are_named() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`make ([a-z]+)`", text) + re.findall(r"^make ([a-z]+)", text, re.MULTILINE)
        assert set(named) <= set(targets), page_id(page)


def test_inline_commands_name_real_verbs() -> None:
    for page in PAGES:
        if page.name == "extending.md":  # adds its own commands
            continue
        for words in re.findall(r"`frugalvit ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
            assert cli.find_command(words.split()), words


# -- every block runs


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: images in all the forms the pages speak of, and the runs they go on from."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("photos/cat", "photos/dog", "others/cat", "others/dog", "digits/0", "digits/1"):
        write_images(folder / name, 10)
    for name in ("train/apple", "train/bear", "test/apple", "test/bear"):
        write_images(folder / "cifar100" / name, 10)
    for split in ("train", "valid", "test"):
        write_images(folder / "flowers102" / split / "001", 4, "webp")
        write_images(folder / "flowers102" / split / "077", 4, "webp")
        write_images(folder / "flowers102" / split / "102", 4, "webp", first=8000)
    for name in ("images", "imagenet/train/n01440764", "imagenet/train/n01443537"):
        write_images(folder / name, 8)
    for name in ("photo.jpg", "a.jpg", "b.jpg"):
        shutil.copy(folder / "photos/cat/image_00001.jpg", folder / name)
    make_coco(folder / "coco_mini")
    make_coco(folder / "coco")
    for name in ("camvid", "ADEChallengeData2016"):
        make_scenes(folder / name)
        for kind in ("images", "masks"):
            shutil.copytree(folder / name / kind / "val", folder / name / kind / "test")
    swin = create_backbone("swin_tiny_w7", img_size=32, num_classes=2)
    torch.save({"model": swin.model.state_dict()}, folder / "checkpoint.pth")
    features, runs = str(folder / "runs" / "features"), folder / "runs"
    images, photos = str(folder / "images"), str(folder / "photos")
    assert cli.main(shortened(["pretrain", images, "--backbone", "swin_nano", "--out", features])) == 0
    assert cli.main(shortened(["train", photos, "--init", features, "--out", str(runs / "photos")])) == 0
    for name in ("classifier", "RUN"):
        shutil.copytree(runs / "photos", runs / name)
    return folder


def write_images(folder: Path, count: int, kind: str = "jpg", first: int = 0) -> None:
    random = np.random.default_rng(count)
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        pixels = random.integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"image_{number:05d}.{kind}")


def shortened(words: list[str]) -> list[str]:
    """A command as it is run here: the page's own words, less what no test can have, with small values."""
    verb = cli.find_command(words)
    assert verb is not None
    changes = SHORTER.get(verb.name, {})
    out = _without(words, dict.fromkeys(changes, 1) | LEFT_OUT)
    if "--resume" in out and out[out.index("--resume") + 1] == "auto":  # it begins here
        out = _without(out, {"resume": 1})
    if "--select" in out:  # there are few images here
        out[out.index("--select") + 1] = "4"
    begins = not {"--init", "--continue", "--resume", "--backbone"} & set(out)
    if begins and verb.name.split()[-1] in ("train", "pretrain", "compare"):
        changes = changes | {"backbone": "swin_nano"}
    if "--continue" in out:
        changes = changes | {"steps": "4"}  # a run that goes on must be longer than the one before
    if {"--recipe", "--init"} <= set(out):  # the recipe names the papers' network; the weights here are a small one's
        changes = changes | {"backbone": "swin_nano"}
    if "--resume" in out:  # with what it was begun with
        changes = {"device": "cpu"}
    for name, value in changes.items():
        out += [f"--no-{name}"] if value is None else [f"--{name}", value]
    return [word.replace("{000000..000127}", "{000000..000000}") for word in out]


def _without(words: list[str], names: dict[str, int]) -> list[str]:
    """Words less some options, each with so many values."""
    out, skip = [], 0
    for word in words:
        if word.removeprefix("--") in names and word.startswith("--"):
            skip = names[word.removeprefix("--")]
        elif skip:
            skip -= 1
        else:
            out.append(word)
    return out


# A transcript of what was done, and guides whose commands train full-size networks and stand elsewhere: with --slow.
GUIDES = ("small_images", "few_labels", "no_labels", "segmentation", "detection", "many_nodes", "one_gpu", "choosing")
LONG = ("docs/FIRST_HOUR.md", *(f"docs/guides/{name}.md" for name in GUIDES))
WITH_BLOCKS = [
    pytest.param(page, id=page_id(page), marks=[pytest.mark.slow] * (page_id(page) in LONG))
    for page in PAGES
    if list(blocks(page)) and page.name != "RESULTS.md"  # whole experiments: their words are parsed, as all are
]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_run(
    page: Path,
    reader: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every command and every Python block, in the page's order, in a reader's folder."""
    for entry in reader.iterdir():
        if entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    if "runs/" in page.read_text(encoding="utf-8"):
        shutil.copytree(reader / "runs", tmp_path / "runs", ignore=_made_by(page))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            padding = "\n" * block.line  # so that a traceback names the line of the page
            exec(compile(padding + block.text, page_id(page), "exec"), names)
        for words in lines_to_type(block):
            if words[:2] == ["python", "-c"]:
                subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        for words in commands(block):
            status = cli.main(shortened(words))
            assert status == 0, f"{page_id(page)}:{block.line}: {shlex.join(words)}\n{capsys.readouterr().err}"


def _made_by(page: Path) -> Any:
    """The runs that a page makes itself must not be there before."""
    made = re.findall(r"--out runs/([\w-]+)", page.read_text(encoding="utf-8"))
    return shutil.ignore_patterns(*made) if made else None


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


def test_the_tables_of_scaling_are_what_the_benchmark_prints() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "scaling.py")]
    printed = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    rows = [line for line in printed.splitlines() if re.match(r"\| (?!---|data)", line)]
    page = (DOCS / "SCALING.md").read_text(encoding="utf-8")
    assert len(rows) == 12 and all(f"{row}\n" in page for row in rows)


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
        for file in re.findall(r"`([\w/]+\.(?:py|yaml))(?:::[\w.]+)?`", text):  # short for src/frugalvit/…
            if (SOURCE / file.partition("/")[0]).is_dir() and not (SOURCE / file).exists():
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


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed; it comes with the docs extra")
    site = tmp_path / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    reference = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert "the final tokens at their positions in the image" in reference, "docstrings are shown"
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("")
        assert (site / ("" if name.name == "index" else name) / "index.html").exists(), name
    linked = re.findall(r'href="\.\./(source/[^"#]+)#(__codelineno-0-\d+)"', (site / "papers/index.html").read_text())
    pages = {page: (site / page / "index.html").read_text(encoding="utf-8") for page, _ in linked}
    assert len(linked) > 80 and all(f'id="{line}"' in pages[page] for page, line in linked), "a sentence's line is gone"


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
