"""Remote files, read forwards: http(s) and fsspec (``s3://``, ``gs://`` …).

A broken connection is reopened at the same position, a few times.
"""

import hashlib
import http.client
import io
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from frugalvit.data.paths import cache_root
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import open_regular, write_atomically

_TIMEOUT = 60.0
_TRIES, _WAIT = 3, 0.5  # attempts to reopen a broken connection; seconds before the first, then doubled
_MAX_UNSTATED = 64 << 30  # bytes of a file whose length the server does not state
_BLOCK = 1 << 20
READ_ERRORS = (OSError, EOFError, http.client.HTTPException)


def is_remote(where: str) -> bool:
    return "://" in where


def is_http(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def without_query(where: str) -> str:
    """Return an address without its query: ``?`` and the rest."""
    return where.split("?")[0] if is_http(where) else where


def open_remote(where: str) -> IO[bytes]:
    """Open a local file, or an http(s) or fsspec address, to read it forwards."""
    return io.BufferedReader(RetryingReader(where)) if is_remote(where) else open_regular(where)


class RetryingReader(io.RawIOBase):
    """A remote file that reopens a broken connection at its position, up to ``_TRIES`` times in a row."""

    def __init__(self, where: str) -> None:
        self.where, self.position, self.failures = where, 0, 0
        self.length: int | None = None  # bytes of the file, if the server states it
        self.version: str | None = None  # ETag or date of the file, likewise
        self._source: Any = None
        self.readinto(bytearray())  # connect now, so that a missing file is an error here

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            try:
                if self._source is None:
                    self._open()
                source: Any = self._source
                read = getattr(source, "read1", source.read)  # read1 does not wait for a full buffer
                part = read(len(buffer)) if len(buffer) else b""
                if not part and len(buffer) and self.length is not None and self.position < self.length:
                    raise EOFError(f"the connection ended after {self.position:,} of {self.length:,} bytes")
            except UserError:
                raise
            except Exception as error:  # every fsspec driver has its own types: botocore's, aiohttp's, Google's
                self._disconnect()
                self.failures += 1
                if self.failures > _TRIES or _is_final(error):
                    if isinstance(error, READ_ERRORS):
                        raise
                    raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
                time.sleep(_WAIT * 2 ** (self.failures - 1))
                continue
            buffer[: len(part)] = part
            self.position += len(part)
            self.failures = 0 if part else self.failures
            return len(part)

    def _open(self) -> None:
        self._source, length, version = _connect(self.where, self.position)
        is_other = version is not None and self.version not in (None, version)
        if self.position and (is_other or length != self.length):
            raise PermissionError("the file has changed during the download: start again")
        self.length, self.version = length, version or self.version

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _disconnect(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()


def _connect(where: str, position: int) -> tuple[Any, int | None, str | None]:
    """Open a remote file at a position. Returns the file, its length in bytes and its version, if known."""
    if not is_http(where):
        try:
            import fsspec

            opened: Any = fsspec.open(where, "rb")
            file = opened.open()
        except (ImportError, ValueError) as error:
            raise UserError(f"Cannot open {where}: {error}. pip install 'frugalvit[streams]' and its driver.") from None
        if position:
            file.seek(position)
        return file, getattr(file, "size", None), None
    headers = {"Range": f"bytes={position}-"} if position else {}
    try:
        answer: Any = urllib.request.urlopen(urllib.request.Request(where, headers=headers), timeout=_TIMEOUT)
    except (ValueError, http.client.InvalidURL) as error:
        raise UserError(f"{where} is not a valid address: {error}.") from None
    if position and answer.status != 206:
        raise PermissionError("the connection broke, and the server cannot resume a download")
    stated = answer.headers.get("Content-Length") or ""
    is_number = stated.isascii() and stated.isdigit() and len(stated) < 20
    version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
    return answer, position + int(stated) if is_number else None, version


def _is_final(error: Exception) -> bool:
    """True if a retry cannot help: the file is missing or the server refuses it."""
    if isinstance(error, urllib.error.HTTPError):
        return 400 <= error.code < 500 and error.code not in (408, 429)
    return isinstance(error, FileNotFoundError | PermissionError)


def fetch(url: str, sha256: str = "") -> Path:
    """Download a remote shard into the cache, once, and return its path.

    sha256: the checksum in the index, if any; another checksum gives another file in the cache
    """
    digest = hashlib.sha256((url + sha256).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "-", without_query(url).rpartition("/")[2])[-100:].lstrip(".-") or "shard.tar"
    target = cache_root() / "shards" / digest / name

    def download(file: IO[bytes]) -> None:
        content, tail = hashlib.sha256(), b"\1"
        with open_remote(url) as source:
            length = getattr(getattr(source, "raw", None), "length", None)
            while block := source.read(_BLOCK):
                content.update(block)
                file.write(block)
                tail = (tail + block)[-512:]
                if length is None and file.tell() > _MAX_UNSTATED:
                    raise UserError(f"{url} does not end after {_MAX_UNSTATED >> 30} GB. Download it yourself.")
        if length is None and not sha256 and name.endswith(".tar") and any(tail):
            raise UserError(f"{url} ends early: it lacks the zeros that end a tar file. Try again.")
        if sha256 and content.hexdigest() != sha256:
            raise UserError(f"{url} does not match its index. Pack the dataset again, or remove the index.")

    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            console.info(f"fetching {url}")
            write_atomically(target, download)
    except READ_ERRORS as error:
        raise UserError(f"Cannot fetch {url} to {target.parent} (FRUGALVIT_CACHE): {describe_error(error)}.") from None
    return target


def read_small(url: str, limit: int = 512 << 20) -> bytes | None:
    """Read a small remote file; None if it is missing, unreadable or too large."""
    try:
        with open_remote(url) as file:
            content = file.read(limit + 1)
    except (*READ_ERRORS, UserError):
        return None
    return content if len(content) <= limit else None


def describe_error(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__
