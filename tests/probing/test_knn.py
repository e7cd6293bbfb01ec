"""k-NN against the released code's numbers and against a loop over images."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import frugalvit as fv
from frugalvit.errors import UserError
from frugalvit.probing import knn as knn_module
from frugalvit.probing.knn import knn_accuracy, knn_predict


def brute_force_votes(train: Tensor, labels: Tensor, image: Tensor, k: int, classes: int, own: int = -1) -> list[float]:
    """The votes of one image's k nearest neighbours, one at a time; ``own`` is left out."""
    cosine = [
        (float(torch.dot(row, image) / (row.norm() * image.norm())), int(label))
        for i, (row, label) in enumerate(zip(train.double(), labels, strict=True))
        if i != own
    ]
    votes = [0.0] * classes
    for similarity, label in sorted(cosine, reverse=True)[:k]:
        votes[label] += math.exp(similarity / 0.07)
    return votes


def set_chunks(monkeypatch: pytest.MonkeyPatch, test: int, train: int, images: int) -> None:
    """Compare this many rows of test with this many of train at a time."""
    monkeypatch.setattr(knn_module, "TRAIN_CHUNK", {"cpu": train})
    monkeypatch.setattr(knn_module, "CELLS", {"cpu": test * min(train, images)})


@pytest.mark.parametrize("chunks", [None, (7, 13), (200, 1), (1, 400)])
def test_equals_the_released_code(golden, chunks, monkeypatch) -> None:
    g = {name: torch.from_numpy(array) for name, array in golden("g_knn").items() if array.dtype.kind in "if"}
    if chunks is not None:
        set_chunks(monkeypatch, *chunks, len(g["train"]))
    scores_by_k = knn_accuracy(g["train"], g["train_labels"], g["test"], g["test_labels"], classes=8)
    for k in (10, 20, 100, 200):
        assert [scores_by_k[k]["top1"], scores_by_k[k]["top5"]] == pytest.approx(g[f"k{k}"].tolist(), abs=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 9), st.integers(1, 5), st.integers(1, 12))
def test_equals_brute_force(seed: int, images: int, tests: int, classes: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    train, test = torch.randn(images, 6, generator=generator), torch.randn(tests, 6, generator=generator)
    labels = torch.randint(classes, (images,), generator=generator)
    ks = (1, 3, 50)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_chunks(monkeypatch, chunk, chunk, images)
        ranked = knn_predict(train, labels, test, ks, 0.07, classes)
    for k in ks:
        for row, image in enumerate(test.double()):
            votes = brute_force_votes(train, labels, image, k, classes)
            expected = sorted(range(classes), key=lambda c: (-votes[c], c))[: min(5, k, images)]
            assert ranked[k][row].tolist() == expected


def test_leave_one_out_equals_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    train, labels = torch.randn(23, 4, generator=generator), torch.randint(3, (23,), generator=generator)
    set_chunks(monkeypatch, 5, 4, len(train))
    ranked = knn_predict(train, labels, None, (1, 5, 100), 0.07, 3)
    for k in (1, 5, 100):
        for i, image in enumerate(train.double()):
            votes = brute_force_votes(train, labels, image, k, 3, own=i)
            assert ranked[k][i, 0] == max(range(3), key=lambda c: votes[c])


@pytest.mark.parametrize("labels", [1, 5])
def test_copies_do_not_vote_for_each_other(labels: int, tmp_path: Path) -> None:
    """Noise of no class; each image has three files."""
    random = np.random.default_rng(0)
    for number in range(48):
        folder = tmp_path / "noise" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        for copy in range(3):
            image.save(folder / f"{number}_{copy}.png")
    options = {"img_size": 32, "device": "cpu", "ks": [1], "labels": labels}
    scored = fv.run("probe knn", "swin_nano", str(tmp_path / "noise"), **options)
    assert scored["train_images"] == (48 if labels == 1 else 10) and scored["top1"] < 80


def test_classes_without_training_images() -> None:
    train = torch.eye(4)
    scores_by_k = knn_accuracy(train, torch.tensor([0, 0, 1, 1]), train[:3], torch.tensor([0, 0, 2]), ks=(1, 200))
    assert scores_by_k[1] == {"top1": pytest.approx(200 / 3), "top5": pytest.approx(200 / 3), "mean_per_class": 50}
    assert scores_by_k[200]["top5"] == 100
    assert set(scores_by_k) == {1, 200}


@pytest.mark.parametrize(("temperature", "answer"), [(0.07, 0), (1.0, 1)])
def test_temperature_weighs_the_votes(temperature: float, answer: int) -> None:
    """One image at a cosine of 1 against two at 0.9: exp(-0.1 / 0.07) is a quarter, exp(-0.1) nearly one."""
    train = torch.tensor([[1.0, 0.0], [0.9, 0.19**0.5], [0.9, -(0.19**0.5)]])
    ranked = knn_predict(train, torch.tensor([0, 1, 1]), train[:1], (3,), temperature, 2)
    assert ranked[3][0, 0] == answer


def test_small_temperatures_do_not_overflow() -> None:
    train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    ranked = knn_predict(train, torch.tensor([1, 0, 0]), train[:1], (3,), 1e-4, 2)
    assert ranked[3].tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "change",
    [
        {"ks": (0,)},
        {"ks": ()},
        {"temperature": 0.0},
        {"test_labels": None},
        {"train": torch.zeros(1, 4), "train_labels": torch.zeros(1, dtype=torch.long), "test": None},
        {"test": torch.zeros(0, 4), "test_labels": torch.zeros(0, dtype=torch.long)},
    ],
)
def test_invalid_inputs_are_errors(change: dict) -> None:
    valid: dict = {
        "train": torch.rand(5, 4),
        "train_labels": torch.zeros(5, dtype=torch.long),
        "test": torch.rand(3, 4),
        "test_labels": torch.zeros(3, dtype=torch.long),
    }
    with pytest.raises(UserError):
        knn_accuracy(**(valid | change))


@pytest.mark.gpu
def test_gpu_agrees_with_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(3000, 32, generator=generator), torch.randn(500, 32, generator=generator)
    labels, wanted = torch.randint(10, (3000,), generator=generator), torch.randint(10, (500,), generator=generator)
    on_host = knn_accuracy(train, labels, test, wanted)
    on_device = knn_accuracy(train, labels, test, wanted, device="cuda")
    for k, scores in on_host.items():
        assert on_device[k]["top1"] == pytest.approx(scores["top1"], abs=0.5)
