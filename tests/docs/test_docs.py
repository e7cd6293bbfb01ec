"""Every command and every Python block of the documentation runs; names and links exist."""

import ast
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
import uvicorn
import yaml
from PIL import Image

from conftest import RUNS
from frugalvit.backbones import create_backbone
from frugalvit.cli import main as cli
from frugalvit.cli import parser as parser
from helpers.dense_samples import make_coco, make_scenes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "frugalvit"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
LAUNCHERS = {"srun", "time", "nice"}
SHELL = ("bash", "console")
# Options that make the commands of the pages short.
TRAINING = {"steps": "2", "batch": "8", "img-size": "32", "device": "cpu", "report": None}
HEADS = {"matching.prototypes": "16", "matching.hidden": "16", "matching.bottleneck": "8"}
CROPS = {"crops.local-crops": "2", "crops.local-size": "16"}
SCENES = {"steps": "1", "batch": "2", "img-size": "64", "device": "cpu", "report": None}
SHORT_OPTIONS: dict[str, dict[str, str | None]] = {  # None: the option is switched off
    "train": TRAINING,
    "pretrain": TRAINING | HEADS | CROPS,
    "distil": TRAINING,
    "compare": TRAINING | {"seeds": "1"},
    "detect train": SCENES | {"detector.channels": "16", "detector.proposals": "20"},
    "segment train": SCENES | {"decoder.channels": "16"},
    "advise": {"trial": "1", "device": "cpu"},
    "bench": {"steps": "1", "batch": "1", "img-size": "64", "reference": "none"},
    "demo": {"seeds": "1", "epochs": "1"},
}
# Options that need other processes, a network or hours, and their number of values.
REMOVED_OPTIONS = {"devices": 1, "nodes": 1, "epochs": 1, "pretrained": 0, "push": 1, "private": 0, "int8": 0}


class Block(NamedTuple):
    """A fenced block: its language, its text and its first line."""

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


def shell_lines(block: Block) -> Iterator[list[str]]:
    """Yield the shell commands of a block; in a console block they follow a prompt."""
    if block.language not in SHELL:
        return
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        if block.language != "bash" and not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the frugalvit commands of a block, without the variables and launchers before them."""
    for words in shell_lines(block):
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
    if "--config" in rest:  # a file of the reader
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


# -- every block runs


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader: all data and runs that the pages name."""
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
    rows = [(f"photos/{name}/image_{i:05d}.jpg", name) for i in range(10) for name in ("cat", "dog")]
    plants = [*rows[:12], *((path, "") for path, _ in rows[12:])]
    (folder / "plants.csv").write_text("\n".join(["photo,species", *map(",".join, plants)]))
    tags = [(path, "cat|pet" if name == "cat" else name) for path, name in rows]
    ages = [(path, str(number)) for number, (path, _) in enumerate(rows)]
    for table, column, cells in (("tags.csv", "label", tags), ("ages.csv", "age", ages)):
        (folder / table).write_text("\n".join([f"path,{column}", *map(",".join, cells)]))
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
    assert cli.main(shorten(["pretrain", images, "--backbone", "swin_nano", "--out", features])) == 0
    assert cli.main(shorten(["train", photos, "--init", features, "--out", str(runs / "photos")])) == 0
    for name in ("classifier", "RUN"):
        shutil.copytree(runs / "photos", runs / name)
    return folder


def write_images(folder: Path, count: int, kind: str = "jpg", first: int = 0) -> None:
    random = np.random.default_rng(count)
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        pixels = random.integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"image_{number:05d}.{kind}")


