"""``--labels``: what a probe does with a part of the labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.benchmarking.inference import accuracy_of
from frugalvit.config.probe import KnnConfig, LinearConfig, LogisticConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.splits import subsample_labels
from frugalvit.errors import UserError
from frugalvit.probing import commands
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.splits import make_probe_splits
from frugalvit.utils.files import read_json
from helpers import suite_layouts

TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}
PROBES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "knn": (commands.knn, KnnConfig, {"ks": [1]}),
    "linear": (commands.linear, LinearConfig, {"epochs": 5, "lrs": [1.0]}),
    "linear of views": (commands.linear, LinearConfig, {"epochs": 5, "lrs": [1.0], "views": 1}),
    "logistic": (commands.logistic, LogisticConfig, {}),
}


@pytest.mark.parametrize(
    ("part", "counts"), [(0.5, [5, 2, 1]), (0.01, [1, 1, 1]), (2.0, [2, 2, 1]), (8.0, [8, 4, 1]), (1.0, [10, 4, 1])]
)
def test_a_share_or_a_number_of_every_class(part: float, counts: list[int]) -> None:
    labels = np.repeat([0, 1, 2], [10, 4, 1])
    rows = subsample_labels(labels, part, seed=3)
    assert np.bincount(labels[rows]).tolist() == counts and len(set(rows)) == len(rows)
    assert np.array_equal(rows, subsample_labels(labels, part, seed=3))
    if part == 0.5:
        assert not np.array_equal(rows, subsample_labels(labels, part, seed=4))


@pytest.mark.parametrize("kind", [TrainConfig, KnnConfig])
def test_a_part_is_a_share_or_a_whole_number(kind: Any) -> None:
    needed = {"model": "run", "data": "photos"} if kind is KnnConfig else {"data": "photos"}
    assert kind.parse(needed | {"labels": "10"}).labels == 10 and kind.parse(needed).labels == 1
    for wrong in (0, -1, 2.5):
        with pytest.raises(UserError, match="labels"):
            kind.parse(needed | {"labels": wrong})


def part_of(images: int, first: int) -> FeatureSet:
    numbers = torch.arange(first, first + images)
    names = [str(number) for number in numbers.tolist()]
    return FeatureSet(numbers.float()[:, None], numbers % 3, None, names, names)


def test_settings_are_chosen_on_labels_that_are_known() -> None:
    """A val of a thousand labels would tell what ten of each class do not."""
    parts = {"train": part_of(60, 0), "val": part_of(30, 60), "test": part_of(9, 90)}
    made = make_probe_splits(parts, 3, 0.2, seed=0, labels=5.0)
    assert [len(part) for part in (made.train, made.val, made.test)] == [12, 3, 9]
    used = {*made.train.features[:, 0].tolist(), *made.val.features[:, 0].tolist()}
    assert len(used) == 15 and max(used) >= 60 and max(used) < 90  # val's labels count among them
    assert made.notes == ["15 of 90 labels are used", "settings are chosen on 3 of these"]
    alone = make_probe_splits({"train": part_of(60, 0)}, 3, 0.2, seed=0, labels=0.25)
    whole = make_probe_splits({"train": part_of(60, 0)}, 3, 0.2, seed=0)
    assert torch.equal(alone.test.features, whole.test.features)  # labels are few, what is tested on stays
    assert len(alone.train) + len(alone.val) == 12
    with pytest.raises(UserError, match="take 2 or more of each, or 'frugalvit probe knn'"):
        make_probe_splits(parts, 3, 0.2, seed=0, labels=0.001)


@pytest.mark.parametrize("name", PROBES)
def test_probes_learn_from_a_part_of_the_labels(squares: Path, name: str) -> None:
    probe, kind, more = PROBES[name]
    result = probe(kind(data=str(squares), labels=4, **more, **TINY))
    assert (result.data["train_images"], result.data["test_images"]) == (12, 12) and result.data["labels"] == 4
    assert "12 of 36 labels are used" in result.notes


def test_knn_without_a_test_split_asks_the_images_without_a_label(tmp_path: Path) -> None:
    folder = suite_layouts.folders(tmp_path, {"": 5})
    result = commands.knn(KnnConfig(data=str(folder), ks=[1], labels=2, **TINY))
    assert (result.data["train_images"], result.data["test_images"]) == (6, 9) and not result.data["leave_one_out"]
    assert "the images without a label were asked" in result.notes[-2]


def test_several_labels_an_image_have_no_part_of_a_class(tmp_path: Path) -> None:
    suite_layouts.voc2007(tmp_path)
    with pytest.raises(UserError, match="one label an image"):
        commands.logistic(LogisticConfig(data="voc2007", root=str(tmp_path), labels=0.5, **TINY))


def test_a_run_keeps_scores_of_few_labels_apart(squares: Path, tmp_path: Path) -> None:
    save_model_folder(
        create_backbone("swin_nano", img_size=32, num_classes=3), tmp_path / "model", classes=["a", "b", "c"], meta={}
    )
    (tmp_path / "config.yaml").write_text("{}")
    asked = {"data": str(squares), "ks": [1], **TINY, "model": str(tmp_path)}
    commands.knn(KnnConfig(**asked, labels=2, seed=1))
    assert accuracy_of(str(tmp_path)) is None  # of all labels there is none
    whole = commands.knn(KnnConfig(**asked)).data["top1"]
    kept = read_json(tmp_path / "probes.json", dict) or {}
    assert list(kept) == [f"knn {squares.name}, labels 2, seed 1", f"knn {squares.name}"]
    assert accuracy_of(str(tmp_path)) == (f"knn top1 on {squares.name}", whole)
