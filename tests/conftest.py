"""Fixtures every test may use: golden numbers, real data, and the marks for GPU and slow tests."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from frugalvit import console
from frugalvit.training.processors import tune_for_cpu

settings.register_profile("frugalvit", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("frugalvit")

# Two test processes on two cores: more threads each would only fight.
torch.set_num_threads(1)
tune_for_cpu()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    too_slow = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(too_slow)


@pytest.fixture(autouse=True)
def _own_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Nor does what several tests share."""
    if fixturedef.scope != "function":
        torch.manual_seed(zlib.crc32(fixturedef.argname.encode()))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's caches, or is quiet because one before it was."""
    console.set_quiet(False)
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Numbers the released code produced: ``golden("a_drloc")`` is a dict of arrays."""
    folder = _folder_from("FRUGALVIT_GOLDEN", "golden numbers")

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return load


@pytest.fixture
def data_root() -> Path:
    """The folder of real datasets."""
    return _folder_from("FRUGALVIT_DATA", "real datasets")


def _folder_from(variable: str, what: str) -> Path:
    value = os.environ.get(variable)
    if not value or not Path(value).is_dir():
        pytest.skip(f"no {what}: set {variable} to their folder")
    return Path(value)
