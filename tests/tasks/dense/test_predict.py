"""detect predict and segment predict: what they write, and that they overwrite nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from faster_coco_eval import COCO
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.tasks.dense.commands import unique_names
from frugalvit.tasks.detection.commands import annotation_of
from helpers.dense_runs import Kind


def test_detect_writes_pictures_and_coco_json(
    detector: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--threshold", "0.0", "--out", str(tmp_path / "all"), "--device", "cpu", "--quiet", "--json"]
    assert main(["detect", "predict", str(detector), str(shapes / "images"), *words]) == 0
    result = json.loads(capsys.readouterr().out)["predictions"]
    content = COCO(str(tmp_path / "all" / "detections.json"))
    assert len(content.imgs) == 12 and {c["id"] for c in content.cats.values()} == {3, 17}
    assert all((tmp_path / "all" / image["picture"]).is_file() for image in content.imgs.values())
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
    wanted = {"category_id": 17, "iscrowd": 0, "score": 0.5, "bbox": [1.0, 2.0, 3.0, 4.0], "area": 12.0}
    assert annotation_of(entry, [3, 17]) == wanted


def test_segment_writes_masks_with_the_labels_of_the_data(
    segmenter: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted((scenes / "images" / "val").iterdir())[:2]
    words = ["--out", str(tmp_path / "out"), "--device", "cpu", "--quiet", "--json"]
    assert main(["segment", "predict", str(segmenter), *map(str, images), *words]) == 0
    mask = np.asarray(Image.open(tmp_path / "out" / "0.png"))
    assert mask.shape == (40, 40) and set(np.unique(mask)) <= {0, 1, 2}
    result = json.loads(capsys.readouterr().out)
    assert [entry["image"] for entry in result["predictions"]] == [str(path) for path in images]
    for entry in result["predictions"]:
        assert Path(entry["mask"]).suffix == ".png" and Path(entry["picture"]).is_file()
        assert set(entry["shares"]) <= set(result["classes"])
        assert sum(entry["shares"].values()) == pytest.approx(1, 1e-3)
    assert result["predictions"][0]["shares"][result["classes"][mask.flat[0]]] > 0


def test_predict_never_overwrites_files(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output folder is checked before model and images."""
    Image.new("RGB", (32, 32)).save(tmp_path / "x.jpg")
    assert main([kind.verb, "predict", "no model", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1


def test_predict_skips_unreadable_images(
    kind: Kind, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.jpg").write_bytes(b"no image")
    words = [kind.verb, "predict", str(model), str(tmp_path / "in"), "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 2 and "(files: 1)" in capsys.readouterr().err
    Image.new("RGB", (32, 32)).save(tmp_path / "in" / "good.jpg")
    assert main(words) == 0
    result = capsys.readouterr()
    assert json.loads(result.out)["unreadable"] == [str(tmp_path / "in" / "bad.jpg")] and "bad.jpg" in result.err
    assert (tmp_path / "out" / "good.jpg").exists()


def test_output_names_are_unique() -> None:
    assert unique_names([Path("a/x.jpg"), Path("a/y.jpg")]) == ["x", "y"]
    paths = [Path(name) for name in ("a/x.jpg", "b/x.jpg", "b/x_2.jpg", "c/x.png")]
    assert unique_names(paths) == ["x_1", "x_2", "x_2_3", "x_4"]
