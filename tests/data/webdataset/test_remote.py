"""Shards from elsewhere: connections that break, positions without reading, indexes of strangers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit.data import open_data
from frugalvit.data.dataset import DatasetSplits
from frugalvit.data.webdataset import remote
from frugalvit.data.webdataset.index import FORMAT, INDEX, parse_index
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.remote import CommandReader, fetch, open_remote
from frugalvit.data.webdataset.shards import expand, is_shards
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.streaming_dataset import open_stream, should_stream
from frugalvit.errors import UserError
from helpers.shards import png, write_shards, write_tar
from helpers.web_server import serving


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "_WAIT", 0.001)
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))


# ---- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path, ranges: bool) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a.tar").write_bytes(content)
    with serving(tmp_path, breaks=3, ranges=ranges) as (address, server):
        with open_remote(f"{address}/a.tar") as file:
            assert file.read(1000) + file.read() == content
        asked = [wanted for _, wanted in server.asked]
        assert asked[0] is None and len(asked) == 4 and asked[1] == f"bytes={len(content) // 2}-"


def test_a_connection_that_never_holds_is_given_up(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with serving(tmp_path, breaks=1000, ranges=False) as (address, _):
        stream = ShardStream(expand(address + "/{000..002}.tar"), warn=None)
        assert list(stream.epoch()) == [] or len(stream.damaged) == 3
        assert all("the connection ended after" in reason for _, reason in stream.damaged)
        with pytest.raises(UserError, match="cannot be fetched: the connection ended"):
            fetch(f"{address}/000.tar")
        assert not list((tmp_path / "cache").rglob("*.part"))


def test_what_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, server):
        with pytest.raises(UserError, match="cannot be fetched"):
            fetch(f"{address}/nothing.tar")
        assert len(server.asked) == 1


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file where the cache should be")
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "taken"))
    with serving(tmp_path) as (address, server):
        with pytest.raises(UserError, match=r"cannot be kept in .*set FRUGALVIT_CACHE"):
            fetch(f"{address}/a.tar")
        assert not server.asked


def test_a_query_is_part_of_the_file(tmp_path: Path) -> None:
    """Found by reading: shards that differ in their query only were one file in the cache."""
    write_tar(tmp_path / "a.tar", {"1.png": b"x"})
    with serving(tmp_path) as (address, _):
        first, second = fetch(f"{address}/a.tar?part=1"), fetch(f"{address}/a.tar?part=2")
    assert first != second and first.name == second.name == "a.tar"
    assert is_shards("https://somewhere/a.tar?part=1") and not is_shards("https://somewhere/page?a.tar")


def test_pipes_must_be_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="FRUGALVIT_ALLOW_PIPES=1"):
        open_remote(f"pipe:touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("FRUGALVIT_ALLOW_PIPES", "1")
    with open_remote("pipe:printf 1234") as file:
        assert file.read(2) + file.read() == b"1234"
    with open_remote("pipe:sh -c 'printf 12; exit 3'") as file, pytest.raises(OSError, match="status 3"):
        file.read()
    with pytest.raises(UserError, match="No closing quotation"):
        open_remote("pipe:printf '1")
    endless = CommandReader("yes")
    assert endless.read(4) == b"y\ny\n"
    endless.close()
    assert endless._process.returncode is not None


def test_faults_of_drivers_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    class Odd(Exception):
        """As botocore and aiohttp have them."""

    def fail(*_: object, **__: object) -> None:
        raise Odd("no credentials\nat all")

    monkeypatch.setattr(fsspec, "open", fail)
    with pytest.raises(OSError, match="Odd: no credentials at all"):
        open_remote("s3://bucket/a.tar")
    stream = ShardStream(["s3://bucket/a.tar"], warn=None)
    assert list(stream.epoch()) == [] and "Odd" in stream.damaged[0][1]


@pytest.mark.parametrize(
    "where",
    ["~nobody_of_that_name/x", "~nobody_of_that_name/{0..3}.tar", "a" * 5000, "http://[bad/{0..3}.tar", "pipe:"],
)
def test_odd_places_are_one_line(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Found by trying: homes of nobody, names too long, addresses that are none."""
    monkeypatch.setenv("FRUGALVIT_ALLOW_PIPES", "1")
    assert should_stream(where, "auto") == where.startswith(("http", "pipe"))
    with pytest.raises(UserError):
        open_data(where)
    if should_stream(where, "auto"):
        with pytest.raises(UserError):
            open_stream(where, labelled=True, split="given")


