"""The commands from options to result: splits that are made, keys that stay, mistakes that are said."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.probe import EmbedConfig, KnnConfig, LinearConfig, LogisticConfig, SuiteConfig
from frugalvit.errors import UserError
from frugalvit.probing import commands
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet
from frugalvit.probing.knn import knn_accuracy
from frugalvit.probing.linear import linear_probe
from frugalvit.probing.logistic import logistic_probe
from frugalvit.probing.splits import make_probe_splits
from helpers import suite_layouts

TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}
WORDS = {"top1", "top5", "mean_per_class", "seconds", "model", "data"}


def test_knn_votes_with_all_images_but_the_scored(squares: Path) -> None:
    result = commands.knn(KnnConfig(data=str(squares), ks=[1, 20, 500], **TINY))
    assert result.data.keys() >= WORDS
    assert (result.data["train_images"], result.data["test_images"]) == (36, 12)
    assert set(result.data["knn"]) == {"1", "20", "500"}
    assert result.data["top1"] == result.data["knn"]["20"] and result.data["knn"]["1"] > 90
    assert json.dumps(result.data, allow_nan=False)


@pytest.mark.parametrize(("splits", "votes", "asked"), [({"test": 1, "val": 2}, 15, 3), ({"val": 2}, 9, 6)])
def test_knn_scores_test_images_where_there_are_any(
    splits: dict[str, int], votes: int, asked: int, tmp_path: Path
) -> None:
    folder = suite_layouts.folders(tmp_path, {"train": 3} | splits)
    result = commands.knn(KnnConfig(data=str(folder), ks=[1], **TINY))
    assert (result.data["train_images"], result.data["test_images"]) == (votes, asked)


def test_knn_leaves_one_out_where_there_is_one_split_only(tmp_path: Path) -> None:
    folder = suite_layouts.folders(tmp_path, {"": 5})
    result = commands.knn(KnnConfig(data=str(folder), ks=[3], **TINY))
    assert result.data["leave_one_out"] and result.data["test_images"] == 15
    assert result.data["k"] == 3 and result.data["top1"] > 90
    assert any("asked of all the others" in note for note in result.notes)


def test_scores_that_cannot_be_kept_are_given(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another person's run, or a disk that is full: minutes of work are worth more than a file."""

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    network = create_backbone("swin_nano", img_size=32, num_classes=3)
    save_model_folder(network, tmp_path / "model", classes=["a", "b", "c"], meta={})
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setattr(commands, "write_text", refuse)
    result = commands.knn(KnnConfig(data=str(squares), ks=[5], **TINY | {"model": str(tmp_path)}))
    assert result.data["top1"] > 0 and result.data["run"] == str(tmp_path)
    said = capsys.readouterr().err
    assert "warning: the scores could not be kept in" in said and "(Permission denied)" in said


@pytest.mark.parametrize("views", [0, 2])
def test_linear(squares: Path, views: int) -> None:
    config = LinearConfig(data=str(squares), epochs=15, lrs=[0.1, 1.0, 10.0], views=views, probe_batch=8, **TINY)
    result = commands.linear(config)
    assert result.data.keys() >= WORDS | {"lr", "val_top1"}
    assert result.data["top1"] > 80 and len(result.data["tried"]) == 3


def test_the_seed_decides_the_views(squares: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int]] = []
    take = FeatureExtractor.__call__

    def note(
        self: FeatureExtractor, examples: Any, label: str = "", view: int | None = None, seed: int = 0
    ) -> FeatureSet:
        asked.append((view, seed))
        return take(self, examples, label, view, seed)

    monkeypatch.setattr(FeatureExtractor, "__call__", note)
    commands.linear(LinearConfig(data=str(squares), epochs=1, lrs=[1.0], views=2, seed=7, **TINY))
    assert [pair for pair in asked if pair[0] is not None] == [(0, 7), (1, 7)]


