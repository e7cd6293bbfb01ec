"""Faults of a download: a version that changes, a file that ends early, a slow or endless body, strange headers."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from frugalvit.data.webdataset import remote
from frugalvit.data.webdataset.remote import fetch
from frugalvit.errors import UserError
from helpers.shards import write_shards

Answer = Callable[[socket.socket, bytes], None]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "_WAIT", 0.001)
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shard(tmp_path: Path) -> bytes:
    write_shards(tmp_path / "shards")
    return (tmp_path / "shards" / "000.tar").read_bytes()


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Answer every request with raw bytes; yields the address of a shard."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        answer(connection, connection.recv(4096))
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/a.tar"


def head(length: object = None, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items()), "Connection: close"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "stated", ["\u00b2", "9" * 5000, "-5", "12abc", None], ids=["²", "5000", "-5", "12abc", "none"]
)
def test_a_content_length_that_is_no_number_is_ignored(shard: bytes, stated: str | None) -> None:
    with answering(lambda connection, _: connection.sendall(head(stated) + shard)) as url:
        assert fetch(url).read_bytes() == shard


def test_a_file_that_ends_early_is_not_kept(shard: bytes, tmp_path: Path) -> None:
    """Without a stated length only the tar file itself shows that its end is missing."""
    short = head() + shard[: len(shard) // 3]
    with (
        answering(lambda connection, _: connection.sendall(short)) as url,
        pytest.raises(UserError, match="ends early"),
    ):
        fetch(url)
    assert cached(tmp_path) == []


@pytest.mark.parametrize("sign", ["ETag", "Last-Modified", "length"])
def test_two_versions_are_not_joined(shard: bytes, tmp_path: Path, sign: str) -> None:
    """The connection breaks in the middle; then the server has another file."""

    def answer(connection: socket.socket, request: bytes) -> None:
        half = len(shard) // 2
        if b"Range:" not in request:
            connection.sendall(head(len(shard), **({} if sign == "length" else {sign: '"one"'})) + shard[:half])
        else:
            rest = shard[half:] + (b"more" if sign == "length" else b"")
            headers = {} if sign == "length" else {sign: '"two"'}
            connection.sendall(head(len(rest), "206 Partial Content", **headers) + rest)

    with answering(answer) as url, pytest.raises(UserError, match="has changed"):
        fetch(url)
    assert cached(tmp_path) == []


def test_an_endless_body_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "_MAX_UNSTATED", 1 << 20)

    def flood(connection: socket.socket, _: bytes) -> None:
        connection.sendall(head())
        for _ in range(100):  # enough: a test without an end would fill the disk
            connection.sendall(bytes(1 << 16))

    with answering(flood) as url, pytest.raises(UserError, match="does not end"):
        fetch(url)
    assert cached(tmp_path) == []
