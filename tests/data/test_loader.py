"""Batches as a pure function of seed and step: order, ranks, resume, balance, repeats."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from frugalvit.config.data import AugmentConfig, CropsConfig, MixingConfig
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import EvalTransform, TrainAugment
from frugalvit.data.cache.store import CachedFetcher, CachedStore, Fetched
from frugalvit.data.loader import Batches, balanced_order, eval_batches, steps_per_augment_call
from frugalvit.errors import UserError


def a_store(count: int = 30, size: int = 40, classes: int = 3, labelled: bool = True) -> CachedStore:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % classes if labelled else None
    return CachedStore.from_arrays(images, labels)


def batches(store: CachedStore | None = None, batch: int = 8, mixed: bool = True, **keywords: Any) -> Batches:
    store = store or a_store()
    mixing = Mixing(MixingConfig(), 3) if mixed else None
    augment = keywords.pop("augment", None) or TrainAugment(AugmentConfig(), 40)
    return Batches(store, batch, seed=keywords.pop("seed", 0), augment=augment, mixing=mixing, **keywords)


def test_an_epoch_takes_each_image_at_most_once() -> None:
    """The incomplete last batch is left out, other images in every epoch."""
    loader = batches(mixed=False)
    assert loader.steps_per_epoch == len(loader) == 3
    epochs = [torch.cat([loader.batch_at(epoch * 3 + step).index for step in range(3)]).tolist() for epoch in range(9)]
    assert [len(set(seen)) for seen in epochs] == [24] * 9
    assert set().union(*epochs) == set(range(30))


def test_order_changes_with_epoch_and_seed_only() -> None:
    loader = batches()
    assert torch.equal(loader.order(0), batches().order(0))
    assert not torch.equal(loader.order(0), loader.order(3))
    assert not torch.equal(loader.order(0), batches(seed=1).order(0))


def test_any_step_first_gives_the_same_batch() -> None:
    forward = batches()
    in_order = [forward.batch_at(step) for step in range(7)]
    for step in (6, 2, 4):
        alone = batches().batch_at(step)
        assert torch.equal(alone.images, in_order[step].images)
        assert torch.equal(alone.targets, in_order[step].targets) and torch.equal(alone.index, in_order[step].index)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mixed", [True, False])
def test_ranks_share_one_batch(world: int, mixed: bool) -> None:
    for step in range(4):
        full = batches(batch=16, mixed=mixed).batch_at(step)
        parts = [batches(batch=16, mixed=mixed, rank=r, world=world).batch_at(step) for r in range(world)]
        torch.testing.assert_close(torch.cat([part.images for part in parts]), full.images, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat([part.targets for part in parts]), full.targets)
        assert torch.equal(torch.cat([part.index for part in parts]), full.index)
        assert {len(part.index) for part in parts} == {16 // world}


def test_ranks_share_crops() -> None:
    store = a_store(labelled=False)
    crops = MultiCrop(CropsConfig(local_crops=2), 32)
    full = batches(store, mixed=False, augment=crops).batch_at(1)
    parts = [batches(store, mixed=False, augment=crops, rank=r, world=2).batch_at(1) for r in range(2)]
    assert full.targets is None and full.labels is None and len(full.images) == 4
    for view in range(4):
        together = torch.cat([part.images[view] for part in parts])
        torch.testing.assert_close(together, full.images[view], atol=1e-5, rtol=1e-5)


def test_clean_images_on_request() -> None:
    """Only mixed batches have them: a second tensor would cost a second pass through the network."""
    loader = batches(keep_clean=True)
    assert loader.mixing is not None
    loader.mixing.prob = 0.5
    both = [(loader.batch_at(step), batches(mixed=False).batch_at(step)) for step in range(12)]
    mixed = [not torch.equal(batch.images, plain.images) for batch, plain in both]
    assert [batch.clean is not None for batch, _ in both] == mixed and 0 < sum(mixed) < 12
    assert all(torch.equal(batch.clean, plain.images) for batch, plain in both if batch.clean is not None)
    assert all(torch.equal(batch.labels, plain.targets) for batch, plain in both)
    assert batches().batch_at(0).clean is None


def test_fewer_images_than_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    loader = batches(a_store(3), batch=128)
    assert loader.batch == 3 and loader.steps_per_epoch == 1
    assert "3" in capsys.readouterr().err
    assert loader.batch_at(5).images.shape == (3, 3, 40, 40)
    assert batches(a_store(1), batch=4).batch_at(0).images.shape[0] == 1


def test_another_batch_size_has_the_same_order() -> None:
    halves = batches(balance=True, keep_clean=True).with_batch_size(4)
    assert torch.equal(halves.order(1), batches(balance=True).order(0)[4:]) and halves.keep_clean
    assert len(halves) == 7 and halves.readable == 30 and halves.unreadable == []


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batch": 0}, "at least 1"),
        ({"batch": 9, "world": 2}, "multiple of 4"),
        ({"batch": 9, "world": 2, "mixed": False}, "multiple of 2"),
        ({"batch": 64, "world": 40}, "fewer devices"),
        ({"store": a_store(labelled=False)}, "labels"),
        ({"store": a_store(labelled=False), "mixed": False, "balance": True}, "labels"),
    ],
)
def test_impossible_batches_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        batches(**keywords)


def test_balance_draws_classes_equally_often() -> None:
    labels = torch.tensor([0] * 50 + [1] * 8 + [2] * 2)
    order = balanced_order(labels, 60, torch.Generator().manual_seed(0))
    assert Counter(labels[order].tolist()) == {0: 20, 1: 20, 2: 20}
    assert len(set(order[labels[order] == 0].tolist())) == 20, "a large class is not repeated"
    assert Counter(order.tolist())[59] == 10, "a rare class is repeated evenly"
    store = a_store(60)
    store.labels = labels
    loader = batches(store, batch=20, balance=True)
    seen = torch.cat([loader.batch_at(step).labels for step in range(3)])
    assert Counter(seen.tolist()) == {0: 20, 1: 20, 2: 20}


def test_balance_gives_the_remainder_to_a_random_class() -> None:
    """61 images are one more than three equal classes."""
    labels, generator = torch.arange(60) % 3, torch.Generator().manual_seed(0)
    counts = [Counter(labels[balanced_order(labels, 61, generator)].tolist()) for _ in range(12)]
    assert all(sorted(count.values()) == [20, 20, 21] for count in counts)
    assert {count.most_common(1)[0][0] for count in counts} == {0, 1, 2}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_grouped_steps_equal_single_steps(mixed: bool, group: int) -> None:
    alone, grouped = (batches(mixed=mixed, grouped_steps=steps) for steps in (1, group))
    for step in (0, 1, 3, 6, 7, 8, 2):  # epochs end within groups, and a resumed run jumps
        one, other = alone.batch_at(step), grouped.batch_at(step)
        torch.testing.assert_close(other.images, one.images)
        assert torch.equal(other.targets, one.targets) and torch.equal(other.labels, one.labels)
        assert torch.equal(other.index, one.index) and other.number == one.number == step


@pytest.mark.parametrize("labelled", [True, False])
def test_grouped_crops_equal_single_crops(labelled: bool) -> None:
    crops, store = MultiCrop(CropsConfig(local_crops=3), 32), a_store(labelled=labelled)
    alone, grouped = (batches(store, mixed=False, augment=crops, grouped_steps=steps) for steps in (1, 4))
    for step in range(6):
        one, other = alone.batch_at(step), grouped.batch_at(step)
        assert [view.shape for view in other.images] == [view.shape for view in one.images]
        for mine, its in zip(other.images, one.images, strict=True):
            torch.testing.assert_close(mine, its)


def test_small_batches_are_grouped_on_a_gpu_only() -> None:
    sides = {32: 8, 64: 4, 100: 1, 224: 1}
    assert {side: steps_per_augment_call(512 * side * side, memory=8 * 2**30) for side in sides} == sides
    assert [steps_per_augment_call(512 * side * side, memory=80 * 2**30) for side in sides] == [8, 8, 4, 1]
    assert batches().grouped_steps == 1  # a CPU has no kernels to queue


def test_repeats_are_the_same_image_augmented_twice() -> None:
    loader = batches(batch=9, repeats=3, mixed=False)
    batch = loader.batch_at(1)
    assert sorted(Counter(batch.index.tolist()).values()) == [3, 3, 3]
    neighbours = batch.index[:8].view(4, 2)
    assert (neighbours[:, 0] != neighbours[:, 1]).all(), "mixing must not blend an image with itself"
    same = (batch.index == batch.index[0]).nonzero()[:, 0]
    assert not torch.equal(batch.images[same[0]], batch.images[same[1]])
    configured = batches(batch=9, mixed=False, augment=TrainAugment(AugmentConfig(repeats=3), 40))
    assert torch.equal(configured.batch_at(1).images, batch.images)
    epoch = torch.cat([loader.batch_at(step).index for step in range(loader.steps_per_epoch)])
    assert set(Counter(epoch.tolist()).values()) == {3}
    uneven = batches(batch=8, repeats=3, mixed=False).batch_at(1)
    assert sorted(Counter(uneven.index.tolist()).values()) == [2, 3, 3], "the batch has the requested size"


@pytest.mark.parametrize("batch", [1, 7, 30, 64])
def test_evaluation_covers_each_image_once(batch: int) -> None:
    store, transform = a_store(), EvalTransform(40)
    rounds = list(eval_batches(store, transform, batch))
    assert torch.cat([index for _, _, index in rounds]).tolist() == list(range(30))
    assert torch.equal(torch.cat([labels for _, labels, _ in rounds]), store.labels)
    torch.testing.assert_close(torch.cat([images for images, _, _ in rounds]), transform(store.images))
    assert next(iter(eval_batches(a_store(labelled=False), transform, 4)))[1] is None


@pytest.mark.parametrize(("batch", "world"), [(1, 2), (4, 3), (7, 2), (30, 2), (64, 4)])
def test_evaluating_processes_fetch_only_their_batches(batch: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, transform = a_store(), EvalTransform(40)
    alone = [index.tolist() for _, _, index in eval_batches(store, transform, batch)]
    fetched: list[list[int]] = []
    fetch = CachedFetcher.at

    def record(self: CachedFetcher, step: int) -> Fetched:
        result = fetch(self, step)
        fetched.append(result.index.tolist())
        return result

    monkeypatch.setattr(CachedFetcher, "at", record)
    for rank in range(world):
        fetched.clear()
        seen = [index.tolist() for _, _, index in eval_batches(store, transform, batch, rank=rank, world=world)]
        assert seen == fetched == alone[rank::world]


def test_prefetching_returns_the_same() -> None:
    store = a_store()
    orders = torch.arange(30).view(5, 6)

    def order(step: int) -> Tensor:
        return orders[step] if step < 5 else orders[0, :0]

    ahead, plain = CachedFetcher(store, order), store.fetcher(order)
    ahead.pool = ThreadPoolExecutor(1)  # as on a GPU
    for step in (0, 1, 3, 4, 2):
        for mine, other in zip(ahead.at(step), plain.at(step), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["device", "ram"])
def test_batches_on_the_device_equal_those_on_the_cpu(where: str) -> None:
    on_cpu = a_store()
    there = CachedStore.from_arrays(on_cpu.images, on_cpu.labels, "cuda" if where == "device" else "cpu")
    there.device = torch.device("cuda")
    for step in range(3):
        mine, other = batches(there).batch_at(step), batches(on_cpu).batch_at(step)
        assert mine.images.is_cuda and torch.equal(mine.index, other.index)
        assert ((mine.images.cpu() - other.images).abs() > 0.06).float().mean() < 0.01
        torch.testing.assert_close(mine.targets.cpu(), other.targets)


@pytest.mark.gpu
@pytest.mark.parametrize("crops", [True, False])
def test_grouped_steps_on_the_device(crops: bool) -> None:
    """Batches of a group equal those of single steps up to rounding, and exactly after a resume inside the group."""
    here = a_store(128)
    store = CachedStore.from_arrays(here.images, here.labels, "cuda")
    augment = MultiCrop(CropsConfig(), 32) if crops else TrainAugment(AugmentConfig(), 32)
    alone, grouped, resumed = (
        batches(store, augment=augment, mixed=not crops, grouped_steps=steps) for steps in (1, None, None)
    )
    assert grouped.grouped_steps == 8
    for step in range(5, 16):
        views_of = [one.batch_at(step).images for one in (alone, grouped, resumed if step > 10 else grouped)]
        by_itself, together, again = (views if crops else [views] for views in views_of)
        for mine, other, repeated in zip(together, by_itself, again, strict=True):
            assert ((mine - other).abs() > 0.06).float().mean() < 0.01  # as between devices
            assert torch.equal(mine, repeated)