@pytest.mark.parametrize("kind", [KnnConfig, LinearConfig, LogisticConfig, EmbedConfig])
def test_a_number_of_blocks_is_of_last_blocks(kind: Any) -> None:
    needed = {"model": "run", "data": "photos", "blocks": 2}
    with pytest.raises(UserError, match="--blocks is of --features last_blocks"):
        kind.parse(needed | {"features": "pooled"})
    assert kind.parse(needed | {"features": "last_blocks"}).blocks == 2
    if kind is not LinearConfig:  # which takes the last blocks by itself
        with pytest.raises(UserError, match="--blocks is of --features last_blocks"):
            kind.parse(needed)


def test_logistic(squares: Path) -> None:
    result = commands.logistic(LogisticConfig(data=str(squares), **TINY))
    assert result.data.keys() >= WORDS | {"lambda", "val_top1", "iterations"}
    assert result.data["top1"] > 90 and len(result.data["tried"]) <= 15
    assert (result.data["train_images"], result.data["test_images"]) == (36, 12)


def test_logistic_of_several_labels_an_image(tmp_path: Path) -> None:
    suite_layouts.voc2007(tmp_path)
    result = commands.logistic(LogisticConfig(data="voc2007", root=str(tmp_path), **TINY))
    assert result.data["map11"] > 80 and "top1" not in result.data
    with pytest.raises(UserError, match="probe logistic"):
        commands.knn(KnnConfig(data="voc2007", root=str(tmp_path), **TINY))


def test_three_test_images_two_classes_and_a_class_absent_from_test(tmp_path: Path) -> None:
    suite_layouts.folders(tmp_path, {"train": 6}, classes=2)
    for number in range(3):
        suite_layouts.write(tmp_path / "test" / "class1" / f"{number}.png", 1, 70 + number)
    for command, config in (
        (commands.knn, KnnConfig),
        (commands.linear, LinearConfig),
        (commands.logistic, LogisticConfig),
    ):
        data = command(config(data=str(tmp_path), **TINY)).data
        assert data["test_images"] == 3 and data["top5"] == 100
        assert data["mean_per_class"] == data["top1"]


def test_a_run_keeps_the_results_of_its_probes(squares: Path, tmp_path: Path, model) -> None:
    from frugalvit.backbones.weights.model_folder import save_model_folder

    save_model_folder(model.backbone, tmp_path / "run" / "model")
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    where = TINY | {"model": str(tmp_path / "run")}
    result = commands.knn(KnnConfig(data=str(squares), **where))
    commands.logistic(LogisticConfig(data=str(squares), **where))
    kept = json.loads((tmp_path / "run" / "probes.json").read_text())
    assert result.data["run"] == where["model"] and len(kept) == 2
    assert kept[f"knn {result.data['data']}"]["top1"] == result.data["top1"]


def test_a_damaged_file_of_results_is_said_before_the_work(squares: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "probes.json").write_text('{"knn x": ')
    monkeypatch.setattr(commands, "open_model", lambda *_: pytest.fail("too late"))
    for command, config in (
        (commands.knn, KnnConfig),
        (commands.linear, LinearConfig),
        (commands.logistic, LogisticConfig),
    ):
        with pytest.raises(UserError, match=r"probes\.json is not readable JSON"):
            command(config(data=str(squares), **TINY | {"model": str(tmp_path)}))


def test_images_without_labels_are_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    for number in range(4):
        suite_layouts.write(tmp_path / f"{number}.png", 0, number)
    monkeypatch.setattr(commands, "open_model", lambda *_: pytest.fail("too late"))
    for command, config in (
        (commands.knn, KnnConfig),
        (commands.linear, LinearConfig),
        (commands.logistic, LogisticConfig),
    ):
        with pytest.raises(UserError, match="labels"):
            command(config(data=str(tmp_path), **TINY))


def test_one_class_is_refused(tmp_path: Path) -> None:
    suite_layouts.folders(tmp_path, {"train": 3, "test": 2}, classes=1)
    with pytest.raises(UserError, match="class"):
        commands.knn(KnnConfig(data=str(tmp_path), **TINY))


def embedded(images: int, classes: int = 3, prefix: str = "") -> FeatureSet:
    names = [f"{prefix}{i}" for i in range(images)]
    return FeatureSet(torch.arange(images).float()[:, None], torch.arange(images) % classes, None, names, names)