# ---- positions ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 40),
    st.booleans(),
)
def test_going_on_equals_reading_again(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], buffer: int, parts: int, skip: int, shuffle: bool
) -> None:
    """With counts, what was taken is not read again; what follows is the same, wherever it begins."""
    folder = tmp_path_factory.mktemp("positions")
    shards, number = [], 0
    for shard, size in enumerate(sizes):
        files = {f"{number + i:04d}.png": bytes([number + i]) for i in range(size)}
        shards.append(str(write_tar(folder / f"{shard}.tar", files)))
        number += size
    parts = min(parts, len(shards))
    reading = ShardStream(shards, seed=1, buffer=buffer, shuffle=shuffle)
    counting = ShardStream(shards, seed=1, buffer=buffer, shuffle=shuffle, counts=sizes)
    for part in range(parts):
        place = {"part": part, "parts": parts}
        whole = list(reading.epoch(2, **place))
        assert counting.length(2, **place) == len(whole) and reading.length(2, **place) is None
        assert list(counting.epoch(2, **place, skip=skip)) == whole[skip:] == list(reading.epoch(2, **place, skip=skip))


def test_going_on_opens_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = expand(write_shards(tmp_path, shards=20, each=10))
    opened: list[str] = []

    def note(where: str):
        opened.append(where)
        return open_remote(where)

    monkeypatch.setattr("frugalvit.data.webdataset.stream.open_remote", note)
    stream = ShardStream(shards, buffer=5, counts=[10] * 20)
    next(stream.epoch(skip=150))
    assert 1 <= len(set(opened)) <= 5, "fifteen shards were taken before and are not needed"


# ---- sources --------------------------------------------------------------------------------------------------------


def test_when_to_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = write_shards(tmp_path / "s")
    assert not should_stream(where, "auto") and should_stream(where, True) and should_stream(str(tmp_path / "s"), True)
    assert should_stream("https://far/{0..3}.tar", "auto") and not should_stream("https://far/{0..3}.tar", False)
    assert should_stream("pipe:cat x", "auto") and should_stream("https://far/index.json", "auto")
    assert not should_stream(str(tmp_path), "auto")
    with pytest.raises(UserError, match="is none"):
        should_stream(str(tmp_path), True)
    monkeypatch.setattr("frugalvit.data.webdataset.streaming_dataset._LARGE", 100)
    assert should_stream(where, "auto")


def test_what_is_known_of_a_stream(tmp_path: Path) -> None:
    """Labels need a look through all shards; without labels a few are enough, and the number is an estimate."""
    where = write_shards(tmp_path / "s", shards=10)
    source = open_stream(where, labelled=True, val_fraction=0.2)
    train, val = source.splits["train"], source.splits["val"]
    assert source.classes == ("0", "1") and len(train) == 32 and len(val) == 8 and source.kind == "stream"
    assert (
        train.survey.counts == [4] * 8 and train.sample_images().labels is not None and len(train.sample_images()) == 16
    )
    held = {Path(shard).name for shard in val.shards}
    assert len(held) == 2 and held.isdisjoint(Path(shard).name for shard in train.shards)
    assert train.fingerprint() == open_stream(where, labelled=True, val_fraction=0.2).splits["train"].fingerprint()
    with serving(tmp_path / "s") as (address, _):
        there = open_stream(address + "/{000..009}.tar", labelled=False)
    assert list(there.splits) == ["train"] and there.classes is None and len(there.splits["train"]) == 36
    assert there.splits["train"].survey.counts is None


