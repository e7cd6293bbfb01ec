"""The features and labels that every probe accepts, and the errors for others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.probing.knn import knn_accuracy
from frugalvit.probing.linear import linear_probe
from frugalvit.probing.logistic import logistic_probe
from frugalvit.probing.validation import as_features

CLASSES = 3


def blobs(images: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(images) % CLASSES
    return np.eye(6)[labels] + 0.7 * np.random.default_rng(images).normal(size=(images, 6)), labels


def arrays() -> dict[str, Any]:
    (train, train_labels), (val, val_labels), (test, test_labels) = map(blobs, (30, 18, 12))
    splits = {"train": train, "val": val, "test": test}
    return splits | {"train_labels": train_labels, "val_labels": val_labels, "test_labels": test_labels}


def by_knn(d: dict[str, Any], **more: Any) -> Tensor:
    scores = knn_accuracy(d["train"], d["train_labels"], d["test"], d["test_labels"], ks=(1, 5), **more)
    return torch.tensor([list(values.values()) for values in scores.values()])


def by_linear(d: dict[str, Any], **more: Any) -> Tensor:
    parts = (d["train"], d["train_labels"], d["val"], d["val_labels"], d["test"])
    return linear_probe(*parts, epochs=3, **more).scores


def by_logistic(d: dict[str, Any], **more: Any) -> Tensor:
    return logistic_probe(d["train"], d["train_labels"], d["val"], d["val_labels"], d["test"], **more).scores


every_probe = pytest.mark.parametrize("probe", [by_knn, by_linear, by_logistic])


def relabelled(change: Callable[[np.ndarray], Any], *only: str) -> dict[str, Any]:
    """Change the labels of the named splits, or of all."""
    data = arrays()
    names = [f"{split}_labels" for split in only or ("train", "val", "test")]
    return data | {name: change(data[name]) for name in names}


@every_probe
@pytest.mark.parametrize("change", [lambda labels: labels.astype("uint8"), lambda labels: labels.tolist()])
def test_integers_of_any_type_are_labels(probe: Callable[..., Tensor], change: Callable) -> None:
    assert torch.equal(probe(relabelled(change)), probe(arrays()))


@every_probe
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    "change",
    [
        lambda labels: labels - 1,
        lambda labels: labels + 3,  # beyond the last class
        lambda labels: labels + 0.0,
        lambda labels: labels[:, None],
        lambda labels: np.where(labels > 1, np.nan, labels),
        lambda labels: np.eye(CLASSES, dtype=int)[labels],
        lambda labels: labels[0],
        lambda labels: labels[:-1],
        lambda labels: labels[:0],
        lambda labels: None,
        lambda labels: ["a"] * len(labels),
    ],
)
def test_invalid_labels_are_errors(probe: Callable[..., Tensor], change: Callable, split: str) -> None:
    split = "test" if probe is by_knn and split == "val" else split
    with pytest.raises(UserError, match="abels") as raised:
        probe(relabelled(change, split), classes=CLASSES)
    assert "\n" not in str(raised.value)


@every_probe
@pytest.mark.parametrize(
    "change",
    [
        {"test": np.zeros((12, 5))},
        {"test": np.zeros((12, 2, 3))},
        {"test": np.full((12, 6), np.nan)},
        {"train": np.zeros(30), "val": np.zeros(18), "test": np.zeros(12)},
        {"train": np.zeros((0, 6)), "train_labels": []},
    ],
)
def test_invalid_features_are_errors(probe: Callable[..., Tensor], change: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        probe(arrays() | change)


@pytest.mark.parametrize("kind", ["bool", "uint8"])
def test_several_labels_of_any_type(kind: str) -> None:
    targets = relabelled(lambda labels: np.eye(CLASSES, dtype=int)[labels])
    converted = relabelled(lambda labels: np.eye(CLASSES, dtype=kind)[labels])
    assert torch.equal(by_logistic(converted, metric="map11"), by_logistic(targets, metric="map11"))


@pytest.mark.parametrize(
    "change",
    [lambda targets: targets * 2, lambda targets: targets / 2, lambda targets: targets[1:], lambda targets: targets[0]],
)
def test_invalid_several_labels_are_errors(change: Callable) -> None:
    with pytest.raises(UserError, match=r"Targets|Labels"):
        by_logistic(relabelled(lambda labels: change(np.eye(CLASSES, dtype=int)[labels])), metric="map11")


def test_unknown_metrics_are_errors() -> None:
    with pytest.raises(UserError, match="top1"):
        by_logistic(arrays(), metric="top1")


def test_views_are_counted_one_by_one() -> None:
    views = torch.zeros(2, 3, 4)
    views[1, 2, 0] = torch.nan
    with pytest.raises(UserError, match="1 of 6 rows"):
        as_features(views, views=True)
