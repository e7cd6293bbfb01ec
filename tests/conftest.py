"""Shared fixtures (golden numbers, real data, small models) and the marks for GPU and slow tests."""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from frugalvit.engine.hardware import configure_cpu
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.utils import console
from helpers import browser as browsers
from helpers import suite_layouts
from helpers.fork_server import skip_waiting_for_disks
from helpers.tiny_runs import write_images

settings.register_profile("frugalvit", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("frugalvit")

# Tests run as one process per core.
torch.set_num_threads(1)
configure_cpu()
skip_waiting_for_disks()


TESTS = Path(__file__).parent
# The tier "runs": tests that train tiny networks through the commands.
RUNS = (
    "experiment/",
    "comparison/",
    "benchmarks/test_reproduce",
    "docs/",
    "runs/test_resume",
    "tasks/classification/test_train",
    "tasks/classification/test_wide_images",
    "tasks/pretraining/test_train",
    "tasks/pretraining/test_continue",
    "tasks/pretraining/test_instances",
    "tasks/distillation/",
    "tasks/dense/",
    "cli/test_demo",
    "cli/test_look",
    "test_wheel",
)


def slow_cases() -> list[re.Pattern[str]]:
    """Return the patterns of slow_cases.txt, in which * stands for any text."""
    lines = (TESTS / "slow_cases.txt").read_text(encoding="utf-8").splitlines()
    return [re.compile(re.escape(line).replace(r"\*", ".*")) for line in lines if line and not line.startswith("#")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    too_slow = pytest.mark.skip(reason="slow: run with --slow")
    cases = slow_cases()
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        name = f"{path}::{item.nodeid.partition('::')[2]}"
        if any(case.fullmatch(name) for case in cases):
            item.add_marker("slow")
        markers = {marker.name for marker in item.iter_markers()}  # item.keywords also has the names of folders: runs/
        if not {"runs", "slow"} & markers:
            item.add_marker("runs" if path.startswith(RUNS) else "unit")
        if "gpu" in markers and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in markers and not config.getoption("--slow"):
            item.add_marker(too_slow)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of tiny images, to read only."""
    return write_images(tmp_path_factory.mktemp("tiny") / "photos")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The random numbers of a test do not depend on earlier tests."""
    torch.manual_seed(0)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """The random numbers of a shared fixture do not depend on earlier fixtures."""
    if fixturedef.scope != "function":
        torch.manual_seed(zlib.crc32(fixturedef.argname.encode()))


@pytest.fixture(autouse=True)
def _isolate_cache_and_console(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test uses the user's caches or the log level of an earlier test."""
    console.set_quiet(False)
    console.set_rank(0)
    console.info_once.cache_clear()
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Numbers from the released code: ``golden("a_drloc")`` is a dict of arrays."""
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


@pytest.fixture(scope="session")
def model() -> Model:
    """A network with random weights that takes 32 pixels."""
    return load_model("swin_nano", img_size=32)


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of coloured squares with train, val and test."""
    return suite_layouts.folders(tmp_path_factory.mktemp("squares"), {"train": 8, "val": 4, "test": 4})


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "own cache"))
    return tmp_path / "own cache"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browsers.Browser]:
    program = browsers.find()
    if program is None:
        pytest.skip("no Chromium here: install chromium to test pages in a browser")
    opened = browsers.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
