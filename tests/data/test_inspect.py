"""``frugalvit data`` reports counts, sizes and duplicates, and names unreadable files with reasons."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.config.data import DataConfig
from frugalvit.data.inspect import command

random = np.random.default_rng(0)


def encoded(format_name: str, size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    pixels = random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, format_name, **options)
    return buffer.getvalue()


def damaged_png() -> bytes:
    content = bytearray(encoded("PNG"))
    content[200:260] = bytes(60)
    return bytes(content)


UNREADABLE = {
    "empty.jpg": (b"", "empty"),
    "page.jpg": (b"<html><body>Not found</body></html>", "not an image"),
    "short.jpg": (encoded("JPEG", (200, 200))[:5000], "truncated"),
    "short.png": (encoded("PNG")[:900], "truncated"),
    "short.webp": (encoded("WEBP")[:300], "damaged"),
    "short.gif": (encoded("GIF")[:400], "damaged"),
    "damaged.png": (damaged_png(), "damaged"),
    "phone.heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 5), ("val", 2)):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(count):
                (tmp_path / split / label / f"{i}.png").write_bytes(encoded("PNG", (20 + i, 10 + i)))
    return tmp_path


@pytest.mark.parametrize(
    ("decode", "undetected"), [("all", set()), ("headers", {"damaged.png"})], ids=["all", "headers"]
)
def test_unreadable_files_have_reasons(photos: Path, decode: Any, undetected: set[str]) -> None:
    for name, (content, _) in UNREADABLE.items():
        (photos / "train" / "cat" / name).write_bytes(content)
    (photos / "train" / "cat" / "dead.jpg").symlink_to(photos / "nowhere.jpg")
    unreadable = command(DataConfig(data=str(photos), decode=decode)).data["bad"]
    reasons = {Path(entry["name"]).name: entry["reason"] for entry in unreadable}
    assert set(reasons) == {*UNREADABLE, "dead.jpg"} - undetected and "missing" in reasons["dead.jpg"]
    assert all(UNREADABLE[name][1] in reason for name, reason in reasons.items() if name in UNREADABLE)


def test_counts_sizes_formats_and_duplicates(photos: Path) -> None:
    (photos / "val" / "cat" / "again.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())
    (photos / "train" / "dog" / "again.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())
    (photos / "train" / "dog" / "x.jpg").write_bytes(encoded("JPEG", (100, 50)))
    Image.new("L", (9, 9)).save(photos / "train" / "dog" / "grey.png")
    result = command(DataConfig(data=str(photos)))
    data = result.data
    assert data["images"] == 18 and data["classes"] == 2 and data["kind"] == "class folders"
    assert data["splits"]["train"]["counts"] == {"cat": 5, "dog": 8}
    assert data["splits"]["train"]["per_class"] == {"min": 5, "median": 6.5, "max": 8}
    assert data["sizes"]["width"]["max"] == 100 and data["sizes"]["height"]["min"] == 9
    assert data["formats"] == {"PNG": 17, "JPEG": 1} and data["channels"] == {"colour": 17, "grey": 1}
    repeated = data["duplicates"]
    assert repeated["groups"] == 1 and repeated["surplus"] == 2
    assert repeated["across_splits"] == 1 and repeated["across_classes"] == 1
    assert {Path(name).name for name in repeated["examples"][0]} == {"0.png", "again.png"}
    assert data["bad"] == [] and any("two or more splits" in note for note in result.notes)


def test_sampling_is_noted(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frugalvit.data.inspect.SAMPLE", 3)
    monkeypatch.setattr("frugalvit.data.inspect.FULL_DECODE_MEGAPIXELS", 0)
    result = command(DataConfig(data=str(photos)))
    assert result.data["decoded"]["images"] == 3 and "--decode all" in result.notes[-1]


def test_unlabelled_images_have_no_classes(photos: Path) -> None:
    result = command(DataConfig(data=str(photos), label_source="ignore", duplicates=False))
    assert result.data["classes"] is None and "no labels" in result.tables[0].title
    assert result.data["duplicates"] is None


def test_loose_images_are_inspected(photos: Path) -> None:
    (photos / "train" / "loose.jpg").write_bytes(b"just some words\n")
    (photos / "train" / "copy.png").write_bytes(next((photos / "train" / "cat").glob("*.png")).read_bytes())
    result = command(DataConfig(data=str(photos)))
    assert [(Path(entry["name"]).name, entry["split"]) for entry in result.data["bad"]] == [("loose.jpg", "train")]
    assert result.data["loose"] == {"train": 2}
    assert ["train, unlabelled", 2] in [row[:2] for row in result.tables[0].rows]
    assert any("copy.png" in name for group in result.data["duplicates"]["examples"] for name in group)
    assert any("2 unlabelled images" in note for note in result.notes)


def test_data_command(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "train" / "cat" / b"\xff\x1b[31m.png".decode("utf-8", "surrogateescape")).write_bytes(b"x")
    assert cli.main(["data", str(photos), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["images"] == 15 and len(data["bad"]) == 1
    assert cli.main(["data", str(photos)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1 unreadable file\n") == 1 and "; 1 unreadable file. " in printed and "\x1b" not in printed
    assert cli.main(["data", str(photos / "missing")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "No folder" in error