def shorten(words: list[str]) -> list[str]:
    """Return the command of a page with small values."""
    verb = cli.find_command(words)
    assert verb is not None
    changes = SHORT_OPTIONS.get(verb.name, {})
    words = words[: words.index(">")] if ">" in words else words  # the shell's redirection
    out = _without(words, dict.fromkeys(changes, 1) | REMOVED_OPTIONS)
    if "--resume" in out and out[out.index("--resume") + 1] == "auto":  # it starts here
        out = _without(out, {"resume": 1})
    if verb.name == "export":  # ONNX takes ten seconds, and tests/export/test_onnx.py has it
        out = ["timm" if word == "onnx" else word for word in out]
    if "--suspicious" in out:  # a network's name means weights from the hub
        out[out.index("--suspicious") + 1] = "runs/features"
    if "--select" in out:  # there are few images
        out[out.index("--select") + 1] = "4"
    is_new = not {"--init", "--continue", "--resume", "--backbone"} & set(out)
    if is_new and verb.name.split()[-1] in ("train", "pretrain", "compare"):
        changes = changes | {"backbone": "swin_nano"}
    if "--continue" in out:
        changes = changes | {"steps": "4"}  # it must be longer than the run before
    if {"--recipe", "--init"} <= set(out):  # the recipe names a larger network than that of the weights
        changes = changes | {"backbone": "swin_nano"}
    if "instances" in out:  # a method without heads and crops
        changes = {name: value for name, value in changes.items() if not name.startswith(("matching", "crops"))}
    if "--resume" in out:  # with its own options
        changes = {"device": "cpu"}
    for name, value in changes.items():
        out += [f"--no-{name}"] if value is None else [f"--{name}", value]
    return [word.replace("{000000..000127}", "{000000..000000}") for word in out]


def _without(words: list[str], names: dict[str, int]) -> list[str]:
    """Remove options; ``names`` has their numbers of values."""
    out, skip = [], 0
    for word in words:
        if word.removeprefix("--") in names and word.startswith("--"):
            skip = names[word.removeprefix("--")]
        elif skip:
            skip -= 1
        else:
            out.append(word)
    return out


# A transcript, and guides that train full-size or many networks: only with --slow.
GUIDES = ("small_images", "few_labels", "no_labels", "segmentation", "detection", "many_nodes", "one_gpu", "choosing")
LONG = ("docs/FIRST_HOUR.md", *(f"docs/guides/{name}.md" for name in (*GUIDES, "labels", "answers")))
WITH_BLOCKS = [
    pytest.param(page, id=page_id(page), marks=[pytest.mark.slow] * (page_id(page) in LONG))
    for page in PAGES
    if list(blocks(page)) and page.name != "RESULTS.md"  # full experiments: only parsed
]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_run(
    page: Path, reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run every command and every Python block of a page, in order."""
    for entry in reader.iterdir():
        if entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    if "runs/" in page.read_text(encoding="utf-8"):
        shutil.copytree(reader / "runs", tmp_path / "runs", ignore=_ignore_outputs(page))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn, "run", lambda *_, **__: None)  # serve would wait for photos
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            padding = "\n" * block.line  # a traceback then names the line of the page
            exec(compile(padding + block.text, page_id(page), "exec"), names)
        for words in shell_lines(block):
            if words[:2] == ["python", "-c"]:
                subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        for words in commands(block):
            status = cli.main(shorten(words))
            assert status == 0, f"{page_id(page)}:{block.line}: {shlex.join(words)}\n{capsys.readouterr().err}"


def _ignore_outputs(page: Path) -> Any:
    """Ignore the runs that the page makes itself."""
    outputs = re.findall(r"--out runs/([\w-]+)", page.read_text(encoding="utf-8"))
    return shutil.ignore_patterns(*outputs) if outputs else None


def symbols(path: Path) -> set[str]:
    """Return the names that a file defines; methods as ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_papers_name_existing_symbols() -> None:
    text = (DOCS / "papers.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", text)
    assert len(named) > 80
    paths = [(ROOT if file.startswith("benchmarks/") else SOURCE) / file for file, _ in named]
    missing = [
        f"{path}::{name}"
        for path, (_, name) in zip(paths, named, strict=True)
        if not path.exists() or name not in symbols(path)
    ]
    missing += [file for file in re.findall(r"`(recipes/[\w-]+\.yaml)`", text) if not (SOURCE / file).exists()]
    assert not missing


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


def test_makefile_and_tiers_name_existing_tests() -> None:
    named = re.findall(r"tests/[\w/.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))
    missing = [path for path in named if not (ROOT / path).exists()]
    missing += [start for start in RUNS if not any(ROOT.glob(f"tests/{start}*"))]
    assert named and not missing


def test_every_test_is_in_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len({"unit", "runs", "slow"} & {marker.name for marker in item.iter_markers()}) == 1, item.nodeid


def test_navigation_names_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from pages(inner)

    listed = set(pages(navigation))
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert written == listed, "mkdocs.yml must list every page"


def test_the_site_builds(tmp_path: Path) -> None:
    """Every page, every link to the source and every name of the API exists."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "papers" / "index.html").is_file()
