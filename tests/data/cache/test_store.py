"""Decoded images are shared by the runs of a process, and none outlives the last of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import ImageStore, SharedStores
from frugalvit.data.dataset import ArrayExamples


def images() -> ImageStore:
    return ImageStore.from_arrays(np.zeros((2, 3, 4, 4), np.uint8))


def lazy() -> tuple[OnDemandStore, Any]:
    """A store whose decoders are at work: threads in place of processes."""
    examples = ArrayExamples(np.zeros((2, 4, 4, 3), np.uint8), None, "two")
    store, pool = OnDemandStore(examples, (4, 4), torch.device("cpu"), 1, 0), ThreadPoolExecutor(1)
    store._pool = pool  # type: ignore[assignment]
    return store, pool


def test_the_outermost_run_lets_them_go() -> None:
    stores = SharedStores()
    with stores.shared():
        with stores.shared():
            first = stores.get("photos", images)
        with stores.shared():
            assert stores.get("photos", images) is first, "the next run of a comparison"
        assert isinstance(first, ImageStore) and len(first.images) == 2
    assert len(first.images) == 0 and not stores.stores


def test_a_run_that_fails_lets_them_go_too() -> None:
    stores = SharedStores()

    @stores.shared()
    def run() -> None:
        stores.get("photos", images)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not stores.stores


def test_nothing_is_kept_outside_of_a_run() -> None:
    stores = SharedStores()
    assert stores.get("photos", images) is not stores.get("photos", images)


def test_decoders_end_with_their_store() -> None:
    stores, (kept, others) = SharedStores(), lazy()
    with stores.shared():
        stores.get("photos", lambda: kept)
    with pytest.raises(RuntimeError, match="shutdown"):
        others.submit(print)
    kept.close()  # of no consequence


def test_the_store_that_was_not_asked_for_longest_gives_way() -> None:
    stores, (old, decoders) = SharedStores(most=2), lazy()
    with stores.shared():
        used = stores.get("used", images)
        stores.get("old", lambda: old)
        assert stores.get("used", images) is used
        stores.get("new", images)
        assert stores.get("used", images) is used and set(stores.stores) == {"new", "used"}
        assert decoders.submit(int).result() == 0, "whoever holds it still reads from it"
