"""Weights that were just evaluated are not scored again on the same images."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.config.train import TrainConfig
from frugalvit.tasks.classification import train
from frugalvit.tasks.classification.metrics import ClassificationScores
from frugalvit.tasks.classification.task import ClassificationTask
from helpers.tiny_runs import TRAIN, write_images

SCORES = ("top1", "top5", "mean_per_class")


@pytest.mark.parametrize(
    ("tops", "asked"), [((0.0, 50.0), 2), ((50.0, 0.0), 3)], ids=["the last is the best", "an earlier one is"]
)
def test_a_run_scores_the_same_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tops: tuple[float, ...], asked: int
) -> None:
    made: list[ClassificationScores] = []
    whole, fed = ClassificationTask.scores, iter(tops)
    monkeypatch.setattr(ClassificationTask, "scores", lambda task, data: made.append(whole(task, data)) or made[-1])
    evaluate = ClassificationTask.evaluate
    monkeypatch.setattr(ClassificationTask, "evaluate", lambda task, step: evaluate(task, step) | {"top1": next(fed)})
    settings: dict[str, Any] = TRAIN | {"steps": 4, "evaluate_every": 2, "device": "cpu", "out": str(tmp_path / "run")}
    data = write_images(tmp_path / "images")
    summary = train.train(TrainConfig.parse(settings | {"data": str(data)})).data
    assert len(made) == asked and summary["best_step"] == (4 if asked == 2 else 2)
    assert {name: summary[name] for name in SCORES} == made[-1].summary()
