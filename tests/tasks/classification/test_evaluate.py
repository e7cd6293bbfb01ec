"""``frugalvit eval``: scores of a classifier on labelled images; classes match by name."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.config.probe import EvalConfig
from frugalvit.config.train import PredictConfig, TrainConfig
from frugalvit.data import open_data
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.probing.extractor import FeatureExtractor
from frugalvit.tasks.classification import evaluate as evaluation
from frugalvit.tasks.classification.evaluate import evaluate
from frugalvit.tasks.classification.predict import predict
from frugalvit.tasks.classification.train import train
from frugalvit.utils.intervals import wilson_interval
from helpers import suite_layouts

SMALL = {
    "backbone": "swin_nano",
    "backbone_args": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
    "img_size": 16,
    "batch": 8,
    "lr": 1e-3,
    "report": False,
    "localization": {"weight": 0},
}


def trained(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    return train(TrainConfig.parse(SMALL | {"data": str(data), "out": str(out), "steps": 3} | more)).data


def scored(model: Path, data: Path, **more: Any) -> dict[str, Any]:
    return evaluate(EvalConfig.parse({"model": str(model), "data": str(data), "device": "cpu"} | more)).data


@pytest.fixture(scope="module")
def run_and_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A dataset with three classes, a run trained on it, and the result of the run."""
    root = tmp_path_factory.mktemp("run_and_data")
    data = suite_layouts.folders(root / "squares", {"train": 8, "val": 4, "test": 5})
    return data, root / "run", trained(data, root / "run")


def test_scores_equal_those_of_the_run(run_and_data: tuple[Path, Path, dict[str, Any]]) -> None:
    data, run, result = run_and_data
    for model in (run, run / "model"):
        found = scored(model, data)
        assert {name: found[name] for name in ("top1", "top5", "mean_per_class", "scored_on", "scored_images")} == {
            name: pytest.approx(result[name]) for name in ("top1", "top5", "mean_per_class")
        } | {"scored_on": "test", "scored_images": 15}
        assert (found["floor"], found["alarms"]) == (result["floor"], result["alarms"])
    assert "floor" not in scored(run, data, split="val"), "the floor was scored on test"
    assert 0 < found["top1"] < 100, "the sums below need right and wrong predictions"
    assert sum(entry["right"] for entry in found["per_class"]) == round(found["top1"] * 15 / 100)
    assert sum(sum(entry["taken_for"].values()) for entry in found["per_class"]) == len(found["surest_mistakes"])
    confidence = [mistake["probability"] for mistake in found["surest_mistakes"]]
    assert confidence == sorted(confidence, reverse=True)


def test_worst_classes_come_first() -> None:
    """Of equally bad classes the larger comes first."""
    truth, predicted = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]), torch.tensor([0, 1, 2, 1, 1, 2, 0, 0, 1])
    rows = evaluation._per_class(predicted, truth, ("a", "b", "c"))
    assert [(row["class"], row["right"], row["images"]) for row in rows] == [("c", 1, 4), ("a", 1, 3), ("b", 2, 2)]
    assert [list(row["taken_for"].items()) for row in rows] == [[("a", 2), ("b", 1)], [("b", 1), ("c", 1)], []]
    rows = evaluation._per_class(torch.tensor([1, 0, 0]), torch.tensor([0, 1, 1]), ("a", "b"))
    assert [row["class"] for row in rows] == ["b", "a"]


