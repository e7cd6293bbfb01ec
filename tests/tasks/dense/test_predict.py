"""detect predict and segment predict: what they write, and that they overwrite nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval import COCO
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.tasks.dense.predict_io import unique_names
from frugalvit.tasks.detection import commands
from frugalvit.tasks.detection.commands import annotation_of
from frugalvit.tasks.segmentation import commands as segment_commands


def test_detect_writes_pictures_and_coco_json(
    detector: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--threshold", "0.0", "--out", str(tmp_path / "found"), "--device", "cpu", "--quiet", "--json"]
    assert main(["detect", "predict", str(detector), str(shapes / "images"), *words]) == 0
    result = json.loads(capsys.readouterr().out)["predictions"]
    content = COCO(str(tmp_path / "found" / "detections.json"))
    assert len(content.imgs) == 12 and {c["id"] for c in content.cats.values()} == {3, 17}
    assert len(list((tmp_path / "found").glob("*.jpg"))) == 12
    assert all((tmp_path / "found" / image["picture"]).is_file() for image in content.imgs.values())
    assert [entry["image"] for entry in result] == [image["file_name"] for image in content.imgs.values()]
    assert all(Path(entry["picture"]).is_file() for entry in result)
    assert sum(entry["objects"] for entry in result) == len(content.anns)
    for entry in content.anns.values():
        mask = content.annToMask(entry)
        assert entry["category_id"] in (3, 17) and mask.shape == (48, 48) and entry["area"] == mask.sum()
    least = str(sorted(entry["score"] for entry in content.anns.values())[-3])
    words = ["--threshold", least, "--out", str(tmp_path / "sure"), "--device", "cpu", "--quiet", "--json"]
    assert main(["detect", "predict", str(detector), str(shapes / "images"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == 3


def test_the_area_without_a_mask_is_that_of_the_box() -> None:
    entry = {"label": 2, "score": 0.5, "bbox": [1.0, 2.0, 3.0, 4.0]}
    assert annotation_of(entry, [3, 17]) == {
        "category_id": 17,
        "iscrowd": 0,
        "score": 0.5,
        "bbox": [1.0, 2.0, 3.0, 4.0],
        "area": 12.0,
    }


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_an_interrupted_predict_keeps_its_results(
    kind: str,
    detector: Path,
    segmenter: Path,
    scenes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command: Any = commands if kind == "detect" else segment_commands
    original = command.save_picture

    def stop(picture: Image.Image, path: Path) -> None:
        if path.stem == "2":
            raise KeyboardInterrupt
        original(picture, path)

    monkeypatch.setattr(command, "save_picture", stop)
    run, out = detector if kind == "detect" else segmenter, tmp_path / "out"
    words = [str(scenes / "images" / "val"), "--out", str(out), "--device", "cpu", "--batch", "1"]
    assert main([kind, "predict", str(run), *words]) == 130
    assert f"2 of 4 images are done, in {out}" in capsys.readouterr().err
    pictures = {path.name for path in out.glob("*.jpg")}
    assert pictures == {"0.jpg", "1.jpg"}
    if kind == "detect":
        result = json.loads((out / "detections.json").read_text(encoding="utf-8"))
        assert {image["picture"] for image in result["images"]} == pictures


def test_segment_writes_masks_with_the_labels_of_the_data(
    segmenter: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted((scenes / "images" / "val").iterdir())
    words = ["--out", str(tmp_path / "found"), "--device", "cpu", "--quiet", "--json"]
    assert main(["segment", "predict", str(segmenter), *map(str, images[:2]), *words]) == 0
    mask = np.asarray(Image.open(tmp_path / "found" / "0.png"))
    assert mask.shape == (40, 40) and set(np.unique(mask)) <= {0, 1, 2}
    assert (tmp_path / "found" / "1.jpg").exists()
    result = json.loads(capsys.readouterr().out)
    assert [entry["image"] for entry in result["predictions"]] == [str(path) for path in images[:2]]
    for entry in result["predictions"]:
        assert Path(entry["mask"]).suffix == ".png" and Path(entry["picture"]).is_file()
        assert set(entry["shares"]) <= set(result["classes"]) and sum(entry["shares"].values()) == pytest.approx(
            1, 1e-3
        )
    assert result["predictions"][0]["shares"][result["classes"][mask.flat[0]]] > 0


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_predict_never_overwrites_an_image(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "x.jpg")
    before = (tmp_path / "x.jpg").read_bytes()
    run = detector if kind == "detect" else segmenter
    assert main([kind, "predict", str(run), str(tmp_path), "--out", str(tmp_path), "--device", "cpu", "--quiet"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "x.jpg").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_predict_checks_the_output_folder_first(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "detections.json").write_text("earlier")
    assert main([kind, "predict", "no model", "no image", "--out", str(tmp_path / "out")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "detections.json").read_text() == "earlier"


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_predict_skips_unreadable_images(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.jpg").write_bytes(b"no image")
    words = [kind, "predict", str(detector if kind == "detect" else segmenter), str(tmp_path / "in"), "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 2 and "1 images" in capsys.readouterr().err
    Image.new("RGB", (32, 32)).save(tmp_path / "in" / "good.jpg")
    assert main(words) == 0
    result = capsys.readouterr()
    assert json.loads(result.out)["unreadable"] == [str(tmp_path / "in" / "bad.jpg")] and "bad.jpg" in result.err
    assert (tmp_path / "out" / "good.jpg").exists()


def test_output_names_are_unique() -> None:
    paths = [Path(name) for name in ("a/x.jpg", "b/x.jpg", "b/x_2.jpg", "c/x.png", "c/y.png")]
    assert unique_names(paths) == ["x", "x_3", "x_2", "x_4", "y"]
