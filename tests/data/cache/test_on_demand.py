"""Images decoded on demand: the same as cached ones, by workers that may die."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from frugalvit.config.data import AugmentConfig
from frugalvit.data.augmentation.transforms import EvalTransform, TrainAugment
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.on_demand import Decoder, OnDemandStore
from frugalvit.data.cache.worker_pool import WorkerPool
from frugalvit.data.dataset import ArrayExamples, FileExamples
from frugalvit.data.loader import Batches, eval_batches
from frugalvit.errors import UserError
from helpers.image_cache import store_of, write_images
from helpers.shards import streaming_batches, write_numbered

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 4, 4, 3), dtype=np.uint8)


def small_store(workers: int) -> OnDemandStore:
    return OnDemandStore(ArrayExamples(PIXELS, None, "six"), (4, 4), torch.device("cpu"), workers, 0)


def on_demand(examples: FileExamples, workers: Any = 0, **keywords: Any) -> OnDemandStore:
    store = build_store(examples, 36, where="off", workers=workers, **keywords)
    assert isinstance(store, OnDemandStore)
    return store


def batches(store: Any) -> Batches:
    return Batches(store, 4, seed=0, augment=TrainAugment(AugmentConfig(), 36))


def order(step: int) -> torch.Tensor:
    return torch.arange(2) + 2 * (step % 3)


@pytest.mark.parametrize(("workers", "batches"), [(2, 5), (96, 105)])
def test_workers_do_not_decode_far_ahead(workers: int, batches: int) -> None:
    """Each worker decodes a batch; beyond that few wait, because each takes memory."""
    store: Any = small_store(workers)
    store._pool = Mock(WorkerPool)
    store._pool.submit.return_value = lambda: Decoder(store.examples, (4, 4), 0)([0, 1])
    store.fetcher(order).at(0)
    assert store._pool.submit.call_count == batches


def test_no_step_after_the_end_is_decoded() -> None:
    """Large images take seconds each: workers must not decode steps that the run never reaches."""
    store: Any = small_store(2)
    store._pool = Mock(WorkerPool)
    store._pool.submit.return_value = lambda: Decoder(store.examples, (4, 4), 0)([0, 1])
    source = Batches(store, 2, seed=0, augment=TrainAugment(AugmentConfig(), 4), steps=3)
    for step in range(3):
        source.batch_at(step)
    assert store._pool.submit.call_count == 3
    source.peek(0)
    assert store._pool.submit.call_count == 4  # the pictures of the first batch need no other
    source.batch_at(0)
    assert store._pool.submit.call_count == 7  # the limit of peek is gone
    assert source.with_batch_size(1).fetcher.end == 6


def test_workers_return_the_same_until_one_is_killed(tmp_path: Path) -> None:
    examples = write_images(tmp_path, count=12)
    decoded, cached = batches(on_demand(examples, workers=1)), batches(store_of(examples, 36))
    for step in (0, 1, 5):
        assert torch.equal(decoded.batch_at(step).images, cached.batch_at(step).images)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="was killed"):
        [decoded.batch_at(step) for step in range(6, 60)]


def test_evaluations_reuse_the_workers(tmp_path: Path) -> None:
    transform = EvalTransform(36)
    store = on_demand(write_images(tmp_path), workers=1, crop=transform.crop)
    rounds = [[index.tolist() for _, _, index in eval_batches(store, transform, 4)] for _ in range(2)]
    assert rounds[0] == rounds[1] and len(store.pool().pool._processes) == 1  # type: ignore[attr-defined]
    store.close()


@pytest.fixture
def daemonic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("daemonic")
def test_a_daemonic_process_decodes_itself(tmp_path: Path) -> None:
    store = small_store(2)
    fetcher = store.fetcher(order)
    for step in range(4):
        expected = torch.from_numpy(PIXELS[order(step).numpy()]).permute(0, 3, 1, 2)
        assert torch.equal(fetcher.at(step).images, expected)
    store.close()
    paths = write_numbered(tmp_path)
    here, there = streaming_batches(paths), streaming_batches(paths, workers=1)
    assert torch.equal(here.batch_at(0).images, there.batch_at(0).images)


class Unreadable(ArrayExamples):
    """Images of which none can be read; counts the attempts."""

    attempts = 0

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        self.attempts += 1
        raise UnreadableImage(self.names[index], "its disk is gone")


def test_a_missing_disk_is_not_searched(tmp_path: Path) -> None:
    examples = Unreadable(np.zeros((1000, 4, 4, 3), np.uint8), np.zeros(1000, np.int64), "gone")
    decoded = Decoder(examples, (4, 4), limit=50)(list(range(64)))
    assert examples.attempts == 51 == len(decoded.unreadable) and decoded.index.tolist() == [-1] * 64


def test_the_limit_counts_each_image_once(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", count=10, bad=(4,))
    store = on_demand(examples, max_bad=0.1)
    fetcher = store.fetcher(lambda _: torch.arange(10))
    for step in range(3):
        assert fetcher.at(step).index.tolist() == [0, 1, 2, 3, 7, 5, 6, 7, 8, 9]
    assert len(store.unreadable) == 1
    twice = FileExamples([*examples.names, examples.names[4]], None)
    with pytest.raises(UserError, match=r"2 of 11 images .*--cache\.max-bad"):
        on_demand(twice, max_bad=0.1).fetcher(lambda _: torch.arange(11)).at(0)
