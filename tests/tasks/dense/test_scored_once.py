"""The last evaluation of a run is not repeated for its final scores."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.tasks.detection import commands as detect_commands
from frugalvit.tasks.detection.task import DetectionTask
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.task import SegmentationTask
from helpers.dense_runs import detect_config, segment_config

LAST, EARLIER = (0.0, 0.5), (0.5, 0.0)
"""Scores at steps 1 and 2."""


@pytest.mark.parametrize(
    ("verb", "values", "more", "evaluations"),
    [
        ("detect", LAST, {}, 2),
        ("detect", EARLIER, {}, 3),
        ("segment", LAST, {}, 2),
        ("segment", EARLIER, {}, 3),
        ("segment", LAST, {"test": {"multi_scale": True, "scales": [1.0]}}, 3),  # the single-scale score is reused
    ],
)
def test_a_run_scores_its_last_weights_once(
    verb: str,
    values: tuple[float, ...],
    more: dict[str, Any],
    evaluations: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, name, commands, make, data = {
        "detect": (DetectionTask, "find", detect_commands, detect_config, "shapes"),
        "segment": (SegmentationTask, "scores", segment_commands, segment_config, "scenes"),
    }[verb]
    calls: list[Any] = []
    original, evaluate, fed = getattr(kind, name), kind.evaluate, iter(values)
    monkeypatch.setattr(kind, name, lambda task, *rest: calls.append(rest) or original(task, *rest))
    monkeypatch.setattr(kind, "evaluate", lambda task, step: evaluate(task, step) | {kind.best_metric: next(fed)})
    where = request.getfixturevalue(data)
    config: Any = make(where, tmp_path / "run", steps=2, evaluate_every=1, report=False, **more)
    summary = commands.train(config).data
    assert len(calls) == evaluations and summary["best_step"] == (2 if values == LAST else 1)
    again = commands.evaluate(eval_config(verb, tmp_path / "run", where, config)).data
    assert again[kind.best_metric] == pytest.approx(summary[kind.best_metric], abs=1e-6)


def eval_config(verb: str, run: Path, data: Path, config: Any) -> Any:
    from frugalvit.config.dense import DetectEvalConfig, SegmentEvalConfig

    values: dict[str, Any] = {"model": str(run), "data": str(data), "device": "cpu"}
    if verb == "detect":
        return DetectEvalConfig.parse(values)
    return SegmentEvalConfig.parse(values | {"test": config.test.model_dump()})