def test_splits_are_made_where_they_are_missing_and_do_not_overlap() -> None:
    only = make_probe_splits({"train": embedded(60)}, 3, 0.2, seed=0)
    parts = [set(part.features[:, 0].tolist()) for part in (only.train, only.val, only.test)]
    assert [len(part) for part in parts] == [39, 9, 12] and len(set.union(*parts)) == 60
    assert torch.bincount(only.test.targets).tolist() == [4, 4, 4]
    assert len(only.notes) == 2
    val_is_test = make_probe_splits({"train": embedded(30), "val": embedded(12, prefix="v")}, 3, 0.2, seed=0)
    assert len(val_is_test.test) == 12 and len(val_is_test.train) == 24
    given = make_probe_splits({"train": embedded(30), "val": embedded(12), "test": embedded(9)}, 3, 0.2, seed=0)
    assert [len(part) for part in (given.train, given.val, given.test)] == [30, 12, 9] and not given.notes
    again = make_probe_splits({"train": embedded(60)}, 3, 0.2, seed=0)
    assert torch.equal(again.train.features, only.train.features)
    other = make_probe_splits({"train": embedded(60)}, 3, 0.2, seed=5)
    for one, drawn_otherwise in ((only.train, other.train), (only.val, other.val), (only.test, other.test)):
        assert not torch.equal(one.features, drawn_otherwise.features)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.5])
def test_an_image_that_occurs_twice_stays_on_one_side(fraction: float) -> None:
    once = embedded(30)
    rows = torch.arange(90) % 30
    names = [once.names[row] for row in rows]
    assert once.labels is not None
    copied = FeatureSet(once.features[rows], once.labels[rows], None, names, names)
    made, alone = (make_probe_splits({"train": part}, 3, fraction, seed=0) for part in (copied, once))
    for part, expected in ((made.train, alone.train), (made.val, alone.val), (made.test, alone.test)):
        assert sorted(part.features[:, 0].tolist()) == sorted(3 * expected.features[:, 0].tolist())


def test_views_replace_the_training_features_alone() -> None:
    views = torch.stack([torch.arange(30.0)[:, None] + 100 * v for v in (1, 2)])
    made = make_probe_splits({"train": embedded(30), "test": embedded(9)}, 3, 0.2, seed=0, views=views)
    plain = make_probe_splits({"train": embedded(30), "test": embedded(9)}, 3, 0.2, seed=0)
    assert torch.equal(made.train.features[1], plain.train.features + 200)
    assert torch.equal(made.val.features, plain.val.features)


def test_too_few_images_to_hold_any_out() -> None:
    with pytest.raises(UserError, match="too few"):
        make_probe_splits({"train": embedded(3)}, 3, 0.2, seed=0)


def test_the_second_probe_uses_the_features_of_the_first(squares: Path, cache: Path, monkeypatch) -> None:
    first = commands.knn(KnnConfig(data=str(squares), **TINY)).data
    monkeypatch.setattr(FeatureExtractor, "images", lambda *_: pytest.fail("computed again"))
    second = commands.logistic(LogisticConfig(data=str(squares), **TINY)).data
    assert second["test_images"] == first["test_images"]


@pytest.mark.parametrize(
    ("called", "options"),
    [
        (knn_accuracy, {KnnConfig: {"ks": "ks", "temperature": "temperature"}}),
        (linear_probe, {LinearConfig: dict.fromkeys(("lrs", "weight_decays", "epochs")) | {"batch": "probe_batch"}}),
        (logistic_probe, {LogisticConfig: {"max_iterations": None}, SuiteConfig: {"max_iterations": None}}),
    ],
)
def test_probes_called_from_python_take_what_the_command_takes(called: Any, options: dict[Any, dict[str, Any]]) -> None:
    signature = inspect.signature(called).parameters
    for config, names in options.items():
        for name, field in names.items():
            default = config.model_fields[field or name].default
            assert signature[name].default == (tuple(default) if isinstance(default, list) else default)
