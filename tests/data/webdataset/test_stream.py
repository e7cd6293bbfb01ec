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
    stream = ShardStream(shards, seed=3, buffer=6)
    keys = [[s.key for s in stream.epoch(1, reader=reader, readers=2)] for reader in range(2)]
    assert sorted(keys[0] + keys[1]) == [f"{i:04d}" for i in range(20)]
    assert keys[0] == [s.key for s in ShardStream(shards, seed=3, buffer=6).epoch(1, reader=0, readers=2)]
    assert keys[0] != [s.key for s in stream.epoch(2, reader=0, readers=2)]
    assert [s.key for s in stream.epoch(1, reader=1, readers=2, skip=5)] == keys[1][5:]
    plain = list(ShardStream(shards, shuffle=False).epoch())
    assert [s.key for s in plain] == [f"{i:04d}" for i in range(20)]
    assert plain[3].label == "1" and plain[3].content == png(3)
    with pytest.raises(UserError, match="6 readers"):
        list(stream.epoch(readers=6))


def test_damaged_shards_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = expand(write_shards(tmp_path))
    path = Path(shards[1])
    path.write_bytes(path.read_bytes()[:2100])
    stream = ShardStream([*shards, str(tmp_path / "missing.tar")], shuffle=False)
    keys = [sample.key for sample in stream.epoch()]
    assert {*keys} >= {f"{i:04d}" for i in (0, 1, 2, 3, 8, 9, 10, 11)}
    assert [Path(name).name for name, _ in stream.damaged] == ["001.tar", "missing.tar"]
    assert "001.tar is damaged" in capsys.readouterr().err


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 40),
    st.booleans(),
)
def test_resuming_with_counts_equals_reading_again(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], buffer: int, readers: int, skip: int, shuffle: bool
) -> None:
    folder = tmp_path_factory.mktemp("positions")
    shards, number = [], 0
    for shard, size in enumerate(sizes):
        files = {f"{number + i:04d}.png": bytes([number + i]) for i in range(size)}
        shards.append(str(write_tar(folder / f"{shard}.tar", files)))
        number += size
    readers = min(readers, len(shards))
    plain = ShardStream(shards, seed=1, buffer=buffer, shuffle=shuffle)
    counting = ShardStream(shards, seed=1, buffer=buffer, shuffle=shuffle, counts=sizes)
    for reader in range(readers):
        share = {"reader": reader, "readers": readers}
        every = list(plain.epoch(2, **share))
        assert counting.length(2, **share) == len(every) and plain.length(2, **share) is None
        assert list(counting.epoch(2, **share, skip=skip)) == every[skip:] == list(plain.epoch(2, **share, skip=skip))


def test_resuming_opens_only_the_shards_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = expand(write_shards(tmp_path, shards=20, each=10))
    opened: list[str] = []

    def record(where: str):
        opened.append(where)
        return open_remote(where)

    monkeypatch.setattr("frugalvit.data.webdataset.stream.open_remote", record)
    next(ShardStream(shards, buffer=5, counts=[10] * 20).epoch(skip=150))
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
            stream = ShardStream(paths, buffer=buffer, counts=counts, warn=None)
            share = {"reader": reader, "readers": 2}
            every = list(stream.epoch(1, **share))
            assert len(every) == stream.length(1, **share)
            for skip in range(len(every) + 1):
                assert list(stream.epoch(1, **share, skip=skip)) == every[skip:]
        stream = ShardStream(paths, buffer=buffer, counts=counts, warn=None)
        keys = [sample.key for sample in stream.epoch()]
        assert len(keys) == sum(counts)
        assert len(set(keys)) >= {"gone": 24, "torn": 25, "fewer": 30, "more": 28}[damage]
        if damage == "more":
            assert not stream.damaged, "examples beyond the count are no damage"
            continue
        assert {shard for shard, _ in stream.damaged} == {paths[2]}
        expected = {"torn": "truncated", "gone": "No such", "fewer": "6 of 8 examples"}
        assert expected[damage] in stream.damaged[0][1]


def test_a_reader_whose_only_shard_is_gone_does_not_repeat(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, shards=5)
    Path(paths[2]).unlink()
    stream = ShardStream(paths, buffer=1, counts=[6] * 5, shuffle=False, warn=None)
    keys = [sample.key for sample in stream.epoch(reader=2, readers=5)]
    assert len(keys) == len(set(keys)) == 6


def test_without_readable_shards_each_is_tried_a_few_times(tmp_path: Path) -> None:
    stream = ShardStream([str(tmp_path / f"{number}.tar") for number in range(50)], counts=[9] * 50, warn=None)
    assert not list(stream.epoch()) and len(stream.damaged) <= 150
