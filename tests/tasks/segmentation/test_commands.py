"""The table of classes in a segmenter's report."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frugalvit.report.sections import table
from frugalvit.tasks.segmentation.commands import _per_class
from frugalvit.tasks.segmentation.metrics import IGNORED, Confusion


def test_classes_that_are_only_predicted_are_in_the_table() -> None:
    """The mean of the table is the mIoU."""
    confusion = Confusion(4)
    confusion.add(torch.tensor([0, 0, 0, 1, 1, 2, 3]), torch.tensor([0, 0, 0, 1, 1, 1, IGNORED]))
    data: Any = SimpleNamespace(data=SimpleNamespace(classes=("sky", "road", "tree", "car")))
    found = _per_class(confusion, data)
    assert found["rows"] == [
        ["sky", "50.0 %", 1.0, 1.0],
        ["road", "50.0 %", pytest.approx(2 / 3), pytest.approx(2 / 3)],
        ["tree", "0.0 %", 0.0, None],
    ]
    mean = sum(row[2] for row in found["rows"]) / 3
    assert confusion.summary()["miou"] == pytest.approx(mean)
    assert "<td>-</td>" in table(found["columns"], found["rows"])
