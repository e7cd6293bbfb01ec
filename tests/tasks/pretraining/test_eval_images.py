"""The images that k-NN evaluates in pre-training, their name, and whether they choose the best weights."""

import json
import shutil
from pathlib import Path

import pytest

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, read_metrics, write_images


def config(photos: Path, out: Path, **values: object) -> PretrainConfig:
    return PretrainConfig.parse(PRETRAIN | {"data": str(photos), "out": str(out)} | values)


def test_test_images_choose_no_weights(tmp_path: Path) -> None:
    """Without a val split k-NN uses the test split, and no best weights are stored."""
    (write_images(tmp_path / "photos") / "val").rename(tmp_path / "photos" / "test")
    summary = pretrain(config(tmp_path / "photos", tmp_path / "run", steps=4, split="given")).data
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train", "test"}
    assert summary["knn"] is not None and summary["best_knn"] is None
    assert not (tmp_path / "run" / "checkpoints" / "best.pt").exists()


@pytest.mark.parametrize("labels", ["auto", "ignore"])
def test_training_images_choose_no_weights(labels: str, tmp_path: Path) -> None:
    shutil.rmtree(write_images(tmp_path / "photos") / "val")
    run = config(tmp_path / "photos", tmp_path / "run", steps=4, split="given", labels=labels, report=True)
    summary = pretrain(run).data
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train", "sample"}
    assert (summary["knn"] is None) == (labels == "ignore") and summary["effective_rank"] is not None
    assert summary["best_knn"] is None and not (tmp_path / "run" / "checkpoints" / "best.pt").exists()
    notes = json.loads((tmp_path / "run" / "data.json").read_text())["notes"]
    assert [note for note in notes if "biased" in note] == (
        ["k-NN is measured on training images: it is biased, its split is called sample, and it chooses no best.pt."]
        if labels == "auto"
        else []
    )


@pytest.mark.parametrize(
    ("images", "val", "asked", "learned"),
    [
        ("train", "val", "val", False),
        ("train+val", "val", "val", True),
        ("all", "val", "val", True),
        ("train+val", "test", "test", False),
        ("all", "test", "test", True),
    ],
)
def test_trained_split_is_not_called_val(
    images: str, val: str, asked: str, learned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in metrics, summary, log or report; and it chooses no weights."""
    (write_images(tmp_path / "photos") / "val").rename(tmp_path / "photos" / val)
    run = tmp_path / "run"
    settings = config(tmp_path / "photos", run, steps=4, split="given", images=images, report=True)
    summary = pretrain(settings).data
    name = "sample" if learned else asked
    assert {line["split"] for line in read_metrics(run)} == {"train", name} and summary["knn_on"] == name
    chooses = name == "val"
    assert (summary["best_knn"] is not None) == chooses == (run / "checkpoints" / "best.pt").exists()
    note = f"k-NN is measured on {asked}, which --images {images} trains on: it is biased"
    page = (run / "report.html").read_text()
    assert (note in capsys.readouterr().err) == (note in page) == learned


@pytest.mark.parametrize(
    ("splits", "images", "watched"),
    [
        (["val", "test"], "all", "sample"),  # gallery and queries are both trained on
        (["val", "test"], "train+val", "test"),
        (["test"], "all", "sample"),  # leave-one-out
        (["val"], "train+val", "sample"),
    ],
)
def test_images_without_a_train_split(splits: list[str], images: str, watched: str, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos")
    (folder / "train").rename(folder / "test")
    for split in {"val", "test"} - set(splits):
        shutil.rmtree(folder / split)
    run = config(folder, tmp_path / "run", steps=2, images=images, split="given", report=True)
    summary = pretrain(run).data
    assert summary["knn"] is not None and (tmp_path / "run" / "report.html").exists()
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train", watched}
