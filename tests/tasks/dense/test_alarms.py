"""A segmenter that calls everything background and a detector that finds nothing say so, with each class's score."""

from pathlib import Path

import pytest
import torch

from frugalvit.tasks.detection.commands import find_alarms as detector_alarms
from frugalvit.tasks.segmentation.commands import find_alarms as segmenter_alarms
from frugalvit.tasks.segmentation.metrics import Confusion
from frugalvit.utils import console
from helpers.dense_runs import Kind


def confusion(truth: list[int], predicted: list[int]) -> Confusion:
    counts = Confusion(3)
    counts.add(torch.tensor(predicted), torch.tensor(truth))
    return counts


@pytest.mark.parametrize(
    ("truth", "predicted", "alarm"),
    [
        ([0, 0, 1], [0, 0, 0], "it calls every pixel 'sky': the IoU of tree is 0"),
        ([0, 1, 2], [0, 1, 1], "it never predicts some classes: the IoU of road is 0"),
        ([0, 1, 2], [1, 2, 0], "mIoU 0.0 % is not above 11.1 %"),
        ([0, 1, 2], [0, 1, 2], ""),
        ([0, 0, 0], [0, 0, 0], ""),  # there is nothing else to find
    ],
)
def test_segmenter(truth: list[int], predicted: list[int], alarm: str) -> None:
    alarms = segmenter_alarms(confusion(truth, predicted), ("sky", "tree", "road"))
    assert len(alarms) == bool(alarm) and all(text.startswith(alarm) and "--epochs" in text for text in alarms)


@pytest.mark.parametrize(
    ("per_class", "scores", "alarm"),
    [
        ([["cat", 3, 0.0], ["dog", 2, 0.0]], [], "the detector finds nothing (no detection with a score of"),
        ([["cat", 3, 0.0], ["dog", 2, None]], [0.9], "the detector finds nothing (1 wrong detection with a"),
        ([["cat", 3, 0.2], ["dog", 2, 0.0]], [0.9], "it finds none of dog"),
        ([["cat", 3, 0.2], ["dog", 2, 0.1]], [0.9], ""),
    ],
)
def test_detector(per_class: list[list[object]], scores: list[float], alarm: str) -> None:
    alarms = detector_alarms(0.1, per_class, [{"score": score} for score in scores])
    assert len(alarms) == bool(alarm) and all(text.startswith(alarm) and "--epochs" in text for text in alarms)
    assert not detector_alarms(None, per_class, [])


def test_a_run_that_learned_nothing_prints_the_alarm(
    kind: Kind, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = request.getfixturevalue(kind.data_fixture)
    result = kind.commands.train(kind.make_config(data, tmp_path / "run", steps=1, lr=1e-9))
    console.print_result(result)
    printed = capsys.readouterr()
    (alarm,) = result.data["alarms"]
    assert f"warning: {alarm}" in printed.err and f"alarm       {alarm}" in printed.out
    assert "each class, worst first" in printed.out
    assert kind.evaluate(tmp_path / "run", data)["alarms"] == [alarm]
