"""The probe commands, from options to results: splits, keys, recorded scores, errors before the work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli.commands import COMMANDS
from frugalvit.config.probe import KnnConfig, LinearConfig, LogisticConfig
from frugalvit.errors import UserError
from frugalvit.probing import probe
from frugalvit.probing.knn import knn
from frugalvit.probing.linear import linear
from frugalvit.probing.logistic import logistic
from frugalvit.probing.registry import PROBES
from helpers import suite_layouts
from inference import accuracy_of

TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}
KEYS = {"top1", "top5", "mean_per_class", "seconds", "model", "data"}
every_probe = pytest.mark.parametrize(
    ("command", "kind"), [(knn, KnnConfig), (linear, LinearConfig), (logistic, LogisticConfig)]
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a model of three classes."""
    backbone = create_backbone("swin_nano", img_size=32, num_classes=3)
    save_model_folder(backbone, tmp_path / "run" / "model", classes=["a", "b", "c"], meta={})
    (tmp_path / "run" / "config.yaml").write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize("name", PROBES)
def test_every_registered_probe_is_a_command(name: str) -> None:
    (command,) = [command for command in COMMANDS if command.name == f"probe {name}"]
    assert (command.config, command.function, command.help) == PROBES[name]


def test_knn_uses_all_images_but_the_scored(squares: Path) -> None:
    result = knn(KnnConfig(data=str(squares), ks=[1, 20, 500], **TINY))
    assert result.data.keys() >= KEYS
    assert (result.data["train_images"], result.data["test_images"]) == (36, 12)
    assert set(result.data["knn"]) == {"1", "20", "500"}
    assert result.data["top1"] == result.data["knn"]["20"] and result.data["knn"]["1"] > 90
    assert json.dumps(result.data, allow_nan=False)


@pytest.mark.parametrize(("splits", "gallery", "queries"), [({"test": 1, "val": 2}, 15, 3), ({"val": 2}, 9, 6)])
def test_knn_scores_test_else_val(splits: dict[str, int], gallery: int, queries: int, tmp_path: Path) -> None:
    folder = suite_layouts.folders(tmp_path, {"train": 3} | splits)
    result = knn(KnnConfig(data=str(folder), ks=[1], **TINY))
    assert (result.data["train_images"], result.data["test_images"]) == (gallery, queries)


def test_knn_leaves_one_out_if_there_is_one_split(tmp_path: Path) -> None:
    folder = suite_layouts.folders(tmp_path, {"": 5})
    result = knn(KnnConfig(data=str(folder), ks=[3], **TINY))
    assert result.data["leave_one_out"] and result.data["test_images"] == 15
    assert result.data["k"] == 3 and result.data["top1"] > 90
    few = knn(KnnConfig(data=str(folder), ks=[1], labels=2, **TINY))  # the images without a label are scored
    assert (few.data["train_images"], few.data["test_images"]) == (6, 9) and not few.data["leave_one_out"]


@pytest.mark.parametrize(("views", "used"), [(0, 0), (2, 2), ("auto", 4)])
def test_linear(squares: Path, views: int | str, used: int) -> None:
    result = linear(
        LinearConfig(data=str(squares), epochs=15, lrs=[0.1, 1.0, 10.0], views=views, probe_batch=8, **TINY)
    )
    assert result.data.keys() >= KEYS | {"lr", "val_top1"}
    assert result.data["top1"] > 80 and len(result.data["tried"]) == 3
    assert result.data["views"] == used, "crops and flips by default, as published"


def test_logistic(squares: Path) -> None:
    result = logistic(LogisticConfig(data=str(squares), **TINY))
    assert result.data.keys() >= KEYS | {"lambda", "val_top1", "iterations"}
    assert result.data["top1"] > 90 and len(result.data["tried"]) <= 15
    assert (result.data["train_images"], result.data["test_images"]) == (36, 12)


@pytest.mark.parametrize(
    ("unlabelled", "labels", "count"), [("rest", 1, 7), ("rest", 3, 7 + 27), ("loose", 1, 7)], ids=str
)
def test_logistic_learns_from_unlabelled_images(
    squares: Path, tmp_path: Path, unlabelled: str, labels: float, count: int
) -> None:
    """They are a folder, the images of DATA without a label, and those whose label --labels hides."""
    data, loose = tmp_path / "squares", tmp_path / "squares" / "train" / "unlabelled"
    shutil.copytree(squares, data)
    loose.mkdir()
    for number in range(7):
        shutil.copy(sorted(squares.glob("test/*/*.png"))[number], loose / f"{number}.png")
    options: dict[str, Any] = {"data": str(data), "labels": labels, **TINY}
    plain = logistic(LogisticConfig(**options))
    images = str(loose) if unlabelled == "loose" else unlabelled
    spread = logistic(LogisticConfig(**options, unlabelled=images, save=str(tmp_path / "run")))
    assert spread.data["unlabelled_images"] == count and "unlabelled_images" not in plain.data
    assert spread.data["train_images"] == plain.data["train_images"] and spread.data["top1"] > 80
    assert min(spread.data["tried"], key=float) != min(plain.data["tried"], key=float)  # weak λ are not tried
    assert f"the labels spread to {count} unlabelled images" in spread.notes


