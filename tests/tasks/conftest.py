"""A detector and a segmenter, trained for four steps and shared by all tests."""

from pathlib import Path

import pytest

from helpers.dense_runs import Kind
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
    Kind("detect").train(shapes, out, head="cascade")
    return out


@pytest.fixture(scope="session")
def segmenter(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "segmenter"
    Kind("segment").train(scenes, out)
    return out


@pytest.fixture(params=["detect", "segment"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


@pytest.fixture
def model(kind: Kind, request: pytest.FixtureRequest) -> Path:
    """The trained model of the kind."""
    return request.getfixturevalue(kind.model_fixture)


@pytest.fixture
def data(kind: Kind, request: pytest.FixtureRequest) -> Path:
    """The data of the kind."""
    return request.getfixturevalue(kind.data_fixture)
