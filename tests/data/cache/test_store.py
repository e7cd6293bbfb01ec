"""Stores: shared by the runs of a process; the same batches at every location, whatever is unreadable."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from frugalvit.config.data import AugmentConfig
from frugalvit.data.augmentation.transforms import EvalTransform, TrainAugment
from frugalvit.data.bad_images import substitute_rows, substitutes
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.store import CachedStore, SharedStores
from frugalvit.data.dataset import FileExamples
from frugalvit.data.loader import Batches, eval_batches

LOCATIONS = ("ram", "disk", "device", "off")
LABELS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def write_images(folder: Path, bad: tuple[int, ...], labels: list[int] | None = LABELS, count: int = 10) -> Any:
    """Images of two shapes, each of one colour; the bad ones are text."""
    folder.mkdir()
    paths = []
    for number in range(count):
        path = folder / f"{number}.png"
        Image.new("RGB", (60, 50) if number % 2 else (50, 60), (20 * number + 20, 0, 0)).save(path)
        if number in bad:
            path.write_bytes(b"this is not an image")
        paths.append(str(path))
    return FileExamples(paths, None if labels is None else np.array(labels), str(folder))


def store_at(examples: Any, where: Any, cache: Path, **keywords: Any) -> Any:
    return build_store(examples, 28, where=where, cache_dir=cache, max_bad=0.4, workers=0, **keywords)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("labels", [LABELS, None], ids=["labels", "no labels"])
@pytest.mark.parametrize("bad", [(4,), (0, 9), (7, 8, 9)], ids=str)
def test_batches_are_the_same_at_every_location(
    bad: tuple[int, ...], labels: list[int] | None, balance: bool, tmp_path: Path
) -> None:
    """With (7, 8, 9) unreadable, a class has no readable image, and images of others are its substitutes."""
    if balance and labels is None:
        pytest.skip("balance needs labels")
    examples = write_images(tmp_path / "photos", bad, labels)
    augment = TrainAugment(AugmentConfig(), 28)
    stores = {where: store_at(examples, where, tmp_path / "cache") for where in LOCATIONS}
    loaders = {w: Batches(s, 4, seed=3, augment=augment, balance=balance) for w, s in stores.items()}
    first = loaders["ram"]
    assert {len(loader) for loader in loaders.values()} == {2} and first.steps_per_epoch == 2
    for step in (0, 1, 2, 3, 4, 9, 5):
        expected = first.batch_at(step)
        assert not {*expected.index.tolist()} & {*bad}
        for where, loader in loaders.items():
            batch = loader.batch_at(step)
            assert torch.equal(batch.index, expected.index), where
            assert torch.equal(batch.images, expected.images), where
            assert labels is None or torch.equal(batch.labels, expected.labels), where  # type: ignore[arg-type]
    for where in LOCATIONS:
        assert sorted(Path(name).name for name, _ in stores[where].unreadable) == [f"{number}.png" for number in bad], (
            where
        )
        assert (len(stores[where]), stores[where].readable) == (10, 10 - len(bad)), where


@pytest.mark.parametrize("where", LOCATIONS)
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_substitutes_are_not_scored(where: str, batch: int, tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", (0, 4, 8))
    transform = EvalTransform(28)
    store = store_at(examples, where, tmp_path / "cache", crop=transform.crop)
    rounds = list(eval_batches(store, transform, batch))
    assert torch.cat([index for *_, index in rounds]).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert torch.cat([labels for _, labels, _ in rounds if labels is not None]).tolist() == [0, 0, 1, 1, 1, 2, 2]
    in_memory = store_at(examples, "ram", tmp_path / "cache", crop=transform.crop)
    cached = list(eval_batches(in_memory, transform, batch))
    assert [len(images) for images, *_ in rounds] == [len(images) for images, *_ in cached]
    assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(rounds, cached, strict=True))
    assert [store.names[i] for i in (1, 9)] == [examples.names[i] for i in (1, 9)]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_both_ways_to_find_a_substitute_agree(data: st.DataObject) -> None:
    """Unreadable images are known beforehand, or found while training."""
    count = data.draw(st.integers(1, 12))
    is_readable = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    labels = data.draw(st.none() | st.lists(st.integers(-1, 3), min_size=count, max_size=count).map(np.array))
    readable = np.flatnonzero(is_readable)
    rows = substitute_rows(readable, count, labels)
    for index in range(count):
        tried = list(substitutes(index, count, labels))
        assert tried[0] == index and sorted(tried) == list(range(count))
        if labels is not None:
            same = [labels[other] == labels[index] for other in tried]
            assert same == sorted(same, reverse=True), "the same class first"
        assert readable[rows[index]] == next(other for other in tried if is_readable[other])


def images() -> CachedStore:
    return CachedStore.from_arrays(np.zeros((2, 3, 4, 4), np.uint8))


def test_shared_stores_are_closed_by_the_outermost_run() -> None:
    stores = SharedStores()
    assert stores.get("photos", images) is not stores.get("photos", images), "not shared outside of a run"

    @stores.shared()
    def run() -> None:
        with stores.shared():
            first = stores.get("photos", images)
        with stores.shared():
            assert stores.get("photos", images) is first, "the next run of a comparison"
        assert isinstance(first, CachedStore) and len(first.images) == 2
        opened.append(first)
        raise KeyboardInterrupt

    opened: list[CachedStore] = []
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(opened[0].images) == 0 and not stores.stores


def test_least_recently_used_store_is_dropped() -> None:
    """It is not closed, because a run may still use it."""
    stores, old = SharedStores(limit=2), Mock(CachedStore)
    with stores.shared():
        used = stores.get("used", images)
        stores.get("old", lambda: old)
        assert stores.get("used", images) is used
        stores.get("new", images)
        assert stores.get("used", images) is used and set(stores.stores) == {"new", "used"}
    old.close.assert_not_called()
