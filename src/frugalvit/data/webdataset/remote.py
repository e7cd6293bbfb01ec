"""Files that lie elsewhere, read forwards: http(s), what fsspec knows (``s3://``, ``gs://`` …), and ``pipe:`` commands.

A connection that breaks is opened again where it broke, a few times. A ``pipe:`` runs a program, and a configuration
may come from a stranger, so it must be allowed in the environment first. No shell looks at it: for a pipeline write
``pipe:sh -c '…'``.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self, cast

from frugalvit.data.paths import cache_root
from frugalvit.errors import UserError
from frugalvit.utils import console

ALLOW_PIPES = "FRUGALVIT_ALLOW_PIPES"
_TIMEOUT = 60.0
_TRIES, _WAIT = 3, 0.5  # times a broken connection is opened again in a row; seconds before the first, then doubled
FAULTS = (OSError, EOFError, http.client.HTTPException)


class Readable(Protocol):
    """As much of a file as reading forwards needs."""

    def read(self, count: int = -1, /) -> bytes: ...
    def close(self) -> None: ...


def is_remote(where: str) -> bool:
    return "://" in where or is_pipe(where)


def is_pipe(where: str) -> bool:
    return where.startswith("pipe:")


def without_query(where: str) -> str:
    """The path of an address, without what follows a ``?``."""
    return where.split("?")[0] if where.startswith(("http://", "https://")) else where


def open_remote(where: str) -> IO[bytes]:
    """A readable stream of a local file, an http(s) address, anything fsspec knows, or a command's output."""
    if not is_remote(where):
        return Path(where).open("rb")
    if is_pipe(where):
        return cast(IO[bytes], CommandReader(where.removeprefix("pipe:")))
    return cast(
        IO[bytes], RetryingReader(where, _open_http if where.startswith(("http://", "https://")) else _open_fsspec)
    )


class ForwardReader:
    """A file that can only be read forwards, to be used in a ``with``."""

    def read(self, count: int = -1, /) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RetryingReader(ForwardReader):
    """A remote file whose connection may break: it is opened again where it broke, ``_TRIES`` times in a row."""

    def __init__(self, where: str, opener: Callable[[str, int], tuple[Readable, int | None]]) -> None:
        self.where, self._opener = where, opener
        self.position, self._broken = 0, 0
        self._source: Readable | None = None
        self.length: int | None = None
        while self._source is None:
            self._open()

    def read(self, count: int = -1, /) -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            part = self._read_some(left)
            if not part:
                break
            parts.append(part)
            left -= len(part) if count > 0 else 0
        return b"".join(parts)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _read_some(self, count: int) -> bytes:
        """Bytes from the present position on; none at the end of the file."""
        while True:
            if self._source is None:
                self._open()
                continue
            try:
                part = self._source.read(count if count > 0 else 1 << 20)
                if not part and self.length is not None and self.position < self.length:
                    raise EOFError(f"the connection ended after {self.position:,} of {self.length:,} bytes")
            except FAULTS as error:
                self._wait(error)
                continue
            self.position += len(part)
            self._broken = 0 if part else self._broken
            return part

    def _open(self) -> None:
        try:
            self._source, self.length = self._opener(self.where, self.position)
        except FAULTS as error:
            if isinstance(error, FileNotFoundError | PermissionError) or _is_refusal(error):
                raise
            self._wait(error)

    def _wait(self, error: BaseException) -> None:
        self._broken += 1
        if self._broken > _TRIES:
            raise error
        self.close()
        self._source = None
        time.sleep(_WAIT * 2 ** (self._broken - 1))