def test_val_split_is_the_same_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of the training split are scored only with --split, with a warning."""
    data = suite_layouts.folders(tmp_path / "squares", {"": 12})
    result = trained(data, tmp_path / "run", val_fraction=0.25)
    found = scored(tmp_path / "run", data, out=str(tmp_path / "answers.csv"))
    assert (found["scored_on"], found["scored_images"]) == (result["scored_on"], result["scored_images"]) == ("val", 9)
    images = {row["image"] for row in csv.DictReader((tmp_path / "answers.csv").read_text().splitlines())}
    assert images == set(open_data(data, val_fraction=0.25).splits["val"].names)
    assert "was trained on" not in capsys.readouterr().err
    assert scored(tmp_path / "run", data, split="all")["scored_images"] == 36
    assert "was trained on these images (all)" in capsys.readouterr().err
    others = suite_layouts.folders(tmp_path / "others", {"": 3})
    assert (scored(tmp_path / "run", others)["scored_on"], len(open_data(others, split="given"))) == ("all", 9)
    assert "was trained on" not in capsys.readouterr().err


def test_classes_match_by_name(run_and_data: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    data, run, _ = run_and_data
    shutil.copytree(data / "test" / "class2", tmp_path / "some" / "class2")
    shutil.copytree(data / "test" / "class1", tmp_path / "some" / "class1")
    all_of = {entry["class"]: entry for entry in scored(run, data)["per_class"]}
    for entry in scored(run, tmp_path / "some")["per_class"]:
        assert entry == all_of[entry["class"]]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"split": "train"}, "has no train split, only test"),
        ({}, "does not know: hen.*class0, class1, class2.*--classes FILE"),
    ],
)
def test_data_that_does_not_match_is_an_error(
    more: dict[str, Any], line: str, run_and_data: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    data, run, _ = run_and_data
    shutil.copytree(data / "test" / "class1", tmp_path / "farm" / "test" / "class1")
    shutil.copytree(data / "test" / "class0", tmp_path / "farm" / "test" / "hen")
    with pytest.raises(UserError, match=line):
        scored(run, tmp_path / "farm", **more)
    chosen = tmp_path / "classes.txt"
    chosen.write_text("class1\n")
    assert scored(run, tmp_path / "farm", classes=str(chosen))["scored_images"] == 5


def test_missing_labels_or_classifier_is_an_error(
    run_and_data: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    data, run, _ = run_and_data
    suite_layouts.write(tmp_path / "loose" / "a.png", 0, 0)
    with pytest.raises(UserError, match=r"has no labels.*'frugalvit predict'"):
        scored(run, tmp_path / "loose")
    with pytest.raises(UserError, match=r"swin_nano has no classifier.*--backbone swin_nano"):
        scored(Path("swin_nano"), data)


def test_csv_agrees_with_predict(
    run_and_data: tuple[Path, Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, _ = run_and_data
    out = tmp_path / "answers.csv"
    assert cli.main(["eval", str(run), str(data), "-o", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "worst classes" in printed and "confident mistakes" in printed and str(out) in printed
    rows = list(csv.DictReader(out.read_text().splitlines()))
    predicted = predict(PredictConfig(model=str(run), images=[str(data / "test")], top=1, device="cpu"))
    first = {row["image"]: row["predictions"][0] for row in predicted.data["predictions"]}
    assert len(rows) == 15 == len(first)
    for row in rows:
        guess = first[row["image"]]
        assert row["predicted"] == guess["class"] and row["class"] == Path(row["image"]).parent.name
        assert float(row["probability"]) == pytest.approx(guess["probability"], abs=1e-5)
        assert row["right"] == str(int(row["class"] == row["predicted"]))
    assert cli.main(["eval", str(run), str(data), "-o", str(out), "--device", "cpu"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_mirror_images_are_averaged(run_and_data: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """eval and predict return the mean of the probabilities of an image and its mirror image."""
    data, run, _ = run_and_data
    images = sorted((data / "test").rglob("*.png"))
    model = load_model(str(run))
    expected = {}
    for path in images:
        pixels = Image.open(path)
        with torch.inference_mode():
            both = torch.cat([model.transform.image(np.asarray(pixels)[:, ::step].copy()) for step in (1, -1)])
            expected[str(path)] = model.backbone.classify(model.backbone(both).pooled).softmax(1).mean(0)
    result = predict(PredictConfig(model=str(run), images=[str(data / "test")], top=3, device="cpu", mirror=True))
    for row in result.data["predictions"]:
        found = {guess["class"]: guess["probability"] for guess in row["predictions"]}
        named = dict(zip(model.classes or (), expected[row["image"]].tolist(), strict=True))
        assert found == pytest.approx(named, abs=1e-5)
    out = tmp_path / "answers.csv"
    scores = scored(run, data, mirror=True, out=str(out))
    for answer in csv.DictReader(out.read_text().splitlines()):
        assert float(answer["probability"]) == pytest.approx(expected[answer["image"]].max().item(), abs=1e-5)
    assert scores["without_mirror"]["top1"] == scored(run, data)["top1"]


def test_mirrored_features_are_cached_separately(squares: Path, cache: Path) -> None:
    examples = open_data(squares).splits["test"]
    extractor = FeatureExtractor(load_model("swin_nano", img_size=32))
    plain, mirrored = extractor(examples), extractor(examples, mirrored=True)
    assert not torch.allclose(plain.features, mirrored.features, atol=1e-4)
    assert torch.equal(extractor(examples).features, plain.features)
    again = extractor(examples, mirrored=True)
    assert again.from_cache and torch.equal(again.features, mirrored.features)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(8, 10, 49.02, 94.33), (0, 10, 0.0, 27.75), (10, 10, 72.25, 100.0), (81, 100, 72.22, 87.49)],
)
def test_wilson_interval(right: int, count: int, low: float, high: float) -> None:
    """Bounds are the shares p at which |right/count - p| is 1.96 standard errors of p."""
    found = wilson_interval(right, count)
    assert found == pytest.approx((low, high), abs=0.005)
    for bound in found:
        share = bound / 100
        if 0 < share < 1 - 1e-9:
            error = (share * (1 - share) / count) ** 0.5
            assert abs(right / count - share) / error == pytest.approx(1.959964, rel=1e-5)


def test_own_data_is_recognised_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite_layouts.folders(tmp_path / "squares", {"": 12})
    monkeypatch.chdir(tmp_path)
    trained(Path("squares"), Path("run"))
    assert scored(tmp_path / "run", tmp_path / "squares")["scored_on"] == "val"
    shutil.copytree(tmp_path / "run" / "model", tmp_path / "exported")
    assert scored(tmp_path / "exported", tmp_path / "squares")["scored_on"] == "all"
