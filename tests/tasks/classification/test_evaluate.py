"""``frugalvit eval``: the scores a run gave itself, on any labelled images, by the names of their classes."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from types import SimpleNamespace
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
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.probing.extractor import FeatureExtractor
from frugalvit.probing.metrics import wilson_interval
from frugalvit.tasks.classification import evaluate as evaluation
from frugalvit.tasks.classification.evaluate import evaluate
from frugalvit.tasks.classification.predict import predict
from frugalvit.tasks.classification.train import train
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Three classes with train, val and test, a run that learned some of them, and what it said of itself."""
    root = tmp_path_factory.mktemp("whole")
    data = suite_layouts.folders(root / "squares", {"train": 8, "val": 4, "test": 5})
    return data, root / "run", trained(data, root / "run")


def test_scores_are_those_of_the_run(whole: tuple[Path, Path, dict[str, Any]]) -> None:
    data, run, said = whole
    for model in (run, run / "model"):
        found = scored(model, data)
        assert {name: found[name] for name in ("top1", "top5", "mean_per_class", "scored_on", "scored_images")} == {
            name: pytest.approx(said[name]) for name in ("top1", "top5", "mean_per_class")
        } | {"scored_on": "test", "scored_images": 15}
    assert 0 < found["top1"] < 100, "else nothing below says anything"
    assert sum(entry["right"] for entry in found["per_class"]) == round(found["top1"] * 15 / 100)
    assert sum(sum(entry["taken_for"].values()) for entry in found["per_class"]) == len(found["surest_mistakes"])


def test_the_worst_comes_first() -> None:
    """Of mistakes the surest; of classes the one most often missed, and of equals the larger."""
    truth, predicted = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]), torch.tensor([0, 1, 2, 1, 1, 2, 0, 0, 1])
    chances = torch.full((9, 3), 0.1).scatter_(1, predicted[:, None], torch.linspace(0.5, 0.9, 9)[:, None])
    found: Any = SimpleNamespace(names=[f"{number}.png" for number in range(9)])
    mistakes = evaluation._mistakes(found, chances, predicted, truth, ("a", "b", "c"))
    assert [one["image"] for one in mistakes] == ["8.png", "7.png", "6.png", "2.png", "1.png"]
    assert mistakes[0] == {"image": "8.png", "class": "c", "predicted": "b", "probability": pytest.approx(0.9)}
    missed = evaluation._per_class(predicted, truth, ("a", "b", "c"))
    assert [(one["class"], one["right"], one["images"]) for one in missed] == [("c", 1, 4), ("a", 1, 3), ("b", 2, 2)]
    assert [list(one["taken_for"].items()) for one in missed] == [[("a", 2), ("b", 1)], [("b", 1), ("c", 1)], []]
    alike = evaluation._per_class(torch.tensor([1, 0, 0]), torch.tensor([0, 1, 1]), ("a", "b"))
    assert [one["class"] for one in alike] == ["b", "a"]


