"""Images are decoded once per run or comparison, and freed afterwards."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, TRAIN, write_images


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever is decoded."""
    stores: list[Any] = []
    build = builders.build_store

    def noted(*values: Any, **keywords: Any) -> Any:
        store = build(*values, **keywords)
        stores.append(store)
        return store

    monkeypatch.setattr(builders, "build_store", noted)
    return stores


def left(built: list[Any]) -> int:
    return sum(store.images.numel() for store in built)


@pytest.mark.parametrize(("kind", "run", "common"), [(TrainConfig, train, TRAIN), (PretrainConfig, pretrain, PRETRAIN)])
def test_a_run_decodes_each_split_once(
    kind: Any, run: Any, common: dict[str, Any], photos: Path, tmp_path: Path, built: list[Any]
) -> None:
    run(kind.parse(common | {"steps": 2, "data": str(photos), "out": str(tmp_path / "run")}))
    assert len(built) == 2 and left(built) == 0


def test_a_comparison_decodes_each_split_once(photos: Path, tmp_path: Path, built: list[Any]) -> None:
    values = {"steps": 2, "seeds": 2, "data": str(photos), "out": str(tmp_path / "c")}
    compare(CompareConfig.parse(TRAIN | values | {"settings": ["a: lr=1e-3", "b: lr=2e-3"]}))
    assert len(built) == 2 and left(built) == 0


def test_a_failed_run_frees_its_images(
    photos: Path, tmp_path: Path, built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise UserError("no room")

    monkeypatch.setattr("frugalvit.experiment.experiment.compile_task", fails)
    with pytest.raises(UserError, match="no room"):
        train(TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(tmp_path / "run")}))
    assert len(built) == 2 and left(built) == 0
