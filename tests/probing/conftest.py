"""A small model and small datasets for the probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from frugalvit.training.models import Model, load_model

from . import suite_layouts


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
    """A cache of its own for one test."""
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "own cache"))
    return tmp_path / "own cache"
