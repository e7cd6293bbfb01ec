"""Training on a GPU in half precision; scores agree with the CPU."""

from pathlib import Path

import pytest

from frugalvit.config.dense import DetectEvalConfig, SegmentEvalConfig
from helpers.dense_runs import Kind


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [("detect", {"head": "mask-rcnn"}, 0.02), ("detect", {"head": "cascade"}, 0.02), ("segment", {}, 0.01)],
    indirect=["kind"],
)
def test_models_train_in_half_precision(kind: Kind, options: dict[str, str], tolerance: float, tmp_path: Path) -> None:
    data = kind.make_data(tmp_path / "shapes", side=48)
    summary = kind.train(data, tmp_path / "run", device="cuda", steps=30, evaluate_every=30, **options)
    assert summary["skipped_steps"] == 0
    config = DetectEvalConfig if kind.verb == "detect" else SegmentEvalConfig
    gpu, cpu = (
        kind.commands.evaluate(config(model=str(tmp_path / "run"), data=str(data), device=device)).data
        for device in ("cuda", "cpu")
    )
    assert gpu[kind.metric] == pytest.approx(cpu[kind.metric], abs=tolerance)