class CommandReader(ForwardReader):
    """What a program writes; one that fails is an error where its output ends."""

    def __init__(self, command: str) -> None:
        if os.environ.get(ALLOW_PIPES) != "1":
            raise UserError(f"'pipe:{command}' would run a program. If you trust it, set {ALLOW_PIPES}=1 first.")
        try:
            words = command if os.name == "nt" else shlex.split(command)
        except ValueError as error:
            raise UserError(f"'pipe:{command}' is no command: {error}.") from None
        if not words:
            raise UserError("'pipe:' wants a command behind it.")
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def read(self, count: int = -1, /) -> bytes:
        assert self._process.stdout is not None
        content = self._process.stdout.read(count)
        if (count < 0 or len(content) < count) and (status := self._process.wait()):
            raise OSError(f"its command ended with status {status}")
        return content

    def close(self) -> None:
        """Stop listening; whoever still writes then ends by itself, or is ended."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def fetch(url: str, *, version: str = "", sha256: str = "") -> Path:
    """A local copy of a remote shard: in the cache, written whole or not at all, fetched once.

    version: what the index beside it is told by; a shard of another version is another file
    sha256: of the shard as the index lists it, if it does
    """
    folder, _, name = without_query(url).rpartition("/")
    # A query may choose the file, and a command may be anything: then the whole of it is the file's identity.
    identity = (url if is_pipe(url) or "?" in url else folder) + version
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    plain = "shard.tar" if is_pipe(url) else re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "shard.tar"
    target = cache_root() / "shards" / digest / plain
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("wb")
    except OSError as error:
        raise UserError(
            f"{url} cannot be kept in {target.parent} ({error.strerror}): set FRUGALVIT_CACHE to a folder of yours."
        ) from None
    console.info(f"fetching {url}")
    try:
        with file, open_remote(url) as source:
            shutil.copyfileobj(source, file, 1 << 20)
        if sha256 and _digest(part) != sha256:
            raise UserError(f"{url} is not what the index beside it lists: was it packed anew, or is the index older?")
        part.replace(target)
    except FAULTS as error:
        raise UserError(f"{url} cannot be fetched: {reason_of(error)}.") from None
    finally:
        part.unlink(missing_ok=True)
    return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(where: str, most: int = 512 << 20) -> bytes | None:
    """A small file, local or not; None where there is none or it cannot be read."""
    try:
        with open_remote(where) as file:
            content = file.read(most + 1)
    except (*FAULTS, UserError):
        return None
    return content if len(content) <= most else None


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


def _open_http(where: str, position: int) -> tuple[Readable, int | None]:
    headers = {"Range": f"bytes={position}-"} if position else {}
    try:
        request = urllib.request.Request(where, headers=headers)
        answer: Any = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except (ValueError, http.client.InvalidURL) as error:
        raise UserError(f"{where} is no address: {error}.") from None
    stated = answer.headers.get("Content-Length")
    length = int(stated) if stated is not None and stated.isdigit() else None
    if position and answer.status == 206:
        return answer, None if length is None else position + length
    _pass_over(answer, position)  # a server that knows no ranges begins anew
    return answer, length


def _open_fsspec(where: str, position: int) -> tuple[Readable, int | None]:
    try:
        import fsspec

        with _drivers_faults():
            file: Any = cast(Any, fsspec.open(where, "rb")).open()
            if position:
                file.seek(position)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{where} cannot be opened: {error}. pip install 'frugalvit[streams]' and its driver."
        ) from None
    return _DrivenReader(file), getattr(file, "size", None)


class _DrivenReader:
    """A file of an fsspec driver, whose own kinds of errors are faults like any other."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self, count: int = -1, /) -> bytes:
        with _drivers_faults():
            return self.file.read(count)

    def close(self) -> None:
        with _drivers_faults():
            self.file.close()


@contextmanager
def _drivers_faults() -> Iterator[None]:
    try:
        yield
    except (*FAULTS, ImportError, ValueError):
        raise
    except Exception as error:  # every driver has its own: botocore's, aiohttp's, Google's
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _pass_over(source: Readable, count: int) -> None:
    while count:
        passed = len(source.read(min(count, 1 << 20)))
        if not passed:
            raise EOFError("the file has become shorter")
        count -= passed


def _is_refusal(error: BaseException) -> bool:
    """Whether a server has answered that it will not give the file: asking again changes nothing."""
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code not in (408, 429)
