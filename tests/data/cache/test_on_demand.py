"""Processes that decode and read for a training: where they cannot be, and what is said when they are gone."""

from __future__ import annotations

import multiprocessing
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.dataset import ArrayExamples
from frugalvit.errors import UserError
from helpers.streams import batches, write_shards

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 4, 4, 3), dtype=np.uint8)


def lazy(workers: int) -> OnDemandStore:
    return OnDemandStore(ArrayExamples(PIXELS, None, "six"), (4, 4), torch.device("cpu"), workers, 0)


def order(step: int) -> torch.Tensor:
    return torch.arange(2) + 2 * (step % 3)


@pytest.fixture
def daemonic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("daemonic")
def test_a_daemonic_process_decodes_in_threads() -> None:
    store = lazy(2)
    fetcher = store.fetcher(order)
    try:
        for step in range(4):
            expected = torch.from_numpy(PIXELS[order(step).numpy()]).permute(0, 3, 1, 2)
            assert torch.equal(fetcher.at(step).images, expected)
    finally:
        store.close()


@pytest.mark.usefixtures("daemonic")
def test_a_daemonic_process_reads_shards_itself(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    here, there = batches(paths), batches(paths, workers=1)
    for step in range(2):
        assert torch.equal(here.batch_at(step).images, there.batch_at(step).images)


class Broken:
    def submit(self, *work: Any) -> Any:
        raise BrokenProcessPool


@pytest.mark.parametrize(("answered", "guard"), [(False, True), (True, False)])
def test_a_process_that_never_answered_may_lack_the_guard(answered: bool, guard: bool, tmp_path: Path) -> None:
    store: Any = lazy(1)
    store.answered, store._pool = answered, Broken()
    reader: Any = batches(write_shards(tmp_path))
    reader._start(0)
    source = reader.sources[0]
    source.answered, source.pool = answered, Broken()
    for call in (lambda: store.fetcher(order).at(0), source.take):
        with pytest.raises(UserError, match="out of memory") as caught:
            call()
        assert ("if __name__" in str(caught.value)) == guard and "--workers" in str(caught.value)
