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
from frugalvit.data import open_data
from frugalvit.data.augment.transforms import EvalTransform, TrainAugment
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import CachedStore, SharedStores
from frugalvit.data.dataset import ArrayExamples, FileExamples
from frugalvit.data.loader import Batches, eval_batches
from frugalvit.data.unreadable import substitute_rows, substitutes
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.worker_pool import WorkerPool

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
def test_an_unreadable_image_moves_no_other(where: str, tmp_path: Path) -> None:
    intact, broken = write_images(tmp_path / "intact", ()), write_images(tmp_path / "broken", (5,))
    orders = []
    for examples in (intact, broken):
        loader = Batches(
            store_at(examples, where, tmp_path / "cache"), 5, seed=0, augment=TrainAugment(AugmentConfig(), 28)
        )
        orders.append(torch.cat([loader.batch_at(step).index for step in range(4)]))
    assert torch.equal(orders[1], torch.where(orders[0] == 5, 6, orders[0])) and (orders[0] == 5).sum() == 2


@pytest.mark.parametrize("where", LOCATIONS)
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_substitutes_are_not_scored(where: str, batch: int, tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", (0, 4, 8))
    store = store_at(examples, where, tmp_path / "cache")
    rounds = list(eval_batches(store, EvalTransform(28), batch))
    assert torch.cat([index for *_, index in rounds]).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert torch.cat([labels for _, labels, _ in rounds if labels is not None]).tolist() == [0, 0, 1, 1, 1, 2, 2]
    cached = list(eval_batches(store_at(examples, "ram", tmp_path / "cache"), EvalTransform(28), batch))
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


def test_packed_images_have_one_size_at_every_location(tmp_path: Path) -> None:
    """The decoded images of a packed dataset may be larger than a run would make them."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.effect_noise((100, 80), 50).save(tmp_path / "photos" / name / f"{number}.png")
    pack(open_data(tmp_path / "photos", split="given"), tmp_path / "out", decoded=True, img_size=28)
    augment = TrainAugment(AugmentConfig(), 20)
    for examples in open_data(tmp_path / "out", split="given").splits.values():
        packed, decoded = (build_store(examples, 20, where=where, workers=0) for where in ("ram", "off"))
        assert isinstance(packed, CachedStore) and packed.images.shape[-2:] == (32, 40), "not 23 x 29"
        one, other = (Batches(store, 4, seed=0, augment=augment).batch_at(0) for store in (packed, decoded))
        assert torch.equal(one.images, other.images) and torch.equal(one.index, other.index)


# -- shared stores


def images() -> CachedStore:
    return CachedStore.from_arrays(np.zeros((2, 3, 4, 4), np.uint8))


def on_demand() -> tuple[OnDemandStore, Any]:
    """An on-demand store, and its workers."""
    examples = ArrayExamples(np.zeros((2, 4, 4, 3), np.uint8), None, "two")
    store: Any = OnDemandStore(examples, (4, 4), torch.device("cpu"), 1, 0)
    store._pool = Mock(WorkerPool)
    return store, store._pool


def test_the_outermost_run_closes_the_stores() -> None:
    stores = SharedStores()
    with stores.shared():
        with stores.shared():
            first = stores.get("photos", images)
        with stores.shared():
            assert stores.get("photos", images) is first, "the next run of a comparison"
        assert isinstance(first, CachedStore) and len(first.images) == 2
    assert len(first.images) == 0 and not stores.stores


def test_stores_are_closed_after_a_failure_and_not_shared_outside() -> None:
    stores = SharedStores()

    @stores.shared()
    def run() -> None:
        stores.get("photos", images)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not stores.stores
    assert stores.get("photos", images) is not stores.get("photos", images)


def test_workers_end_with_their_store() -> None:
    stores, (store, workers) = SharedStores(), on_demand()
    with stores.shared():
        stores.get("photos", lambda: store)
    store.close()  # a second time
    workers.close.assert_called_once()


def test_the_least_recently_used_store_is_dropped() -> None:
    stores, (old, workers) = SharedStores(limit=2), on_demand()
    with stores.shared():
        used = stores.get("used", images)
        stores.get("old", lambda: old)
        assert stores.get("used", images) is used
        stores.get("new", images)
        assert stores.get("used", images) is used and set(stores.stores) == {"new", "used"}
        workers.close.assert_not_called()  # a run may still use it