def test_a_val_that_the_run_made_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not all images, most of which it learned from; those are scored where they are asked for, with a word."""
    data = suite_layouts.folders(tmp_path / "squares", {"": 12})
    said = trained(data, tmp_path / "run", val_fraction=0.25)
    found = scored(tmp_path / "run", data, out=str(tmp_path / "answers.csv"))
    assert (found["scored_on"], found["scored_images"]) == (said["scored_on"], said["scored_images"]) == ("val", 9)
    asked = {row["image"] for row in csv.DictReader((tmp_path / "answers.csv").read_text().splitlines())}
    assert asked == set(open_data(data, val_fraction=0.25).splits["val"].names)
    assert "has learned from" not in capsys.readouterr().err
    assert scored(tmp_path / "run", data, split="all")["scored_images"] == 36
    assert "has learned from these images (all): its scores on others will be lower" in capsys.readouterr().err
    others = suite_layouts.folders(tmp_path / "others", {"": 3})
    assert (scored(tmp_path / "run", others)["scored_on"], len(open_data(others, split="given"))) == ("all", 9)
    assert "has learned from" not in capsys.readouterr().err


def test_names_decide_which_class_is_which(whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """Data with some of the classes, numbered otherwise: every image has the answer it had."""
    data, run, _ = whole
    shutil.copytree(data / "test" / "class2", tmp_path / "some" / "class2")
    shutil.copytree(data / "test" / "class1", tmp_path / "some" / "class1")
    all_of = {entry["class"]: entry for entry in scored(run, data)["per_class"]}
    for entry in scored(run, tmp_path / "some")["per_class"]:
        assert entry == all_of[entry["class"]]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"split": "train"}, "has no train split, only test"),
        ({}, "has hen, which .* does not know: it tells class0, class1, class2 apart. .*--classes FILE keeps only"),
        ({"out": "answers.txt"}, "answers.txt: the answers go into a file that ends with .csv"),
    ],
)
def test_what_cannot_be_scored(
    more: dict[str, Any], line: str, whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    data, run, _ = whole
    shutil.copytree(data / "test" / "class1", tmp_path / "farm" / "test" / "class1")
    shutil.copytree(data / "test" / "class0", tmp_path / "farm" / "test" / "hen")
    with pytest.raises(UserError, match=line):
        scored(run, tmp_path / "farm", **more)
    chosen = tmp_path / "classes.txt"
    chosen.write_text("class1\n")
    assert scored(run, tmp_path / "farm", classes=str(chosen))["scored_images"] == 5


def test_images_without_labels_and_models_without_classes(
    whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    data, run, _ = whole
    suite_layouts.write(tmp_path / "loose" / "a.png", 0, 0)
    with pytest.raises(UserError, match=r"has no labels to compare with: .*'frugalvit predict' names classes without"):
        scored(run, tmp_path / "loose")
    with pytest.raises(UserError, match="swin_nano has no classifier"):
        scored(Path("swin_nano"), data)


def test_the_answer_to_every_image(
    whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CSV says of each image what ``predict`` says; the table names the classes that were missed."""
    data, run, _ = whole
    out = tmp_path / "answers.csv"
    assert cli.main(["eval", str(run), str(data), "-o", str(out), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "classes most often missed" in told and "surest mistakes" in told and str(out) in told
    rows = list(csv.DictReader(out.read_text().splitlines()))
    told_by = predict(PredictConfig(model=str(run), images=[str(data / "test")], top=1, device="cpu"))
    first = {row["image"]: row["predictions"][0] for row in told_by.data["predictions"]}
    assert len(rows) == 15 == len(first)
    for row in rows:
        guess = first[row["image"]]
        assert row["predicted"] == guess["class"] and row["class"] == Path(row["image"]).parent.name
        assert float(row["probability"]) == pytest.approx(guess["probability"], abs=1e-5)
        assert row["right"] == str(int(row["class"] == row["predicted"]))
    assert cli.main(["eval", str(run), str(data), "-o", str(out), "--device", "cpu"]) == 2
    assert "is not overwritten" in capsys.readouterr().err


def test_mirror_images_are_averaged(whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """By hand: the mean of the probabilities of an image and of the same file, mirrored, in both commands."""
    data, run, _ = whole
    images = sorted((data / "test").rglob("*.png"))
    model = load_model(str(run))
    expected = {}
    for path in images:
        pixels = Image.open(path)
        with torch.inference_mode():
            both = torch.cat([model.transform.image(np.asarray(pixels)[:, ::step].copy()) for step in (1, -1)])
            expected[str(path)] = model.backbone.classify(model.backbone(both).pooled).softmax(1).mean(0)
    told = predict(PredictConfig(model=str(run), images=[str(data / "test")], top=3, device="cpu", mirror=True))
    for row in told.data["predictions"]:
        found = {guess["class"]: guess["probability"] for guess in row["predictions"]}
        named = dict(zip(model.classes or (), expected[row["image"]].tolist(), strict=True))
        assert found == pytest.approx(named, abs=1e-5)
    out = tmp_path / "answers.csv"
    result = scored(run, data, mirror=True, out=str(out))
    for answer in csv.DictReader(out.read_text().splitlines()):
        assert float(answer["probability"]) == pytest.approx(expected[answer["image"]].max().item(), abs=1e-5)
    assert result["without_mirror"]["top1"] == scored(run, data)["top1"]


def test_mirrored_features_have_a_place_of_their_own(model: Model, squares: Path, cache: Path) -> None:
    """Features of mirror images are not taken for the others, nor the others for them."""
    examples = open_data(squares).splits["test"]
    extractor = FeatureExtractor(model)
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
    """Bounds are the shares p at which |right/count - p| is 1.96 of p's own standard errors."""
    found = wilson_interval(right, count)
    assert found == pytest.approx((low, high), abs=0.005)
    for bound in found:
        share = bound / 100
        if 0 < share < 1 - 1e-9:
            error = (share * (1 - share) / count) ** 0.5
            assert abs(right / count - share) / error == pytest.approx(1.959964, rel=1e-5)


def test_a_run_knows_its_own_images_wherever_they_are_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name typed in another folder, and a copy; of an exported model the name of the data is all that is known."""
    suite_layouts.folders(tmp_path / "squares", {"": 12})
    monkeypatch.chdir(tmp_path)
    trained(Path("squares"), Path("run"))
    assert cli.main(["export", "run", "--to", "timm", "--out", "exported"]) == 0
    shutil.copytree("squares", "copy")
    monkeypatch.chdir("/")
    for data in (tmp_path / "squares", tmp_path / "copy"):
        assert scored(tmp_path / "run", data)["scored_on"] == "val"
    capsys.readouterr()
    assert scored(tmp_path / "exported", tmp_path / "squares")["scored_on"] == "all"
    assert "was taught with data of this name (squares), and may have learned from these" in capsys.readouterr().err
    (tmp_path / "exported" / "config.yaml").write_text("foo: 1\n")  # somebody else's
    assert scored(tmp_path / "exported", tmp_path / "copy")["scored_on"] == "all"


def test_one_class_alone(whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """One folder is no labels to learn from, but it can be asked whether all of it is recognised."""
    data, run, _ = whole
    shutil.copytree(data / "test" / "class1", tmp_path / "one" / "class1")
    assert [entry["class"] for entry in scored(run, tmp_path / "one")["per_class"]] == ["class1"]
    shutil.copytree(data / "test" / "class1", tmp_path / "other" / "hen")
    with pytest.raises(UserError, match="has no labels to compare with"):
        scored(run, tmp_path / "other")


def test_a_streamed_run_with_chosen_classes(whole: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    data, _, _ = whole
    chosen = tmp_path / "classes.txt"
    chosen.write_text("class0\nclass2\n")
    packed = tmp_path / "packed"
    assert cli.main(["data", "pack", str(data), str(packed)]) == 0
    trained(packed, tmp_path / "run", stream=True, classes=str(chosen))
    assert scored(tmp_path / "run", packed)["scored_images"] == 10
