"""probe --save: predict, eval, export and report give the answers of the probe."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import frugalvit as fv
from frugalvit.backbones.knn_head import KnnHead
from frugalvit.cli import main as cli
from frugalvit.data.preprocessing import preprocess
from frugalvit.errors import UserError
from frugalvit.probing.knn import knn_predict
from frugalvit.probing.logistic import LogisticRegression
from frugalvit.probing.saved_probe import learned_images
from helpers.tiny_runs import write_images

KINDS = ("logistic", "linear", "knn")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "photos", train=12, val=6, classes=("cat", "dog", "emu"))


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp(request.param) / "run"
    options = {"knn": {"ks": [5]}, "linear": {"epochs": 5}}.get(request.param, {})
    result = fv.run(
        f"probe {request.param}", "swin_nano", str(data), img_size=32, device="cpu", save=str(out), **options
    )
    return result | {"out": out}


def test_every_command_gives_the_same_answers(
    saved: dict[str, Any], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = saved["out"]
    scored = fv.run("eval", str(out), str(data), split="val", device="cpu", out=str(tmp_path / "answers.csv"))
    assert scored["top1"] == pytest.approx(saved["top1"])
    files = sorted((data / "val").rglob("*.png"))
    predicted = fv.run("predict", str(out), *map(str, files), top=3, device="cpu")["predictions"]
    answers = [row["predictions"][0]["class"] for row in predicted]
    assert 100 * np.mean([answer == file.parent.name for answer, file in zip(answers, files, strict=True)]) == (
        pytest.approx(saved["top1"])
    )
    assert cli.main(["report", str(out), "--out", str(tmp_path / "page.html"), "--quiet"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"{saved['top1']:.2f}" in page or f"{saved['top1']:.1f}" in page
    confusion = np.array(json.loads((out / "summary.json").read_text())["confusion"])
    assert 100 * np.trace(confusion) / confusion.sum() == pytest.approx(saved["top1"])
    assert "--resume" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "saved", ["knn", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2])], indirect=True
)
def test_onnx_gives_the_same_answers(saved: dict[str, Any], data: Path, tmp_path: Path) -> None:
    out, files = saved["out"], sorted((data / "val").rglob("*.png"))
    predicted = fv.run("predict", str(out), *map(str, files), top=1, device="cpu")["predictions"]
    exported = fv.run("export", str(out), to="onnx", out=str(tmp_path / "onnx"))
    assert exported["checked_on"] == f"5 images of {data}"
    session = onnxruntime.InferenceSession(str(next((tmp_path / "onnx").glob("*.onnx"))))
    config = json.loads((tmp_path / "onnx/config.json").read_text())
    for file, row in zip(files, predicted, strict=True):
        probabilities = session.run(["probabilities"], {"images": preprocess(file, config)})[0]
        best = torch.from_numpy(probabilities).max(1)
        assert config["label_names"][int(best.indices)] == row["predictions"][0]["class"]
        assert float(best.values) == pytest.approx(row["predictions"][0]["probability"], abs=1e-4)


@pytest.mark.parametrize("to", ["timm", "hf"])
@pytest.mark.parametrize("saved", ["knn"], indirect=True)
def test_timm_has_no_nearest_neighbours(saved: dict[str, Any], to: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="timm has no k-NN classifier"):
        fv.run("export", str(saved["out"]), to=to, out=str(tmp_path / "timm"))


def test_a_saved_classifier_starts_a_training(saved: dict[str, Any]) -> None:
    assert fv.load(saved["out"]).backbone.name == "swin_nano"


@pytest.mark.parametrize(("kind", "labels"), [("logistic", 1), ("linear", 1), ("knn", 1), ("knn", 4)])
def test_images_held_out_of_train_are_scored(
    kind: str, labels: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_images(tmp_path / "x", train=20, val=0) / "train"
    photos = photos.rename(tmp_path / "photos")
    options = {"knn": {"ks": [3]}, "linear": {"epochs": 5}}.get(kind, {})
    out, common = str(tmp_path / "run"), {"img_size": 32, "device": "cpu"}
    probed = fv.run(f"probe {kind}", "swin_nano", str(photos), labels=labels, save=out, **common, **options)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    page = (tmp_path / "run/report.html").read_text()
    assert "classes of photos" in page and "its data" not in page
    capsys.readouterr()
    scored = fv.run("eval", out, str(photos), device="cpu")
    warned = capsys.readouterr().err
    if kind == "knn" and labels == 1:  # it holds every image
        assert summary["scored_on"] == "train, each left out in turn" and "trained on these images" in warned
        return
    assert summary["scored_on"] == scored["scored_on"] == "train, held out" and "trained on" not in warned
    assert scored["scored_images"] == probed["test_images"] < 40
    assert scored["top1"] == pytest.approx(probed["top1"])
    assert np.sum(summary["confusion"]) == probed["test_images"]
    fv.run("eval", out, str(photos), device="cpu", split="train")
    assert "trained on these images" in capsys.readouterr().err


def test_folder_is_not_overwritten(saved: dict[str, Any], data: Path) -> None:
    with pytest.raises(UserError, match="already has"):
        fv.run("probe knn", "swin_nano", str(data), img_size=32, device="cpu", save=str(saved["out"]))


def test_last_blocks_cannot_be_saved(data: Path) -> None:
    with pytest.raises(UserError, match="--features last_blocks"):
        fv.run("probe linear", "swin_nano", str(data), features="last_blocks", save="x")


@pytest.mark.parametrize("classes", [2, 5])
def test_linear_form_has_the_scores_of_the_fit(classes: int) -> None:
    features, labels = torch.randn(60, 7), torch.randint(classes, (60,))
    fit = LogisticRegression(features, labels, classes + 1).fit(0.1)  # the last class has no images
    weight, bias = fit.to_linear()
    expected = fit.scores(features).softmax(1)
    assert torch.allclose((features @ weight.T + bias).softmax(1), expected, atol=1e-5)


@pytest.mark.parametrize(("images", "k"), [(40, 7), (5, 20)])
def test_knn_head_votes_as_the_probe(images: int, k: int) -> None:
    train, labels, test = torch.randn(images, 6), torch.randint(4, (images,)), torch.randn(30, 6)
    head = KnnHead(images, 6, 4, k, 0.07)
    head.set_images(train, labels)
    expected = knn_predict(train, labels, test, [k], 0.07, 4)[k][:, 0]
    logits = head(test)
    assert torch.equal(logits.argmax(1), expected) and bool(logits.isfinite().all())
    nearest = (torch.nn.functional.normalize(test, dim=1) @ head.get_buffer("gallery").T)[0].sort(descending=True)
    votes = torch.zeros(4)
    for similarity, index in zip(nearest.values[:k], nearest.indices[:k], strict=True):
        votes[labels[index]] += torch.exp(similarity / 0.07)
    assert torch.allclose(logits[0].softmax(0), votes / votes.sum(), atol=1e-5)


@pytest.mark.parametrize(
    ("data", "scored_on", "held_out", "split", "seen"),
    [
        ("photos", "train, held out", ["a", "b"], "val", 1),  # "c" is in val, and the probe learned from it
        ("photos/", "test", [], "val", 3),
        ("photos", "test", [], "test", 0),
        ("photos", "val", [], "val", 0),
        ("other", "test", [], "val", 0),
    ],
)
def test_images_that_the_classifier_knows_are_counted(
    data: str, scored_on: str, held_out: list[str], split: str, seen: int, tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"task": "probe", "scored_on": scored_on}))
    (tmp_path / "data.json").write_text(json.dumps({"data": "photos", "held_out": held_out}))
    assert learned_images(tmp_path, data, split, ["a", "b", "c"]) == seen
    assert learned_images(tmp_path / "model", data, split, ["a", "b", "c"]) == seen
