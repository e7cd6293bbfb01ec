"""IoU and accuracy of pixels, by hand and against torchmetrics."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frugalvit.tasks.segmentation.commands import _per_class
from frugalvit.tasks.segmentation.metrics import IGNORED, Confusion


def test_iou_by_hand() -> None:
    """truth 0 0 1 1 / 2 2 2 i, predicted 0 1 1 1 / 2 2 0 0: i is not counted."""
    truth = torch.tensor([[0, 0, 1, 1], [2, 2, 2, IGNORED]], dtype=torch.uint8)
    predicted = torch.tensor([[0, 1, 1, 1], [2, 2, 0, 0]])
    confusion = Confusion(3)
    confusion.add(predicted, truth)
    assert confusion.counts.tolist() == [[1, 1, 0], [0, 2, 0], [1, 0, 2]]
    assert confusion.ious().tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert confusion.accuracies().tolist() == pytest.approx([1 / 2, 1, 2 / 3])  # precisions are 1/2, 2/3 and 1
    scores = confusion.summary()
    assert scores["miou"] == pytest.approx(5 / 9)
    assert scores["mean_accuracy"] == pytest.approx((1 / 2 + 1 + 2 / 3) / 3)
    assert scores["pixel_accuracy"] == pytest.approx(5 / 7)


def test_absent_classes_do_not_count() -> None:
    truth = torch.randint(0, 4, (2, 9, 7))
    confusion = Confusion(6)
    confusion.add(truth, truth)
    assert confusion.summary() == {"miou": 1.0, "mean_accuracy": 1.0, "pixel_accuracy": 1.0}


def test_iou_equals_torchmetrics() -> None:
    from torchmetrics.classification import MulticlassJaccardIndex

    generator = torch.Generator().manual_seed(0)
    truth, predicted = (torch.randint(0, 5, (3, 16, 16), generator=generator) for _ in range(2))
    truth[0, :4] = IGNORED
    confusion = Confusion(5)
    confusion.add(predicted, truth)
    theirs = MulticlassJaccardIndex(5, average="macro", ignore_index=IGNORED)(predicted, truth)
    assert confusion.summary()["miou"] == pytest.approx(float(theirs), abs=1e-6)


def test_only_ignored_pixels_score_zero() -> None:
    confusion = Confusion(2)
    confusion.add(torch.zeros(3, 3, dtype=torch.int64), torch.full((3, 3), IGNORED))
    assert confusion.summary()["miou"] == 0


def test_the_mean_of_the_report_table_is_the_miou() -> None:
    """The worst class comes first; classes that are only predicted have a row."""
    confusion = Confusion(4)
    confusion.add(torch.tensor([0, 0, 0, 1, 1, 2, 3]), torch.tensor([0, 0, 0, 1, 1, 1, IGNORED]))
    dataset: Any = SimpleNamespace(data=SimpleNamespace(classes=("sky", "road", "tree", "car")))
    rows = _per_class(confusion, dataset)["rows"]
    assert rows == [
        ["tree", "0.0 %", 0.0, None],
        ["road", "50.0 %", pytest.approx(2 / 3), pytest.approx(2 / 3)],
        ["sky", "50.0 %", 1.0, 1.0],
    ]
    assert confusion.summary()["miou"] == pytest.approx(sum(row[2] for row in rows) / 3)
