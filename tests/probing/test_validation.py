"""Which features and labels the probes accept, and which errors they raise."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.probing.knn import knn_accuracy, knn_predict
from frugalvit.probing.linear import fit_linear, linear_probe
from frugalvit.probing.logistic import LogisticRegression, logistic_probe

CLASSES = 3


def blobs(images: int, seed: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(images) % classes
    noise = np.random.default_rng(seed).normal(size=(images, 6))
    return np.eye(6)[labels] + 0.7 * noise, labels


def arrays(classes: int = CLASSES) -> dict[str, Any]:
    (train, train_labels), (val, val_labels), (test, test_labels) = (blobs(n, n, classes) for n in (30, 18, 12))
    splits = {"train": train, "val": val, "test": test}
    return splits | {"train_labels": train_labels, "val_labels": val_labels, "test_labels": test_labels}


def by_knn(d: dict[str, Any], **more: Any) -> Tensor:
    parts = (d["train"], d["train_labels"], d["test"], d["test_labels"])
    found = knn_accuracy(*parts, ks=(1, 5), **more)
    return torch.tensor([list(scores.values()) for scores in found.values()])


def by_linear(d: dict[str, Any], **more: Any) -> Tensor:
    parts = (d["train"], d["train_labels"], d["val"], d["val_labels"], d["test"])
    return linear_probe(*parts, epochs=3, **more).scores


def by_logistic(d: dict[str, Any], **more: Any) -> Tensor:
    return logistic_probe(d["train"], d["train_labels"], d["val"], d["val_labels"], d["test"], **more).scores


PROBES = {"knn": by_knn, "linear": by_linear, "logistic": by_logistic}
every_probe = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
with_validation = pytest.mark.parametrize("probe", [by_linear, by_logistic], ids=["linear", "logistic"])


def relabelled(change: Callable[[np.ndarray], Any], data: dict[str, Any], *only: str) -> dict[str, Any]:
    """Change the labels of the named splits, or of all."""
    names = only or tuple(name for name in data if name.endswith("labels"))
    return data | {name: change(data[name]) for name in names}


@every_probe
@pytest.mark.parametrize(
    "change",
    [
        *(lambda labels, kind=kind: labels.astype(kind) for kind in ("uint8", "int16", "uint16", "float16", "float64")),
        lambda labels: labels[:, None],
        lambda labels: labels[:, None].astype(np.uint8),
        lambda labels: labels[:, None].tolist(),
        lambda labels: torch.tensor(labels, dtype=torch.float32, requires_grad=True),
    ],
    ids=["uint8", "int16", "uint16", "float16", "float64", "column", "uint8 column", "list of lists", "with gradient"],
)
def test_integers_of_any_type_are_labels(probe: Callable[..., Tensor], change: Callable) -> None:
    assert torch.equal(probe(relabelled(change, arrays())), probe(arrays()))


@every_probe
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_booleans_are_two_classes(probe: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    data = arrays(classes=2)
    assert torch.equal(probe(relabelled(lambda labels: (labels > 0).reshape(shape), data)), probe(data))


@every_probe
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda labels: labels - 1, "training features hold -1"),
        (lambda labels: np.where(labels > 0, 1, -1), "training features hold -1"),
        (lambda labels: labels + 0.5, "training features hold 0.5"),
        (lambda labels: np.where(labels > 1, np.nan, labels), "hold nan"),
        (lambda labels: np.where(labels > 1, np.inf, labels), "hold inf"),
        (lambda labels: np.eye(CLASSES, dtype=int)[labels], r"not 30x3: give targets\.argmax\(1\)"),
        (lambda labels: np.eye(CLASSES)[labels], r'metric="map11"'),
        (lambda labels: labels[None], "not 1x30"),
        (lambda labels: labels[:, None, None], "not 30x1x1"),
        (lambda labels: labels[0], "not a scalar"),
        (lambda labels: labels[:-1, None], "30 training features but 29 labels"),
        (lambda labels: None, "numpy arrays"),
    ],
)
def test_invalid_training_labels_are_errors(probe: Callable[..., Tensor], change: Callable, word: str) -> None:
    with pytest.raises(UserError, match=word) as raised:
        probe(relabelled(change, arrays(), "train_labels"))
    assert "\n" not in str(raised.value)


@every_probe
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda labels: labels - 1, "{} features hold -1"),
        (lambda labels: labels + 0.5, "{} features hold 0.5"),
        (lambda labels: np.eye(CLASSES, dtype=int)[labels], "labels of the {} features must be"),
        (lambda labels: labels[:1], "{} features but 1 labels"),
    ],
)
def test_invalid_other_labels_are_errors(probe: Callable[..., Tensor], change: Callable, word: str) -> None:
    split = "test" if probe is by_knn else "val"
    with pytest.raises(UserError, match=word.format({"test": "test", "val": "validation"}[split])):
        probe(relabelled(change, arrays(), f"{split}_labels"))


@every_probe
@pytest.mark.parametrize("splits", [("train",), ("val", "test")])
def test_labels_beyond_the_last_class_are_errors(probe: Callable[..., Tensor], splits: tuple[str, ...]) -> None:
    data = relabelled(lambda labels: labels + 3, arrays(), *(f"{split}_labels" for split in splits))
    with pytest.raises(UserError, match=r"hold 5.* at least 6 classes"):
        probe(data, classes=4)
    if probe is not by_knn:
        assert probe(data, classes=6).shape[1] == probe(data).shape[1] == 6


@every_probe
@pytest.mark.parametrize(
    "change",
    [
        {"test": np.zeros((12, 5))},
        {"test": np.zeros((12, 2, 3))},
        {"train": np.zeros(30), "val": np.zeros(18), "test": np.zeros(12)},
        {"train": np.zeros((30, 2, 3)), "val": np.zeros((18, 2, 3)), "test": np.zeros((12, 2, 3))},
    ],
)
def test_features_of_other_widths_are_errors(probe: Callable[..., Tensor], change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="features of one width, not"):
        probe(arrays() | change)


@with_validation
@pytest.mark.parametrize("shape", [(18, 5), (18,), (18, 2, 3)])
def test_validation_features_of_other_widths_are_errors(probe: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="features of one width, not"):
        probe(arrays() | {"val": np.zeros(shape)})


@pytest.mark.parametrize("shape", [(17, 6), (18, 5), (2, 18, 6)])
def test_held_out_must_have_the_shape_of_train(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"held_out .*\[18, 6\]"):
        by_linear(arrays(), held_out=np.zeros(shape))


@with_validation
@pytest.mark.parametrize("metric", ["top1", "acc", "MAP11", ""])
def test_unknown_metrics_are_errors(probe: Callable[..., Tensor], metric: str) -> None:
    with pytest.raises(UserError, match=f'"accuracy", "mean_per_class".* or "roc_auc", not "{metric}"'):
        probe(arrays(), metric=metric)


def test_average_precision_needs_several_labels() -> None:
    with pytest.raises(UserError, match='"accuracy", "mean_per_class" or "roc_auc", not "map11"'):
        by_linear(arrays(), metric="map11")
    with pytest.raises(UserError, match=r"\(N, C\).* another metric"):
        by_logistic(arrays(), metric="map11")


@pytest.mark.parametrize("kind", ["bool", "uint8", "float32"])
def test_several_labels_of_any_type(kind: str) -> None:
    data = relabelled(lambda labels: np.eye(CLASSES, dtype=int)[labels], arrays())
    expected = by_logistic(data, metric="map11")
    assert torch.equal(by_logistic(relabelled(lambda targets: targets.astype(kind), data), metric="map11"), expected)


@pytest.mark.parametrize(
    ("change", "split", "word"),
    [
        (lambda targets: targets * 2, "train", "training features go from 0 to 2"),
        (lambda targets: targets - 2, "val", "validation features go from -2 to -1"),
        (lambda targets: targets / 2, "train", "training features hold 0.5"),
        (lambda targets: targets[:-1], "val", "18 validation features but 17 labels"),
        (lambda targets: targets[:, :2], "val", "Training targets have 3 classes, but validation targets 2"),
    ],
)
def test_invalid_several_labels_are_errors(change: Callable, split: str, word: str) -> None:
    data = relabelled(lambda labels: np.eye(CLASSES, dtype=int)[labels], arrays())
    with pytest.raises(UserError, match=word):
        by_logistic(relabelled(change, data, f"{split}_labels"), metric="map11")


def test_one_column_of_several_labels() -> None:
    data = relabelled(lambda labels: (labels > 0)[:, None], arrays())
    assert by_logistic(data, metric="map11").shape == (12, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda features, labels: knn_predict(features, labels, None, (1,)),
        lambda features, labels: fit_linear(features, labels, 3, epochs=1),
        LogisticRegression,
    ],
)
@pytest.mark.parametrize(("change", "word"), [(-1, "hold -1"), (0.5, "hold 0.5"), (0, "of one width")])
def test_parts_of_the_probes_raise_the_same_errors(call: Callable, change: float, word: str) -> None:
    features, labels = blobs(30, 0)
    with pytest.raises(UserError, match=word):
        call(features[:, 0] if change == 0 else features, labels + change)