def test_logistic_does_not_learn_from_what_scores_it(squares: Path) -> None:
    """Neither from test, nor from what it holds out of train."""
    with pytest.raises(UserError, match="all of its images choose settings or score"):
        logistic(LogisticConfig(data=str(squares), unlabelled=str(squares / "val"), **TINY))
    result = logistic(LogisticConfig(data=str(squares / "train"), unlabelled=str(squares / "train"), **TINY))
    held_out = result.data["test_images"]
    assert any(f"--unlabelled holds {held_out} images of val and test" in note for note in result.notes)


def test_logistic_refuses_unlabelled_images_that_do_not_exist_or_fit(squares: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every training image of"):
        logistic(LogisticConfig(data=str(squares), unlabelled="rest", **TINY))
    suite_layouts.voc2007(tmp_path)
    with pytest.raises(UserError, match="without --unlabelled"):
        logistic(LogisticConfig(data="voc2007", root=str(tmp_path), unlabelled=str(squares), **TINY))


def test_several_labels_per_image_are_for_logistic(tmp_path: Path) -> None:
    suite_layouts.voc2007(tmp_path)
    voc: dict[str, Any] = {"data": "voc2007", "root": str(tmp_path), **TINY}
    result = logistic(LogisticConfig(**voc))
    assert result.data["map11"] > 80 and "top1" not in result.data
    with pytest.raises(UserError, match="probe logistic"):
        knn(KnnConfig(**voc))
    with pytest.raises(UserError, match="--labels"):
        logistic(LogisticConfig(**voc, labels=0.5))


@pytest.mark.parametrize(
    ("command", "kind", "more"),
    [
        (knn, KnnConfig, {"ks": [1]}),
        (linear, LinearConfig, {"epochs": 5, "lrs": [1.0]}),
        (linear, LinearConfig, {"epochs": 5, "lrs": [1.0], "views": 1}),
        (logistic, LogisticConfig, {}),
    ],
)
def test_probes_learn_from_some_of_the_labels(squares: Path, command: Any, kind: Any, more: dict[str, Any]) -> None:
    result = command(kind(data=str(squares), labels=4, **more, **TINY))
    assert (result.data["train_images"], result.data["test_images"]) == (12, 12) and result.data["labels"] == 4
    assert "12 of 36 labels are used" in result.notes


def test_a_run_records_its_scores_by_probe_and_labels(squares: Path, run: Path) -> None:
    options = {"data": str(squares), **TINY, "model": str(run)}
    knn(KnnConfig(**options, ks=[1], labels=2, seed=1))
    assert accuracy_of(str(run)) is None  # a score of few labels is not the run's accuracy
    result = knn(KnnConfig(**options, ks=[1])).data
    logistic(LogisticConfig(**options))
    recorded = json.loads((run / "probes.json").read_text())
    name = squares.name
    assert list(recorded) == [f"knn {name}, labels 2, seed 1", f"knn {name}", f"logistic {name}"]
    assert result["run"] == str(run) and recorded[f"knn {name}"]["top1"] == result["top1"]
    assert accuracy_of(str(run)) == (f"logistic top1 on {name}", recorded[f"logistic {name}"]["top1"])


def test_scores_are_printed_if_they_cannot_be_recorded(
    squares: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(probe, "write_text", refuse)
    result = knn(KnnConfig(data=str(squares), ks=[5], **TINY | {"model": str(run)}))
    assert result.data["top1"] > 0 and result.data["run"] == str(run)
    error = capsys.readouterr().err
    assert "probes.json" in error and "(Permission denied)" in error


@every_probe
def test_errors_come_before_the_model_is_loaded(command: Any, kind: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(probe, "open_model", lambda *_: pytest.fail("too late"))
    for number in range(4):
        suite_layouts.write(tmp_path / "unlabelled" / f"{number}.png", 0, number)
    suite_layouts.folders(tmp_path / "one", {"train": 3, "test": 2}, classes=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "probes.json").write_text('{"knn x": ')
    with pytest.raises(UserError, match="labels"):
        command(kind(data=str(tmp_path / "unlabelled"), **TINY))
    with pytest.raises(UserError, match="one class"):
        command(kind(data=str(tmp_path / "one"), **TINY))
    with pytest.raises(UserError, match=r"probes\.json"):
        command(kind(data=str(tmp_path / "one"), **TINY | {"model": str(tmp_path / "run")}))
