"""Save and load trained segmenters and detectors."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit import create_backbone
from frugalvit.config.dense import DetectConfig, SegmentConfig, SegmentPredictConfig
from frugalvit.engine.step import TrainPlan
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.dense.checkpoint import FACTS, WEIGHTS, read_facts, save_trained
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.task import SegmentationTask
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec
from helpers.tiny_runs import resolve


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of an untrained segmenter."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    backbone = create_backbone("swin_nano", img_size=32, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    task = SegmentationTask(Segmenter(Pyramid(backbone), SegmenterSpec(3, 16)), 32)
    facts = {"kind": "segment", "spec": asdict(task.net.spec), "side": 32, "classes": ["a", "b", "c"], "ignored": 255}
    save_trained(folder, task, facts | {"labels": [0, 1, 2]})
    return folder


def test_equal_networks_write_equal_files(run: Path, tmp_path: Path) -> None:
    """safetensors writes several metadata keys in random order: eight equal files are not chance."""
    task = segment_commands.load_task(str(run), read_facts(str(run), "segment"), "cpu", 1)
    for _ in range(8):
        save_trained(tmp_path, task, {})
        assert (tmp_path / WEIGHTS).read_bytes() == (run / WEIGHTS).read_bytes()


def test_images_of_one_size_share_a_batch(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    random = np.random.default_rng(0)
    for number, size in enumerate([(40, 32), (40, 32), (40, 32), (32, 40), (40, 32)]):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / "in" / f"{number}.png")
    seen: list[int] = []
    predict = SegmentationTask.predict

    def counted(self: SegmentationTask, pictures: list[torch.Tensor], test: Any) -> torch.Tensor:
        seen.append(len(pictures))
        return predict(self, pictures, test)

    monkeypatch.setattr(SegmentationTask, "predict", counted)
    found = {}
    for batch, groups in ((1, [1] * 5), (2, [2, 1, 1, 1]), (8, [3, 1, 1])):
        values = {"model": str(run), "images": [str(tmp_path / "in")], "batch": batch, "device": "cpu"}
        out = tmp_path / f"out_{batch}"
        result = segment_commands.predict(SegmentPredictConfig.parse(values | {"out": str(out)}))
        assert [Path(row[0]).stem for row in result.tables[0].rows] == list("01234")
        assert seen == groups
        seen.clear()
        found[batch] = [np.asarray(Image.open(out / f"{number}.png")) for number in range(5)]
    for number in range(5):
        assert found[8][number].shape == found[1][number].shape
        assert (found[8][number] == found[1][number]).mean() > 0.99


@pytest.mark.parametrize(("kind", "name"), [("detect", "detector"), ("segment", "segmenter")])
def test_folders_without_a_trained_network(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run at"):
        read_facts(str(tmp_path), kind)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match=f"no trained {name}"):
        read_facts(str(tmp_path), kind)
    for damaged in ("{", "[]", '{"kind": '):
        (tmp_path / FACTS).write_text(damaged)
        with pytest.raises(UserError, match=FACTS):
            read_facts(str(tmp_path), kind)


@pytest.mark.parametrize(("kind", "config"), [("detect", DetectConfig), ("segment", SegmentConfig)])
def test_peer_timeout_reaches_the_plan(kind: str, config: Any) -> None:
    settings = config.parse({"data": "x", "img_size": 64, "batch": 4, "lr": 1e-3, "steps": 10, "peer_timeout": 7.0})
    assert TrainPlan.from_config(resolve(settings), 100, 1).rank_timeout == 7.0


@pytest.mark.parametrize("kind", ["detector", "segmenter"])
def test_a_checkpoint_contains_the_backbone(kind: str, request: pytest.FixtureRequest) -> None:
    trained = request.getfixturevalue(kind)
    ours, best = (load_model(str(path)).backbone.state_dict() for path in (trained, trained / "checkpoints/best.pt"))
    assert ours.keys() == best.keys() and all(torch.equal(ours[name], best[name]) for name in ours)


def test_the_loss_is_the_sum_of_all_losses(run: Path) -> None:
    task = segment_commands.load_task(str(run), read_facts(str(run), "segment"), "cpu", 8)
    parts = {"one": torch.tensor(2.0), "two": torch.tensor(0.5)}
    task.losses = lambda batch: parts  # type: ignore[method-assign]
    result = task(None, 0)
    assert result["loss"] == 2.5 and {"one", "two"} <= result.keys()
