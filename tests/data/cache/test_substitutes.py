"""One image that cannot be read changes nothing else, and what it changes is the same wherever images are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from frugalvit.data.cache.on_demand import Decoder
from frugalvit.data.cache.store import ImageStore, substitute_rows, substitutes
from frugalvit.data.dataset import ArrayExamples, FileExamples
from frugalvit.data.decode import UnreadableImage
from frugalvit.data.loader import Batches, eval_batches
from frugalvit.data.webdataset.pack import pack
from frugalvit.errors import UserError

PLACES = ("ram", "disk", "device", "off")
LABELS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def write_images(folder: Path, bad: tuple[int, ...], labels: list[int] | None = LABELS, count: int = 10) -> Any:
    """Images of two shapes, each of one colour that tells which it is; the bad ones are no images."""
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
def test_steps_are_the_same_wherever_images_are_kept(
    bad: tuple[int, ...], labels: list[int] | None, balance: bool, tmp_path: Path
) -> None:
    """Order, labels, pixels; (7, 8, 9): of a class nothing can be read, and others are taken for it."""
    if balance and labels is None:
        pytest.skip("balance needs labels")
    examples = write_images(tmp_path / "photos", bad, labels)
    augment = TrainAugment(AugmentConfig(), 28)
    stores = {where: store_at(examples, where, tmp_path / "cache") for where in PLACES}
    loaders = {w: Batches(s, 4, seed=3, augment=augment, balance=balance) for w, s in stores.items()}
    first = loaders["ram"]
    assert {len(loader) for loader in loaders.values()} == {2} and first.steps_per_epoch == 2
    for step in (0, 1, 2, 3, 4, 9, 5):
        expected = first.batch_at(step)
        assert not {*expected.index.tolist()} & {*bad}
        for where, loader in loaders.items():
            found = loader.batch_at(step)
            assert torch.equal(found.index, expected.index), where
            assert torch.equal(found.images, expected.images), where
            assert labels is None or torch.equal(found.labels, expected.labels), where  # type: ignore[arg-type]
    for where in PLACES:
        assert sorted(Path(name).name for name, _ in stores[where].bad) == [f"{number}.png" for number in bad], where
        assert (len(stores[where]), stores[where].readable) == (10, 10 - len(bad)), where


@pytest.mark.parametrize("where", PLACES)
def test_the_others_have_the_places_they_would_have_had(where: str, tmp_path: Path) -> None:
    """An image that breaks takes nobody else's turn: batches differ in its own place and nowhere else."""
    whole, broken = write_images(tmp_path / "whole", ()), write_images(tmp_path / "broken", (5,))
    orders = []
    for examples in (whole, broken):
        loader = Batches(
            store_at(examples, where, tmp_path / "cache"), 5, seed=0, augment=TrainAugment(AugmentConfig(), 28)
        )
        orders.append(torch.cat([loader.batch_at(step).index for step in range(4)]))
    assert torch.equal(orders[1], torch.where(orders[0] == 5, 6, orders[0])) and (orders[0] == 5).sum() == 2


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_no_stand_in_is_scored(where: str, batch: int, tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos", (0, 4, 8))
    store = store_at(examples, where, tmp_path / "cache")
    whole = list(eval_batches(store, EvalTransform(28), batch))
    assert torch.cat([index for *_, index in whole]).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert torch.cat([labels for _, labels, _ in whole if labels is not None]).tolist() == [0, 0, 1, 1, 1, 2, 2]
    kept = list(eval_batches(store_at(examples, "ram", tmp_path / "cache"), EvalTransform(28), batch))
    assert [len(images) for images, *_ in whole] == [len(images) for images, *_ in kept], "the same numbers, to the bit"
    assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(whole, kept, strict=True))
    assert [store.names[i] for i in (1, 9)] == [examples.names[i] for i in (1, 9)]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_both_ways_to_find_a_stand_in_agree(data: st.DataObject) -> None:
    """Known beforehand, or met while training: the first that can be read of the class behind it, else of all."""
    count = data.draw(st.integers(1, 12))
    whole = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    labels = data.draw(st.none() | st.lists(st.integers(-1, 3), min_size=count, max_size=count).map(np.array))
    kept = np.flatnonzero(whole)
    rows = substitute_rows(kept, count, labels)
    for place in range(count):
        tried = list(substitutes(place, count, labels))
        assert tried[0] == place and sorted(tried) == list(range(count))
        if labels is not None:
            mine = [labels[other] == labels[place] for other in tried]
            assert mine == sorted(mine, reverse=True), "its own class first"
        assert kept[rows[place]] == next(other for other in tried if whole[other])


class Counting(ArrayExamples):
    """Of which none can be read; counts who asks."""

    asked = 0

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        self.asked += 1
        raise UnreadableImage(self.names[index], "its disk is gone")


def test_a_disk_that_is_gone_is_not_searched_through() -> None:
    """Beyond what the run allows nobody looks further: it ends anyway."""
    examples = Counting(np.zeros((1000, 4, 4, 3), np.uint8), np.zeros(1000, np.int64), "gone")
    decoded = Decoder(examples, (4, 4), limit=50)(list(range(64)))
    assert examples.asked == 51 == len(decoded.bad) and decoded.index.tolist() == [-1] * 64


def test_the_allowance_is_that_of_different_images(tmp_path: Path) -> None:
    """One that is drawn in every epoch counts once; a file that is listed twice counts twice, as it is two of all."""
    examples = write_images(tmp_path / "photos", (4,))
    store = build_store(examples, 28, where="off", max_bad=0.1, workers=0)
    fetcher = store.fetcher(lambda _: torch.arange(10))
    for step in range(3):
        assert fetcher.at(step).index.tolist() == [0, 1, 2, 3, 5, 5, 6, 7, 8, 9]
    assert len(store.bad) == 1
    twice = FileExamples([*examples.names, examples.names[4]], np.array([*LABELS, 1]))
    store = build_store(twice, 28, where="off", max_bad=0.1, workers=0)
    with pytest.raises(UserError, match=r"2 images cannot be read, more than --cache\.max-bad"):
        store.fetcher(lambda _: torch.arange(11)).at(0)


@pytest.mark.parametrize("split", ["given", "remake"])
def test_packed_images_are_of_one_size_wherever_they_are_kept(split: Any, tmp_path: Path) -> None:
    """The decoded images beside the shards may be larger than a run would make them; decoded anew they are as large."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.effect_noise((100, 80), 50).save(tmp_path / "photos" / name / f"{number}.png")
    pack(open_data(tmp_path / "photos", split="given"), tmp_path / "out", decoded=True, img_size=28)
    augment = TrainAugment(AugmentConfig(), 20)
    for examples in open_data(tmp_path / "out", split=split, val_fraction=0.4).splits.values():
        kept, anew = (build_store(examples, 20, where=where, workers=0) for where in ("ram", "off"))
        assert isinstance(kept, ImageStore) and kept.images.shape[-2:] == (32, 40), "not 23 x 29"
        one, other = (Batches(store, 4, seed=0, augment=augment).batch_at(0) for store in (kept, anew))
        assert torch.equal(one.images, other.images) and torch.equal(one.index, other.index)
