"""Images are decoded once per run or comparison, and freed afterwards."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from helpers.tiny_runs import TRAIN, run_tiny


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stores that were built."""
    stores: list[Any] = []
    build = builders.build_store

    def record(*values: Any, **keywords: Any) -> Any:
        store = build(*values, **keywords)
        stores.append(store)
        return store

    monkeypatch.setattr(builders, "build_store", record)
    return stores


def cached_numbers(built: list[Any]) -> int:
    return sum(store.images.numel() for store in built)


@pytest.mark.parametrize(("verb", "stores"), [("train", 3), ("pretrain", 3)])
def test_a_run_decodes_each_split_once(verb: str, stores: int, photos: Path, tmp_path: Path, built: list[Any]) -> None:
    """Both also evaluate training images, for the report and for k-NN, which are decoded in full for that."""
    run_tiny(verb, steps=2, data=photos, out=tmp_path / "run")
    assert len(built) == stores and cached_numbers(built) == 0


def test_a_comparison_decodes_each_split_once(photos: Path, tmp_path: Path, built: list[Any]) -> None:
    values = {"steps": 2, "seeds": 2, "data": str(photos), "out": str(tmp_path / "c")}
    compare(CompareConfig.parse(TRAIN | values | {"settings": ["a: lr=1e-3", "b: lr=2e-3"]}))
    assert len(built) == 3 and cached_numbers(built) == 0


def test_a_failed_run_frees_its_images(
    photos: Path, tmp_path: Path, built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise UserError("no room")

    monkeypatch.setattr("frugalvit.experiment.experiment.compile_task", fails)
    with pytest.raises(UserError, match="no room"):
        run_tiny("train", data=photos, out=tmp_path / "run")
    assert len(built) == 2 and cached_numbers(built) == 0
