"""detect eval and segment eval: scores, categories, unreadable images."""

import json
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest

from frugalvit.cli.main import main
from frugalvit.errors import UserError
from frugalvit.tasks.detection import commands
from frugalvit.utils.text import pluralize
from helpers.dense_runs import Kind
from helpers.dense_samples import edit, make_coco, make_scenes


def test_eval_equals_the_scores_of_training(kind: Kind, model: Path, data: Path) -> None:
    scores = kind.evaluate(model, data)
    assert scores[kind.metric] == pytest.approx(json.loads((model / "summary.json").read_text())[kind.metric], abs=1e-6)
    assert scores["scored_images"] == 4 and scores["scored_on"] == "val"


def test_eval_scores_a_single_json_file(detector: Path, shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes without objects are null in JSON and not in the table."""
    scores = Kind("detect").evaluate(detector, shapes / "instances_train.json")
    assert scores["scored_on"] == "instances_train.json" and scores["scored_images"] == 8
    assert scores["box_ap_large"] is None and scores["box_ap_small"] is not None
    assert main(["detect", "eval", str(detector), str(shapes), "--device", "cpu", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("box", "mask"):
        sizes = [line.split(",")[1].split()[0] for line in lines if line.startswith(f"{name} AP,")]
        assert set(sizes) <= {"small"}  # all objects are small, so it may repeat AP


def test_multi_scale_eval_has_both_scores(segmenter: Path, scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--multi-scale", "--test.scales", "0.75", "1", "--json", "--quiet", "--device", "cpu"]
    assert main(["segment", "eval", str(segmenter), str(scenes), *words]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["single_scale_miou"] == pytest.approx(json.loads((segmenter / "summary.json").read_text())["miou"])
    assert 0 <= scores["miou"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("categories", "classes"), [("one", ["object"]), ("super", ["discs", "squares"])])
def test_a_detector_of_merged_categories(categories: str, classes: list[str], tmp_path: Path) -> None:
    data, run = make_coco(tmp_path / "data", side=48), tmp_path / "run"
    for split in ("train", "val"):
        edit(data, split, lambda c: [entry.update(supercategory=entry["name"] + "s") for entry in c["categories"]])
    trained = Kind("detect").train(data, run, categories=categories, steps=2)
    assert Kind("detect").evaluate(run, data)["box_ap"] == pytest.approx(trained["box_ap"], abs=1e-6)
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["classes"] == classes


def test_categories_are_matched_by_name(detector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_coco(tmp_path / "data", side=48)
    for split in ("train", "val"):  # boxes alone, so that perfect ones need no masks
        edit(data, split, lambda content: [entry.pop("segmentation") for entry in content["annotations"]])

    def find(self: Any, dataset: Any) -> list[dict[str, Any]]:
        """Detect the first object of every image, with the label 1: a square."""
        return [
            {"image": index, "label": 1, "score": 0.9, "bbox": image.objects[0]["bbox"]}
            for index, image in enumerate(dataset.images)
        ]

    monkeypatch.setattr(commands.DetectionTask, "find", find)
    assert Kind("detect").evaluate(detector, data)["box_ap"] == pytest.approx(0.5)  # all squares, no disc

    def renumber(content: dict[str, Any]) -> None:
        numbers = {3: 2, 17: 1}
        for entry in content["categories"]:
            entry["id"] = numbers[entry["id"]]
        for entry in content["annotations"]:
            entry["category_id"] = numbers[entry["category_id"]]

    edit(data, "val", renumber)
    assert Kind("detect").evaluate(detector, data)["box_ap"] == pytest.approx(0.5)

    def squares_only(content: dict[str, Any]) -> None:
        content["categories"] = [entry for entry in content["categories"] if entry["name"] == "square"]
        content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] == 2]

    edit(data, "val", squares_only)
    assert Kind("detect").evaluate(detector, data)["box_ap"] == pytest.approx(1)


def test_only_the_scored_split_is_read(
    kind: Kind, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training images need not be there."""
    data = kind.make_data(tmp_path / "data", train=2, val=2, side=40)
    files = data.glob("images/train_*.png") if kind.verb == "detect" else (data / "masks" / "train").iterdir()
    for path in files:
        path.unlink()
    assert kind.evaluate(model, data)["scored_images"] == 2
    assert main([kind.verb, "eval", str(model), str(data), "--device", "cpu", "--split", "test"]) == 2
    assert "has no split 'test'. It has: train, val." in capsys.readouterr().err


def test_other_labels_and_names_are_refused(segmenter: Path, tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data", train=2, val=2, side=40, border=7)
    with pytest.raises(UserError, match=r"label 7, .*--ignore-index 7"):
        Kind("segment").evaluate(segmenter, data)
    Kind("segment").evaluate(segmenter, data, ignore_index=7)
    named = make_scenes(tmp_path / "named", train=2, val=2, side=40)
    (named / "classes.txt").write_text("ground\nsquare\ndisc\n")
    Kind("segment").train(named, tmp_path / "run", steps=1, report=False)
    (named / "classes.txt").write_text("square\nground\ndisc\n")
    with pytest.raises(UserError, match=r"classes of .*named are not those of .*run"):
        Kind("segment").evaluate(tmp_path / "run", named)
    (named / "classes.txt").unlink()  # numbers are not names
    Kind("segment").evaluate(tmp_path / "run", named)


def left_out(run: Path) -> list[tuple[str, str]]:
    """Return (file, split) that a run left out; its report must show them."""
    skipped = json.loads((run / "data.json").read_text(encoding="utf-8"))["left_out"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert skipped["count"] == len(skipped["files"]) and pluralize(skipped["count"], "unreadable file") in page
    assert all(escape(file["name"]) in page and escape(file["reason"]) in page for file in skipped["files"])
    return [(file["name"], file["split"]) for file in skipped["files"]]


def cut_short(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 7 // 10])


def test_truncated_images_are_left_out_by_name(
    kind: Kind, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = kind.make_data(tmp_path / "data", train=4, side=48)
    bad = [kind.image(data, split, 2) for split in ("train", "val")]
    for path in bad:
        cut_short(path)
    with pytest.raises(UserError, match=r"1 of 4 images cannot be read, .*--cache.max-bad.*2\.png"):
        kind.train(data, tmp_path / "strict", steps=1)
    capsys.readouterr()
    scores = kind.train(data, tmp_path / "run", steps=1, cache={"max_bad": 0.3})
    output = capsys.readouterr().err
    assert scores["scored_images"] == 3 and all(str(path) in output for path in bad)
    assert left_out(tmp_path / "run") == [(str(bad[0]), "train"), (str(bad[1]), "val")]
    assert kind.evaluate(model, data)["scored_images"] == 3 and str(bad[1]) in capsys.readouterr().err
    for number in range(4):
        cut_short(kind.image(data, "val", number))
    with pytest.raises(UserError, match="4 of 4 images cannot be read"):
        kind.evaluate(model, data)


def test_a_report_lists_unreadable_images_of_test(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data", train=4, side=40)
    for folder in ("images", "masks"):
        shutil.copytree(data / folder / "val", data / folder / "test")
    html, short = data / "images" / "train" / "1.png", data / "images" / "test" / "2.png"
    html.write_bytes(b"<html>no image</html>")
    cut_short(short)
    Kind("segment").train(data, tmp_path / "run", steps=1, cache={"max_bad": 0.3})
    assert left_out(tmp_path / "run") == [(str(html), "train"), (str(short), "test")]


def test_eval_checks_the_output_folder_first(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out" / "pictures").mkdir(parents=True)
    (tmp_path / "out" / "pictures" / "best_1.jpg").write_text("mine")
    assert main([kind.verb, "eval", "no model", "no data", "--out", str(tmp_path / "out")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "pictures" / "best_1.jpg").read_text() == "mine"
