"""Batches from shards in passing: resumable, shared by processes without repeats, bad images named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from frugalvit.config.data import AugmentConfig, MixingConfig
from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.streaming_loader import Part, StreamingBatches, read_batches
from frugalvit.errors import UserError
from helpers.streams import batches, write_shards


def numbers(images: torch.Tensor) -> list[int]:
    return (images.mean((1, 2, 3)) * 255).round().int().tolist()


def test_an_epoch_holds_each_image_once(tmp_path: Path) -> None:
    loader = batches(write_shards(tmp_path))
    seen = []
    for step in range(6):
        batch = loader.batch_at(step)
        seen += numbers(batch.images)
        assert batch.labels.tolist() == [n % 2 for n in numbers(batch.images)]
    assert sorted(seen) == list(range(24))
    again = [n for step in range(6, 12) for n in numbers(loader.batch_at(step).images)]
    assert sorted(again) == list(range(24)) and again != seen


@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("readers", [1, 2])
def test_resuming_at_any_step_is_exact(step: int, readers: int, tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    config = AugmentConfig()

    def loader() -> StreamingBatches:
        made = batches(paths, config=config, mixing=Mixing(MixingConfig(), 2))
        made.readers = readers  # read in this process, but in turn, as several processes do
        return made

    through = loader()
    expected = [through.batch_at(number) for number in range(step + 2)]
    resumed = loader()
    for number in (step, step + 1):
        batch = resumed.batch_at(number)
        assert torch.equal(batch.images, expected[number].images)
        assert torch.equal(batch.targets, expected[number].targets)


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_clean_images_are_kept_where_they_were_mixed(prob: float, tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    loader = batches(paths, mixing=Mixing(MixingConfig(prob=prob, cutmix=0.0), 2), keep_clean=True)
    batch, plain = loader.batch_at(0), batches(paths).batch_at(0).images
    assert torch.equal(batch.images if batch.clean is None else batch.clean, plain)
    assert (batch.clean is not None) == (prob == 1) != torch.equal(batch.images, plain)


def test_processes_share_an_epoch_without_repeats(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    seen = []
    for rank in range(2):
        loader = batches(paths, rank=rank, world=2)
        for step in range(6):
            images = loader.batch_at(step).images
            assert len(images) == 2
            seen += numbers(images)
    assert sorted(seen) == list(range(24))


def test_without_labels(tmp_path: Path) -> None:
    batch = batches(write_shards(tmp_path), classes=None).batch_at(0)
    assert batch.labels is None and batch.targets is None and batch.images.shape == (4, 3, 16, 16)


def test_bad_images_are_named_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = batches(write_shards(tmp_path, bad=(5,)), max_bad=0.5)
    seen = [n for step in range(6) for n in numbers(loader.batch_at(step).images)]
    assert len(seen) == 24 and 5 not in seen
    assert [name for name, _ in loader.bad] == ["0005"] and "0005" in capsys.readouterr().err
    strict = batches(write_shards(tmp_path, bad=(0, 1, 2, 3, 4)), max_bad=0.01)
    with pytest.raises(UserError, match="cannot be read"):
        [strict.batch_at(step) for step in range(6)]
    with pytest.raises(UserError, match="none of the classes"):
        batches(write_shards(tmp_path), classes=("bird",)).batch_at(0)


def test_mistakes_are_said(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards=2)
    with pytest.raises(UserError, match="fewer --workers"):
        batches(paths, workers=3)
    with pytest.raises(UserError, match="multiple of 2"):
        batches(paths, batch=5, world=2)
    with pytest.raises(UserError, match="needs labels"):
        batches(paths, classes=None, mixing=Mixing(MixingConfig(), 2))


def test_a_reader_process(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    here, there = batches(paths), batches(paths, workers=1)
    try:
        for step in range(2):
            assert np.array_equal(here.batch_at(step).images, there.batch_at(step).images)
    finally:
        there.close()


def test_a_killed_reader_is_said(tmp_path: Path) -> None:
    there = batches(write_shards(tmp_path), workers=1)
    there.batch_at(0)
    (reader,) = there.sources[0].pool._processes.values()
    os.kill(reader.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"reads shards was killed.*--resume goes on"):
        [there.batch_at(step) for step in range(1, 40)]
    there.close()


def test_damaged_shards_are_named_once_and_stop_the_run_when_they_are_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_shards(tmp_path, shards=6)
    Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:3000])
    loader = batches(paths)
    [loader.batch_at(step) for step in range(24)]  # several epochs
    assert list(loader.damaged) == [paths[2]] and capsys.readouterr().err.count("is damaged") == 1
    for path in paths[:4]:
        Path(path).unlink()
    with pytest.raises(UserError, match=r"2 of 6 shards cannot be read, more than --cache.max-bad"):
        [loader.batch_at(step) for step in range(24, 60)]


def test_other_batch_sizes_and_a_glance(tmp_path: Path) -> None:
    loader = batches(write_shards(tmp_path))
    first = loader.batch_at(0)
    loader.batch_at(1)
    assert torch.equal(loader.peek(0).images, first.images) and loader.next_step == 2
    halves = loader.with_batch(2)
    assert len(halves) == 12 and numbers(halves.batch_at(0).images) == numbers(first.images)[:2]


def test_a_glance_has_its_own_books(tmp_path: Path) -> None:
    """A run within its allowance died of the look at its first batch: all its bad images, the allowance of step 0."""
    loader = batches(write_shards(tmp_path, bad=(3, 9, 15)), max_bad=0.3)
    [loader.batch_at(step) for step in range(6)]
    assert len(loader.bad) == 3
    loader.peek(0)
    assert len(loader.bad) == 3 and loader.max_bad == 0.3
    Path(loader.stream.shards[0]).unlink()
    loader.peek(0)
    assert not loader.damaged


@pytest.mark.parametrize("counted", [True, False])
def test_resuming_epochs_later_is_exact(tmp_path: Path, counted: bool) -> None:
    """Shards of different lengths, two readers, a batch that no epoch is a multiple of."""
    paths = [*write_shards(tmp_path / "a", shards=3, each=5), *write_shards(tmp_path / "b", shards=2, each=3)]
    counts = [5, 5, 5, 3, 3] if counted else None

    def loader() -> StreamingBatches:
        made = batches(paths)
        made.stream, made.readers = ShardStream(paths, buffer=4, counts=counts), 2
        return made

    through = loader()
    expected = [numbers(through.batch_at(step).images) for step in range(30)]
    for step in (1, 6, 17, 28):
        assert numbers(loader().batch_at(step).images) == expected[step]


class Passing(ShardStream):
    """Counts the epochs: what would go on for ever ends here."""

    def length(self, number: int = 0, **place: int) -> int | None:
        assert number < 3, "nothing was said of shards that hold nothing"
        return super().length(number, **place)


@pytest.mark.parametrize("counts", [None, [6]])
@pytest.mark.parametrize("skip", [0, 4, 7])
def test_unreadable_shards_are_said_when_resumed_too(skip: int, counts: list[int] | None, tmp_path: Path) -> None:
    gone = Passing([str(tmp_path / "gone.tar")], counts=counts, warn=None)
    with pytest.raises(UserError, match=r"finds no readable images in its shards: .*gone\.tar"):
        next(read_batches(Part(gone, 0, 1, 2, (8, 8), None, skip)))


@pytest.mark.parametrize("damage", ["torn", "gone", "fewer", "more"])
def test_positions_hold_whatever_is_damaged(tmp_path: Path, damage: str) -> None:
    """A resumed run counts by the index: with a shard cut short behind it, it repeated images and left others out."""
    paths = write_shards(tmp_path, shards=5)
    counts = [6] * 5
    if damage == "torn":
        os.truncate(paths[2], Path(paths[2]).stat().st_size // 2)
    elif damage == "gone":
        Path(paths[2]).unlink()
    else:
        counts[2] = 8 if damage == "fewer" else 4
    for buffer in (1, 4, 50):
        for part in range(2):
            stream = ShardStream(paths, buffer=buffer, counts=counts, warn=None)
            place = {"part": part, "parts": 2}
            whole = list(stream.epoch(1, **place))
            assert len(whole) == stream.length(1, **place)
            for skip in range(len(whole) + 1):
                assert list(stream.epoch(1, **place, skip=skip)) == whole[skip:]
        stream = ShardStream(paths, buffer=buffer, counts=counts, warn=None)
        shown = [sample.key for sample in stream.epoch()]
        assert len(set(shown)) >= {"gone": 24, "torn": 25, "fewer": 30, "more": 28}[damage] and len(shown) == sum(
            counts
        )
        if damage == "more":
            assert not stream.damaged, "what is not counted is not read, and no damage"
            continue
        assert {shard for shard, _ in stream.damaged} == {paths[2]}
        expected = {"torn": "truncated", "gone": "No such", "fewer": "6 of the 8 examples"}
        assert expected[damage] in stream.damaged[0][1]


def test_a_reader_whose_only_shard_is_damaged_does_not_repeat_itself(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards=5)
    Path(paths[2]).unlink()
    stream = ShardStream(paths, buffer=1, counts=[6] * 5, shuffle=False, warn=None)
    shown = [sample.key for sample in stream.epoch(part=2, parts=5)]
    assert len(shown) == len(set(shown)) == 6


def test_a_damaged_shard_and_epochs_later(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards=5)
    os.truncate(paths[1], Path(paths[1]).stat().st_size // 3)

    def loader() -> StreamingBatches:
        made = batches(paths)
        made.stream, made.readers = ShardStream(paths, buffer=4, counts=[6] * 5, warn=None), 2
        return made

    through = loader()
    expected = [numbers(through.batch_at(step).images) for step in range(30)]
    for step in (1, 6, 17, 28):
        assert numbers(loader().batch_at(step).images) == expected[step]


def test_where_nothing_can_be_read_each_shard_is_tried_a_few_times(tmp_path: Path) -> None:
    """Others take the place of a shard that is gone: with all of them gone that search must not be one for each."""
    stream = ShardStream([str(tmp_path / f"{number}.tar") for number in range(50)], counts=[9] * 50, warn=None)
    assert not list(stream.epoch()) and len(stream.damaged) <= 150