def test_a_damaged_shard_counts_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    """The count of a look through must be what reading in passing finds, here and over HTTP."""
    where = write_shards(tmp_path / "s", shards=4, each=6)
    shard = tmp_path / "s" / "001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    here = open_stream(where, labelled=True, split="given").splits["train"]
    with serving(tmp_path / "s") as (address, _):
        there = open_stream(address + "/{000..003}.tar", labelled=True, split="given").splits["train"]
    found = [len(list(ShardStream([shard], warn=None).epoch())) for shard in here.shards]
    assert here.survey.counts == there.survey.counts == found and 0 < found[1] < 6


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        json.dumps({"format": "another"}).encode(),
        json.dumps({"format": FORMAT}).encode(),
        json.dumps({"format": FORMAT, "classes": 7, "splits": {}}).encode(),
        json.dumps({"format": FORMAT, "classes": None, "splits": []}).encode(),
        json.dumps({"format": FORMAT, "classes": None, "splits": {"train": [1]}}).encode(),
        json.dumps({"format": FORMAT, "classes": ["a"], "splits": {"train": [{"file": "../x.tar"}]}}).encode(),
        json.dumps(
            {
                "format": FORMAT,
                "classes": ["a"],
                "splits": {"train": [{"file": "/etc/x.tar", "examples": 1, "bytes": 1, "sha256": ""}]},
            }
        ).encode(),
    ],
)
def test_an_index_that_is_not_ours_is_none(tmp_path: Path, content: bytes) -> None:
    assert parse_index(content) is None
    write_shards(tmp_path / "s")
    (tmp_path / "s" / "index.json").write_bytes(content)
    assert len(open_data(tmp_path / "s", split="given")) == 12


@settings(max_examples=80)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["file", "x"]), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["classes", "splits", "decoded", "train", "file", "examples"]),
)
def test_fuzzed_indexes(value: object, where: str) -> None:
    shard = {"file": "train-0.tar", "examples": 1, "bytes": 2, "sha256": "x"}
    index = {"format": FORMAT, "classes": ["a"], "splits": {"train": [shard]}, "decoded": []}
    target = shard if where in shard else index["splits"] if where == "train" else index
    target[where] = value
    found = parse_index(json.dumps(index).encode())
    assert found is None or all(
        "/" not in s.file and s.examples >= 0 for shards in found.splits.values() for s in shards
    )


def test_a_dataset_that_was_packed_anew_is_fetched_anew(tmp_path: Path) -> None:
    """Found by reading: old shards were read with the new names of classes, and cats became ants."""

    def publish(shades: dict[str, int]) -> None:
        for split in ("train", "val"):
            for name, shade in shades.items():
                (tmp_path / "images" / split / name).mkdir(parents=True, exist_ok=True)
                for number in range(2):
                    path = tmp_path / "images" / split / name / f"{split}{number}.png"
                    path.write_bytes(png(shade + number))
        shutil.rmtree(tmp_path / "web", ignore_errors=True)
        pack(open_data(str(tmp_path / "images")), tmp_path / "web")

    def seen(source: DatasetSplits) -> set[tuple[str, int]]:
        assert source.classes is not None
        parts = [examples.sample_images() for examples in source.splits.values()]
        return {
            (source.classes[label], int(part.read(i)[0, 0, 0]) // 50)
            for part in parts
            for i, label in enumerate(part.labels if part.labels is not None else [])
        }

    publish({"cat": 0, "dog": 100})
    with serving(tmp_path / "web") as (address, _):
        where = f"{address}/{INDEX}"
        for opened in (open_data(where), open_stream(where, labelled=True)):
            assert seen(opened) == {("cat", 0), ("dog", 2)}
        publish({"ant": 200, "cat": 0, "dog": 100})
        for opened in (open_data(where), open_stream(where, labelled=True)):
            assert seen(opened) == {("ant", 4), ("cat", 0), ("dog", 2)}
        (shard,) = (tmp_path / "web").glob("val-*.tar")
        shard.write_bytes(shard.read_bytes() + bytes(512))
        monkey = tmp_path / "cache"
        shutil.rmtree(monkey, ignore_errors=True)
        with pytest.raises(UserError, match="is not what the index beside it lists"):
            open_data(where)
