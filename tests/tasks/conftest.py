"""A detector and a segmenter, trained for four steps and shared by all tests."""

from pathlib import Path

import pytest

from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands
from helpers.dense_runs import detect_config, segment_config
from helpers.dense_samples import make_coco, make_scenes


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coco(tmp_path_factory.mktemp("coco") / "shapes", side=48)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes") / "shapes", side=40)


@pytest.fixture(scope="session")
def detector(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "detector"
    commands.train(detect_config(shapes, out, head="cascade"))
    return out


@pytest.fixture(scope="session")
def segmenter(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "segmenter"
    segment_commands.train(segment_config(scenes, out))
    return out
