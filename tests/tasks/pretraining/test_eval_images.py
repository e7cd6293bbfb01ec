"""Which images k-NN watches a label-free run by, what they are called, and whether they choose weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.tasks.pretraining import train as module
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, read_metrics, write_images


def config(photos: Path, out: Path, **values: object) -> PretrainConfig:
    return PretrainConfig.parse(PRETRAIN | {"data": str(photos), "out": str(out)} | values)


def test_test_images_choose_nothing(tmp_path: Path) -> None:
    """Without validation images the test images are asked, by their name, and no best weights come of it."""
    (write_images(tmp_path / "photos") / "val").rename(tmp_path / "photos" / "test")
    summary = pretrain(config(tmp_path / "photos", tmp_path / "run", steps=4, split="given")).data
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train", "test"}
    assert summary["knn"] is not None and summary["best_knn"] is None
    assert not (tmp_path / "run" / "checkpoints" / "best.pt").exists()


@pytest.mark.parametrize("labels", ["auto", "ignore"])
def test_images_that_were_learned_from_choose_nothing(labels: str, tmp_path: Path) -> None:
    """Asked about each other they are no validation images, by name or otherwise."""
    shutil.rmtree(write_images(tmp_path / "photos") / "val")
    run = config(tmp_path / "photos", tmp_path / "run", steps=4, split="given", labels=labels, report=True)
    summary = pretrain(run).data
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train", "sample"}
    assert (summary["knn"] is None) == (labels == "ignore") and summary["effective_rank"] is not None
    assert summary["best_knn"] is None and not (tmp_path / "run" / "checkpoints" / "best.pt").exists()
    notes = json.loads((tmp_path / "run" / "data.json").read_text())["notes"]
    assert [note for note in notes if "flatters" in note] == (
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
def test_a_split_that_is_learned_from_is_no_val(
    images: str, val: str, asked: str, learned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name in the metrics, in the summary, in words at the start and in the report; and it chooses nothing."""
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
    assert ("these images were learned from" in page) == learned


@pytest.mark.parametrize("images", ["train", "train+val"])
def test_a_run_goes_on_that_called_them_val(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version was killed after the last step: what it wrote is found, and chooses nothing any more."""
    write_images(tmp_path / "photos")
    if images == "train":
        shutil.rmtree(tmp_path / "photos" / "val")

    def cut_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as earlier:
        earlier.setattr(module, "SAMPLE", "val")
        earlier.setattr(module, "save_model_folder", cut_off)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config(tmp_path / "photos", tmp_path / "run", steps=4, split="given", images=images))
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()
    summary = pretrain(PretrainConfig.parse({"resume": str(tmp_path / "run")})).data
    assert summary["knn"] is not None and summary["best_knn"] is None and summary["knn_on"] == "sample"


@pytest.mark.parametrize(
    ("splits", "images", "watched"),
    [
        (["val", "test"], "all", "sample"),  # the first is the bank, the second is asked: both are learned from
        (["val", "test"], "train+val", "test"),
        (["test"], "all", "sample"),  # each is asked about the others
        (["val"], "train+val", "sample"),
    ],
)
def test_images_without_a_train_split(splits: list[str], images: str, watched: str, tmp_path: Path) -> None:
    """What is learned from need not be called train."""
    folder = write_images(tmp_path / "photos")
    (folder / "train").rename(folder / "test")
    for split in {"val", "test"} - set(splits):
        shutil.rmtree(folder / split)
    run = config(folder, tmp_path / "run", steps=2, images=images, split="given", report=True)
    summary = pretrain(run).data
    assert summary["knn"] is not None and (tmp_path / "run" / "report.html").exists()
    assert {line["split"] for line in read_metrics(tmp_path / "run")} == {"train", watched}
