"""Save and load trained segmenters and detectors."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit import create_backbone
from frugalvit.config.dense import SegmentPredictConfig
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.dense.checkpoint import FACTS, WEIGHTS, read_facts, save_trained
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.task import SegmentationTask
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec
from helpers.dense_runs import Kind


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
    task, _ = segment_commands.load_task(str(run), "cpu")
    for _ in range(8):
        save_trained(tmp_path, task, {})
        assert (tmp_path / WEIGHTS).read_bytes() == (run / WEIGHTS).read_bytes()


def test_folders_without_a_trained_network(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path.name} .*frugalvit {kind.verb} train"):
        read_facts(str(tmp_path), kind.verb)
    for damaged in ("{", "[]", '{"kind": '):
        (tmp_path / FACTS).write_text(damaged)
        with pytest.raises(UserError, match=FACTS):
            read_facts(str(tmp_path), kind.verb)


def test_a_checkpoint_contains_the_backbone(model: Path) -> None:
    ours, best = (load_model(str(path)).backbone.state_dict() for path in (model, model / "checkpoints/best.pt"))
    assert ours.keys() == best.keys() and all(torch.equal(ours[name], best[name]) for name in ours)


def test_batches_do_not_change_predictions(run: Path, tmp_path: Path) -> None:
    """Images of several sizes: those of one size share a batch."""
    (tmp_path / "in").mkdir()
    random = np.random.default_rng(0)
    for number, size in enumerate([(40, 32), (40, 32), (40, 32), (32, 40), (40, 32)]):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / "in" / f"{number}.png")
    for batch in (1, 8):
        values = {"model": str(run), "images": [str(tmp_path / "in")], "batch": batch, "device": "cpu"}
        result = segment_commands.predict(SegmentPredictConfig.parse(values | {"out": str(tmp_path / str(batch))}))
        assert [Path(row[0]).stem for row in result.tables[0].rows] == list("01234")
    for number in range(5):
        alone, together = (np.asarray(Image.open(tmp_path / batch / f"{number}.png")) for batch in ("1", "8"))
        assert (alone == together).mean() > 0.99
