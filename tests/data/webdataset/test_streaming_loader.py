"""Streamed batches: resumable, shared by processes without repeats, unreadable images named."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from frugalvit.config.data import AugmentConfig, MixingConfig
from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.webdataset.streaming_loader import StreamingBatches
from frugalvit.errors import UserError
from helpers.shards import streaming_batches as batches
from helpers.shards import write_numbered


def numbers(images: torch.Tensor) -> list[int]:
    return (images[:, 0].mean((1, 2)) * 255).round().int().tolist()


def test_an_epoch_holds_each_image_once(tmp_path: Path) -> None:
    loader = batches(write_numbered(tmp_path))
    seen = []
    for step in range(6):
        batch = loader.batch_at(step)
        seen += numbers(batch.images)
        assert batch.labels.tolist() == [n % 2 for n in numbers(batch.images)]
    assert sorted(seen) == list(range(24)) and loader.readable is None
    again = [n for step in range(6, 12) for n in numbers(loader.batch_at(step).images)]
    assert sorted(again) == list(range(24)) and again != seen


@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("readers", [1, 2])
def test_resuming_at_any_step_is_exact(step: int, readers: int, tmp_path: Path) -> None:
    paths = write_numbered(tmp_path)

    def loader() -> StreamingBatches:
        made = batches(paths, config=AugmentConfig(), mixing=Mixing(MixingConfig(), 2))
        made.readers = readers  # read in this process, but in turn, as several processes do
        return made

    through = loader()
    expected = [through.batch_at(number) for number in range(step + 2)]
    resumed = loader()
    for number in (step, step + 1):
        batch = resumed.batch_at(number)
        assert torch.equal(batch.images, expected[number].images)
        assert torch.equal(batch.targets, expected[number].targets)


@pytest.mark.parametrize("damaged", [True, False])
def test_resuming_epochs_later_is_exact(damaged: bool, tmp_path: Path) -> None:
    """Shards of different lengths, two readers, a batch that no epoch is a multiple of."""
    paths = [*write_numbered(tmp_path / "a", shards=3, each=5), *write_numbered(tmp_path / "b", shards=2, each=3)]
    if damaged:
        os.truncate(paths[1], Path(paths[1]).stat().st_size // 3)

    def loader() -> StreamingBatches:
        made = batches(paths, counts=[5, 5, 5, 3, 3], max_bad=1.0)
        made.readers = 2
        return made

    through = loader()
    expected = [numbers(through.batch_at(step).images) for step in range(30)]
    for step in (1, 6, 17, 28):
        assert numbers(loader().batch_at(step).images) == expected[step]


def test_processes_share_an_epoch_without_repeats(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path)
    seen = []
    for rank in range(2):
        loader = batches(paths, rank=rank, world=2)
        for step in range(6):
            images = loader.batch_at(step).images
            assert len(images) == 2
            seen += numbers(images)
    assert sorted(seen) == list(range(24))


def test_unreadable_images_are_named_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = batches(write_numbered(tmp_path, bad=(5,)), max_bad=0.5)
    seen = [n for step in range(6) for n in numbers(loader.batch_at(step).images)]
    assert len(seen) == 24 and 5 not in seen
    assert [name for name, _ in loader.unreadable] == ["0005"] and "0005" in capsys.readouterr().err
    strict = batches(write_numbered(tmp_path, bad=(0, 1, 2, 3, 4)), max_bad=0.01)
    with pytest.raises(UserError, match=r"--cache\.max-bad"):
        [strict.batch_at(step) for step in range(6)]
    with pytest.raises(UserError, match="not one of the classes"):
        batches(write_numbered(tmp_path), classes=("bird",)).batch_at(0)
    assert batches(write_numbered(tmp_path), classes=None).batch_at(0).labels is None


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, shards=2)
    with pytest.raises(UserError, match="--workers"):
        batches(paths, workers=3)
    with pytest.raises(UserError, match="multiple of 2"):
        batches(paths, batch=5, world=2)


def test_a_reader_process_reads_the_same_until_killed(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path)
    here, there = batches(paths), batches(paths, workers=1)
    for step in range(2):
        assert np.array_equal(here.batch_at(step).images, there.batch_at(step).images)
    pool = there.sources[0][0].pool
    assert pool is not None
    (process,) = pool._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"was killed.*--resume"):
        [there.batch_at(step) for step in range(2, 40)]
    there.close()


def test_damaged_shards_are_named_once_and_many_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_numbered(tmp_path, shards=6)
    Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:3000])
    loader = batches(paths)
    [loader.batch_at(step) for step in range(24)]  # several epochs
    assert list(loader.damaged) == [paths[2]] and capsys.readouterr().err.count("is damaged") == 1
    for path in paths[:4]:
        Path(path).unlink()
    with pytest.raises(UserError, match=r"2 of 6 shards .*--cache\.max-bad"):
        [loader.batch_at(step) for step in range(24, 60)]


def test_another_batch_size_has_the_same_images(tmp_path: Path) -> None:
    loader = batches(write_numbered(tmp_path))
    first = loader.batch_at(0)
    halves = loader.with_batch_size(2)
    assert not loader.sources, "the readers are stopped"
    assert len(halves) == 12 and numbers(halves.batch_at(0).images) == numbers(first.images)[:2]


def test_a_peek_does_not_count_for_the_run(tmp_path: Path) -> None:
    loader = batches(write_numbered(tmp_path, bad=(3, 9, 15)), max_bad=0.3)
    batches_seen = [loader.batch_at(step) for step in range(6)]
    assert torch.equal(loader.peek(0).images, batches_seen[0].images)
    assert len(loader.unreadable) == 3 and loader.max_bad == 0.3 and loader.next_step == 6
    Path(loader.stream.shards[0]).unlink()
    loader.peek(0)
    assert not loader.damaged
