"""detect eval and segment eval: scores, categories, unreadable images."""

import json
import shutil
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.config.dense import DetectEvalConfig
from frugalvit.errors import UserError
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.dataset import open_scenes, read_labels
from frugalvit.tasks.segmentation.label_map import LabelMap
from frugalvit.utils.text import pluralize
from helpers.dense_runs import detect_config, segment_config
from helpers.dense_samples import edit, make_coco, make_scenes


def test_eval_equals_the_scores_of_training(
    detector: Path, segmenter: Path, shapes: Path, scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, data, kind, key in ((detector, shapes, "detect", "box_ap"), (segmenter, scenes, "segment", "miou")):
        assert main([kind, "eval", str(run), str(data), "--device", "cpu", "--json", "--quiet"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found[key] == pytest.approx(json.loads((run / "summary.json").read_text())[key], abs=1e-6)
        assert found["scored_images"] == 4
    words = [str(detector), str(shapes / "instances_train.json"), "--device", "cpu", "--json", "--quiet"]
    assert main(["detect", "eval", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scored_on"] == "instances_train.json"
    assert found["scored_images"] == 8 and found["box_ap_large"] is None and found["box_ap_small"] is not None


def test_sizes_without_objects_are_a_dash_in_the_table(
    detector: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", "eval", str(detector), str(shapes), "--device", "cpu", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = next(line for line in lines if "medium" in line)
    assert heads.split() == ["objects", "small", "medium", "large"]
    for kind in ("box", "mask"):
        row = next(line.split() for line in lines if line.startswith(f"{kind} AP"))
        assert row[2] != "-" and row[3:] == ["-", "-"]  # all objects are small


def test_multi_scale_eval_has_both_scores(segmenter: Path, scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--multi-scale", "--test.scales", "0.75", "1", "--json", "--quiet", "--device", "cpu"]
    assert main(["segment", "eval", str(segmenter), str(scenes), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["single_scale_miou"] == pytest.approx(json.loads((segmenter / "summary.json").read_text())["miou"])
    assert 0 <= found["miou"] <= 1


@pytest.mark.slow
def test_a_detector_of_one_category(shapes: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = commands.train(detect_config(shapes, out, categories="one", steps=2)).data
    scored = commands.evaluate(DetectEvalConfig(model=str(out), data=str(shapes), device="cpu")).data
    assert scored["box_ap"] == pytest.approx(trained["box_ap"], abs=1e-6)
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["classes"] == ["object"]


def score(run: Path, data: Path, **more: Any) -> dict[str, Any]:
    return commands.evaluate(DetectEvalConfig(model=str(run), data=str(data), device="cpu", **more)).data


def find_first_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every detector find the first object of every image, with the label 1: a square."""

    def find(self: Any, dataset: Any) -> list[dict[str, Any]]:
        return [
            {"image": place, "label": 1, "score": 0.9, "bbox": image.objects[0]["bbox"]}
            for place, image in enumerate(dataset.images)
        ]

    monkeypatch.setattr(commands.DetectionTask, "find", find)


def test_categories_are_matched_by_name(
    detector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_coco(tmp_path / "data", side=48)
    for split in ("train", "val"):  # boxes alone, so that perfect ones need no masks
        edit(data, split, lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    find_first_objects(monkeypatch)
    before = score(detector, data)
    assert before["box_ap"] == pytest.approx(0.5) and before["scored_on"] == "val"  # all squares, no disc

    def renumber(content: dict[str, Any]) -> None:
        numbers = {3: 2, 17: 1}
        for entry in content["categories"]:
            entry["id"] = numbers[entry["id"]]
        for entry in content["annotations"]:
            entry["category_id"] = numbers[entry["category_id"]]

    edit(data, "val", renumber)
    capsys.readouterr()
    for where in (data, data / "instances_val.json"):
        assert score(detector, where)["box_ap"] == pytest.approx(0.5)
        assert "matched by name" in capsys.readouterr().err

    def squares_only(content: dict[str, Any]) -> None:
        content["categories"] = [entry for entry in content["categories"] if entry["name"] == "square"]
        content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] == 2]

    edit(data, "val", squares_only)
    found = score(detector, data / "instances_val.json")
    assert found["box_ap"] == pytest.approx(1) and found["scored_on"] == "instances_val.json"
    edit(data, "val", lambda content: content["categories"][0].update(name="ring"))
    with pytest.raises(UserError, match=r"objects of category 2 'ring', which .*detector does not have"):
        score(detector, data / "instances_val.json")


@pytest.mark.slow
def test_supercategories_are_matched_by_name(shapes: Path, tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", side=48)
    for split in ("train", "val"):
        edit(data, split, lambda c: [entry.update(supercategory=entry["name"] + "s") for entry in c["categories"]])
    run = tmp_path / "run"
    commands.train(detect_config(data, run, categories="super", steps=1, report=False))

    def squares_only(content: dict[str, Any]) -> None:
        content["categories"] = [entry for entry in content["categories"] if entry["name"] == "square"]
        content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] == 3]

    edit(data, "val", squares_only)
    assert score(run, data / "instances_val.json")["scored_images"] == 4
    edit(data, "val", lambda content: content["categories"][0].update(supercategory="rings"))
    with pytest.raises(UserError, match=r"objects of category 'rings', which .*run does not have"):
        score(run, data / "instances_val.json")


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_only_the_scored_split_is_read(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training images need not be there."""
    make, run = (make_coco, detector) if kind == "detect" else (make_scenes, segmenter)
    data = make(tmp_path / "data", train=2, val=2, side=40)
    files = data.glob("images/train_*.png") if kind == "detect" else (data / "masks" / "train").iterdir()
    for path in files:
        path.unlink()
    words = [kind, "eval", str(run), str(data), "--device", "cpu", "--json", "--quiet"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["scored_images"] == 2
    assert main([*words, "--split", "test"]) == 2
    assert "has no split 'test'. It has: train, val." in capsys.readouterr().err


def test_unknown_labels_are_refused_or_ignored(
    segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_scenes(tmp_path / "data", train=1, val=2, side=40, border=7)
    words = ["segment", "eval", str(segmenter), str(data), "--device", "cpu", "--quiet"]
    assert main(words) == 2
    message = capsys.readouterr().err.strip()
    assert f"label 7, but {segmenter} has the labels 0 to 2" in message and "--ignore-index 7" in message
    assert "--label-count" not in message and "\n" not in message
    assert main([*words, "--ignore-index", "7"]) == 0


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A segmenter with class names, and its data."""
    data = make_scenes(tmp_path_factory.mktemp("named") / "data", train=2, val=2, side=40, border=3)
    (data / "classes.txt").write_text("ground\nsquare\ndisc\nvoid\n")
    run = data.parent / "run"
    segment_commands.train(segment_config(data, run, steps=2, report=False))
    return run, data


def with_labels(data: Path, out: Path, names: list[str]) -> Path:
    """Copy the data with labels renumbered to the order of ``names``."""
    shutil.copytree(data, out)
    before = (out / "classes.txt").read_text().split()
    numbers = np.zeros(256, np.uint8)
    numbers[: len(before)] = [names.index(name) for name in before]
    for path in out.glob("masks/*/*.png"):
        Image.fromarray(numbers[read_labels(path)]).save(path)
    (out / "classes.txt").write_text("\n".join(names))
    return out


@pytest.mark.parametrize(
    "names",
    [
        ["square", "ground", "disc", "void"],
        ["void", "disc", "ground", "square"],  # void is matched by name, too
        ["tree", "disc", "void", "sky", "ground", "square"],  # names in no mask are not an error
    ],
)
def test_classes_are_matched_by_name(
    names: list[str], named: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = named
    other = with_labels(data, tmp_path / "other", names)
    found = []
    for where in (data, other):
        out = tmp_path / f"scored_{len(found)}"
        words = ["segment", "eval", str(run), str(where), "--out", str(out), "--device", "cpu", "--json", "--quiet"]
        assert main(words) == 0
        scores = json.loads(capsys.readouterr().out)
        rows = json.loads((out / "transfer_report.json").read_text())["per_class"]["rows"]
        found.append(({key: scores[key] for key in ("miou", "mean_accuracy", "pixel_accuracy")}, rows))
    assert found[0] == found[1]
    known = LabelMap(str(run), ("ground", "square", "disc"), (0, 1, 2), 3)
    note = open_scenes(str(other), only="val", known=known).notes[-1]
    assert str(run) in note and "matched by name" in note


def test_unknown_class_names_in_masks_are_refused(
    named: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = named
    other = with_labels(data, tmp_path / "other", ["square", "ground", "disc", "void"])
    (other / "classes.txt").write_text("square\nground\nring\nvoid\n")
    words = ["segment", "eval", str(run), str(other), "--device", "cpu", "--quiet"]
    assert main(words) == 2
    message = capsys.readouterr().err.strip()
    assert f"label 2, 'ring', which {run} does not have" in message and "--ignore-index 2" in message
    assert "\n" not in message
    (other / "classes.txt").write_text("0\n1\n2\n3\n")  # numbers are not names
    assert main(words) == 0


def left_out(run: Path) -> list[dict[str, str]]:
    """Return the files a run left out; its report must show them."""
    skipped = json.loads((run / "data.json").read_text(encoding="utf-8"))["left_out"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert skipped["count"] == len(skipped["files"]) and pluralize(skipped["count"], "unreadable file") in page
    assert all(escape(file["name"]) in page and escape(file["reason"]) in page for file in skipped["files"])
    return skipped["files"]


def cut_short(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 7 // 10])


@pytest.mark.parametrize("kind", [pytest.param("detect", marks=pytest.mark.slow), "segment"])
def test_truncated_images_are_left_out_by_name(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "detect":
        data, run = make_coco(tmp_path / "data", train=4, side=48), detector
        bad = [data / "images" / f"{split}_2.png" for split in ("train", "val")]
    else:
        data, run = make_scenes(tmp_path / "data", train=4, side=40), segmenter
        bad = [data / "images" / split / "2.png" for split in ("train", "val")]
    for path in bad:
        cut_short(path)
    command: Any = commands if kind == "detect" else segment_commands
    make: Any = detect_config if kind == "detect" else segment_config
    with pytest.raises(UserError, match=r"1 of 4 images cannot be read, .*2\.png.*--cache.max-bad"):
        command.train(make(data, tmp_path / "strict", steps=1))
    capsys.readouterr()
    found = command.train(make(data, tmp_path / "run", steps=1, cache={"max_bad": 0.3})).data
    output = capsys.readouterr().err
    assert found["scored_images"] == 3 and all(str(path) in output for path in bad)
    assert [(file["name"], file["split"]) for file in left_out(tmp_path / "run")] == [
        (str(bad[0]), "train"),
        (str(bad[1]), "val"),
    ]
    words = [str(data), "--device", "cpu", "--json", "--quiet", "--out", str(tmp_path / "scored")]
    assert main([kind, "eval", str(run), *words]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["scored_images"] == 3 and str(bad[1]) in output.err
    pictures = bad[1].parent.glob("val_*.png" if kind == "detect" else "*.png")
    for path in pictures:
        cut_short(path)
    assert main([kind, "eval", str(run), *words[:-2]]) == 2
    assert "None of the 4 images can be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [pytest.param("detect", marks=pytest.mark.slow), "segment"])
def test_a_report_lists_unreadable_and_truncated_images(kind: str, tmp_path: Path) -> None:
    """Unreadable ones are found when the data is opened, truncated ones when decoded, those of test at the end."""
    make: Any = detect_config if kind == "detect" else segment_config
    command: Any = commands if kind == "detect" else segment_commands
    if kind == "detect":
        data = make_coco(tmp_path / "data", train=4, side=48)
        shutil.copy(data / "instances_val.json", data / "instances_test.json")
        none, short = data / "images" / "train_1.png", data / "images" / "val_2.png"
    else:
        data = make_scenes(tmp_path / "data", train=4, side=40)
        for kind_of_file in ("images", "masks"):
            shutil.copytree(data / kind_of_file / "val", data / kind_of_file / "test")
        none, short = data / "images" / "train" / "1.png", data / "images" / "test" / "2.png"
    none.write_bytes(b"<html>no image</html>")
    cut_short(short)
    command.train(make(data, tmp_path / "run", steps=1, cache={"max_bad": 0.3}))
    named = [(file["name"], file["split"]) for file in left_out(tmp_path / "run")]
    val = [(str(short), "val")] * (kind == "detect")  # the images of val and test are the same files there
    assert named == [(str(none), "train"), *val, (str(short), "test")]


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_eval_checks_the_output_folder_first(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out" / "pictures").mkdir(parents=True)
    (tmp_path / "out" / "pictures" / "best_1.jpg").write_text("mine")
    assert main([kind, "eval", "no model", "no data", "--out", str(tmp_path / "out")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "pictures" / "best_1.jpg").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    assert main([kind, "eval", "no model", "no data", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "Cannot write to" in capsys.readouterr().err
