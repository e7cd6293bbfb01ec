"""The order of a stream is a function of (seed, epoch, reader); positions hold whatever is damaged."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit.data.webdataset.remote import open_remote
from frugalvit.data.webdataset.shards import expand
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.errors import UserError
from helpers.shards import png, write_numbered, write_shards, write_tar


def test_readers_share_every_example_once(tmp_path: Path) -> None:
    shards = expand(write_shards(tmp_path, shards=5))
    stream = ShardStream(shards, [4] * 5, seed=3, buffer=6)
    keys = [[s.key for s in stream.epoch(1, reader=reader, readers=2)] for reader in range(2)]
    assert sorted(keys[0] + keys[1]) == [f"{i:04d}" for i in range(20)]
    assert keys[0] == [s.key for s in ShardStream(shards, [4] * 5, seed=3, buffer=6).epoch(1, reader=0, readers=2)]
    assert keys[0] != [s.key for s in stream.epoch(2, reader=0, readers=2)]
    sample = next(s for s in stream.epoch() if s.key == "0003")
    assert sample.label == "1" and sample.content == png(3)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 40),
)
def test_resume_equals_reading_again(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], buffer: int, readers: int, skip: int
) -> None:
    folder = tmp_path_factory.mktemp("positions")
    shards, number = [], 0
    for shard, size in enumerate(sizes):
        files = {f"{number + i:04d}.png": bytes([number + i]) for i in range(size)}
        shards.append(str(write_tar(folder / f"{shard}.tar", files)))
        number += size
    readers = min(readers, len(shards))
    stream = ShardStream(shards, sizes, seed=1, buffer=buffer)
    for reader in range(readers):
        share = {"reader": reader, "readers": readers}
        every = list(stream.epoch(2, **share))
        assert stream.length(2, **share) == len(every) == len(set(every))
        assert list(stream.epoch(2, **share, skip=skip)) == every[skip:]


def test_resume_opens_only_the_shards_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = expand(write_shards(tmp_path, shards=20, each=10))
    opened: list[str] = []

    def record(where: str):
        opened.append(where)
        return open_remote(where)

    monkeypatch.setattr("frugalvit.data.webdataset.stream.open_remote", record)
    next(ShardStream(shards, [10] * 20, buffer=5).epoch(skip=150))
    assert 1 <= len(set(opened)) <= 5


@pytest.mark.parametrize("damage", ["torn", "gone", "fewer", "more"])
def test_positions_hold_whatever_is_damaged(tmp_path: Path, damage: str) -> None:
    paths = write_numbered(tmp_path, shards=5)
    counts = [6] * 5
    if damage == "torn":
        os.truncate(paths[2], Path(paths[2]).stat().st_size // 2)
    elif damage == "gone":
        Path(paths[2]).unlink()
    else:
        counts[2] = 8 if damage == "fewer" else 4
    for buffer in (1, 4, 50):
        for reader in range(2):
            stream = ShardStream(paths, counts, buffer=buffer)
            share = {"reader": reader, "readers": 2}
            every = list(stream.epoch(1, **share))
            assert len(every) == stream.length(1, **share)
            for skip in range(len(every) + 1):
                assert list(stream.epoch(1, **share, skip=skip)) == every[skip:]
        stream = ShardStream(paths, counts, buffer=buffer)
        keys = [sample.key for sample in stream.epoch()]
        assert len(keys) == sum(counts)
        assert len(set(keys)) >= {"gone": 24, "torn": 25, "fewer": 30, "more": 28}[damage]
        if damage == "more":
            assert not stream.damaged, "examples beyond the count are no damage"
            continue
        assert {shard for shard, _ in stream.damaged} == {paths[2]}
        expected = {"torn": "truncated", "gone": "No such", "fewer": "6 of 8 examples"}
        assert expected[damage] in stream.damaged[0][1]


def test_missing_shard_is_replaced_without_repeats(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, shards=5)
    Path(paths[2]).unlink()
    stream = ShardStream(paths, [6] * 5)
    for reader in range(5):
        keys = [sample.key for sample in stream.epoch(reader=reader, readers=5)]
        assert len(keys) == len(set(keys)) == 6


def test_no_readable_shard_is_an_error(tmp_path: Path) -> None:
    stream = ShardStream([str(tmp_path / f"{number}.tar") for number in range(50)], [9] * 50)
    with pytest.raises(UserError, match=r"None of the 50 shards can be read: .*\.tar: No such file"):
        next(stream.epoch())
    assert len(stream.damaged) <= 150
    with pytest.raises(UserError, match="no images"):
        ShardStream(["a.tar"], [0])
