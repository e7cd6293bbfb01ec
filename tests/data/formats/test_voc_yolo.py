"""Pascal VOC and YOLO layouts are read like the same objects in COCO format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.data.formats.coco import open_coco
from frugalvit.errors import UserError
from frugalvit.tasks.dense.annotation_kind import find_annotation_kind
from helpers.dense_runs import detect_config
from helpers.dense_samples import draw, make_coco

COUNTS = {"train": 6, "val": 2}


def shapes(split: str) -> list[tuple[np.ndarray, list[tuple[str, np.ndarray]]]]:
    random = np.random.default_rng(list(COUNTS).index(split))
    return [draw(random, 48) for _ in range(COUNTS[split])]


def box_of(inside: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(inside)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_voc(root: Path) -> Path:
    for split in COUNTS:
        for number, (pixels, objects) in enumerate(shapes(split)):
            save(pixels, root / "JPEGImages" / f"{split}_{number}.png")
            entries = ""
            for name, inside in objects:
                left, top, right, bottom = box_of(inside)
                box = f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
                entries += f"<object><name>{name}</name><difficult>0</difficult><bndbox>{box}</bndbox></object>"
            write(root / "Annotations" / f"{split}_{number}.xml", f"<annotation>{entries}</annotation>")
        names = "\n".join(f"{split}_{number}" for number in range(COUNTS[split]))
        write(root / "ImageSets" / "Main" / f"{split}.txt", names)
    return root


def make_yolo(root: Path) -> Path:
    for split in COUNTS:
        for number, (pixels, objects) in enumerate(shapes(split)):
            save(pixels, root / "images" / split / f"{number}.png")
            lines = []
            for name, inside in objects:
                left, top, right, bottom = (value / 48 for value in box_of(inside))
                box = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
                lines.append(" ".join(map(str, (["square", "disc"].index(name), *box))))
            write(root / "labels" / split / f"{number}.txt", "\n".join(lines) + "\n")
    write(root / "data.yaml", "train: images/train\nnames: [square, disc]\n")
    return root


LAYOUTS: dict[str, Callable[[Path], Path]] = {"voc": make_voc, "yolo": make_yolo}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_are_those_of_the_objects(layout: str, tmp_path: Path) -> None:
    data = open_coco(str(LAYOUTS[layout](tmp_path / "data")), "given")
    assert set(data.classes) == {"square", "disc"}
    assert {split: len(part) for split, part in data.splits.items()} == COUNTS
    names = {number: name for name, number in zip(data.classes, data.category_ids, strict=True)}
    for image, (_, objects) in zip(data.splits["train"], shapes("train"), strict=True):
        for entry, (name, inside) in zip(image.objects, objects, strict=True):
            left, top, right, bottom = box_of(inside)
            assert entry["bbox"] == pytest.approx([left, top, right - left, bottom - top], abs=1e-3)
            assert names[entry["category_id"]] == name and "segmentation" not in entry


@pytest.mark.runs
@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_eval_and_predict(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eval scores the val of the training, also where training made it."""
    data, run = LAYOUTS[layout](tmp_path / "data"), tmp_path / "run"
    config = tmp_path / "config.yaml"
    values: dict[str, Any] = detect_config(data, run, steps=2).model_dump(mode="json", exclude_unset=True)
    config.write_text(json.dumps({name: value for name, value in values.items() if name not in ("data", "out")}))
    assert cli.main(["detect", "train", str(data), "--config", str(config), "--out", str(run), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert cli.main(["detect", "eval", str(run), str(data), "--device", "cpu", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    same = ("box_ap", "scored_on", "scored_images", "box_ap_interval")
    assert [scored[name] for name in same] == [trained[name] for name in same]
    picture = next(path for path in data.rglob("*.png") if "Masks" not in str(path))
    words = ["detect", "predict", str(run), str(picture), "--out", str(tmp_path / "found"), "--device", "cpu"]
    assert cli.main(words) == 0 and (tmp_path / "found" / "detections.json").is_file()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_proposes_detect(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of masks or labels beside a folder of images is not two classes."""
    data = LAYOUTS[layout](tmp_path / "data")
    kind = find_annotation_kind(data)
    assert kind is not None and kind.verb == "detect" and "objects" in kind.text
    assert cli.main(["train", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "frugalvit detect train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labels/train/0.txt", "0 0.5 0.5", "labels/train/0.txt, line 1"),
        ("labels/train/0.txt", "0 12 30 200 100", "labels/train/0.txt, line 1"),
        ("labels/train/0.txt", "cat 0.5 0.5 0.1 0.1", "labels/train/0.txt, line 1"),
        ("images/train/0.xml", "<annotation><object>", "0.xml"),
        ("images/train/0.xml", '<!DOCTYPE a [<!ENTITY b "c">]><annotation/>', "0.xml"),
    ],
)
def test_mistakes_name_the_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    data = make_yolo(tmp_path / "data")
    write(data / name, text)
    with pytest.raises(UserError, match=message):
        open_coco(str(data))


def test_coco_files_come_first(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", train=2, val=1)
    write(data / "labels" / "a.txt", "0 0.5 0.5 0.1 0.1")
    assert open_coco(str(data)).classes == ("square", "disc")
