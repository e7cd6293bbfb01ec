"""Remote files: broken connections, the cache of shards, drivers."""

import shutil
from pathlib import Path

import pytest

from frugalvit.data import open_data
from frugalvit.data.webdataset import remote
from frugalvit.data.webdataset.index import INDEX
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.remote import fetch, open_remote
from frugalvit.data.webdataset.shards import expand
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.streaming_dataset import open_stream, should_stream
from frugalvit.errors import UserError
from helpers.shards import png, write_shards
from helpers.web_server import serving


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "_WAIT", 0.001)
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))


def test_a_broken_connection_continues_at_its_position(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a.tar").write_bytes(content)
    with serving(tmp_path, breaks=3) as (address, server):
        with open_remote(f"{address}/a.tar") as file:
            assert file.read(1000) + file.read() == content
        requested = [bytes_range for _, bytes_range in server.requests]
        assert requested[0] is None and len(requested) == 4 and requested[1] == f"bytes={len(content) // 2}-"


def test_a_connection_that_always_breaks_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with serving(tmp_path, breaks=1000) as (address, _):
        with pytest.raises(UserError, match="the connection ended after"):
            list(ShardStream(expand(address + "/{000..002}.tar"), [4] * 3).epoch())
        with pytest.raises(UserError, match=r"000\.tar .*the connection ended"):
            fetch(f"{address}/000.tar")
        assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_missing_file_is_requested_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, server):
        with pytest.raises(UserError, match=r"Cannot fetch .*nothing\.tar"):
            fetch(f"{address}/nothing.tar")
        assert len(server.requests) == 1


def test_errors_of_fsspec_drivers_are_read_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    class DriverError(Exception):
        """As botocore and aiohttp have them."""

    def fail(*_: object, **__: object) -> None:
        raise DriverError("no credentials\nat all")

    monkeypatch.setattr(fsspec, "open", fail)
    with pytest.raises(OSError, match="DriverError: no credentials at all"):
        open_remote("s3://bucket/a.tar")
    with pytest.raises(UserError, match="DriverError"):
        list(ShardStream(["s3://bucket/a.tar"], [1]).epoch())


@pytest.mark.parametrize(
    "where",
    [
        "~nobody_of_that_name/x",
        "~nobody_of_that_name/{0..3}.tar",
        "a" * 5000,
        "http://[bad/{0..3}.tar",
        "pipe:touch ran",
    ],
)
def test_odd_locations_are_one_line_errors(where: str) -> None:
    assert should_stream(where, "auto") == where.startswith("http")
    with pytest.raises(UserError):
        open_data(where)
    if should_stream(where, "auto"):
        with pytest.raises(UserError):
            open_stream(where, split="given")


def test_shards_over_http_are_fetched_once(tmp_path: Path) -> None:
    write_shards(tmp_path / "web")
    with serving(tmp_path / "web") as (address, _):
        where = address + "/{000..002}.tar"
        assert len(list(ShardStream(expand(where), [4] * 3).epoch())) == 12
        source = open_data(where, split="given")
        assert len(source) == 12 and source.splits["train"].read(9)[0, 0, 0] == 9
    assert len(open_data(where, split="given")) == 12, "from the cache, without the server"


def test_a_dataset_packed_again_is_fetched_again(tmp_path: Path) -> None:
    def publish(shades: dict[str, int]) -> None:
        for split in ("train", "val"):
            for name, shade in shades.items():
                (tmp_path / "images" / split / name).mkdir(parents=True, exist_ok=True)
                (tmp_path / "images" / split / name / f"{split}.png").write_bytes(png(shade))
        shutil.rmtree(tmp_path / "web", ignore_errors=True)
        pack(open_data(str(tmp_path / "images")), tmp_path / "web")

    with serving(tmp_path / "web") as (address, _):
        where = f"{address}/{INDEX}"
        for shades in ({"cat": 0, "dog": 100}, {"ant": 200, "cat": 0, "dog": 100}):
            publish(shades)
            for source in (open_data(where), open_stream(where)):
                assert source.classes == tuple(shades)
                for part in (source.splits["train"].sample_images(), source.splits["val"]):
                    read = {source.classes[part.labels[i]]: int(part.read(i)[0, 0, 0]) for i in range(len(part))}
                    assert read == shades
        (shard,) = (tmp_path / "web").glob("val-*.tar")
        shard.write_bytes(shard.read_bytes() + bytes(512))
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with pytest.raises(UserError, match=r"val-.*\.tar does not match its index"):
            open_data(where)
