"""Atomic writes, folder locks, and folders that appear only when they are complete."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import pydantic

from frugalvit.errors import UserError

Read = TypeVar("Read", dict[str, Any], list[Any])
PICTURES = (".png", ".svg", ".pdf")
_PART = ".*.part"
_MAX_BYTES = 2**31  # of a table, a list or a JSON file


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a user's file to read it. A pipe or a device is an ``OSError``: it may never end, or never begin."""
    at_once = getattr(os, "O_NONBLOCK", 0)  # do not wait for the writer of a pipe
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_bytes(path: str | Path, limit: int = _MAX_BYTES) -> bytes:
    """Read a user's file. ``OSError`` for a pipe, a device, or more than ``limit`` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit / 2**30:.2g} GiB")
        return file.read(limit)


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read a user's text file, as ``read_bytes``. Every line ends with ``\\n``."""
    return read_bytes(path).decode(encoding, errors).replace("\r\n", "\n").replace("\r", "\n")


def read_user_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read a user's text file, as ``read_text``; ``UserError`` if that fails."""
    try:
        return read_text(path, encoding, errors)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(read_error_message(path, error)) from None


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, keep: Path | None = None) -> None:
    """Let ``write`` fill a temporary file, flush it to the disk, then rename it to ``path``.

    A kill leaves either the old file or the new one, never a part of one.
    keep: the name that the old file gets; after a kill, ``path`` may be missing and ``keep`` is the newest
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w+b") as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def remove_parts(folder: Path) -> None:
    """Remove the half-written files of a killed process. Call it only while you hold the folder's lock."""
    for part in folder.rglob(_PART):
        part.unlink(missing_ok=True)


def is_part(path: Path) -> bool:
    """True for a half-written file of a killed process."""
    return path.match(_PART)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8 (see ``utf8_safe``)."""
    write_atomically(path, lambda handle: handle.write(utf8_safe(text).encode("utf-8")))


def utf8_safe(text: str) -> str:
    """Escape what UTF-8 cannot encode: an undecodable byte of a file name becomes ``\\udce9``.

    Different names stay different, and JSON reads the escape as the same character.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_json(path: Path, kind: type[Read]) -> Read | None:
    """Read a JSON object or list; None if the file does not exist, ``UserError`` if it is damaged."""
    if not path.exists():
        return None
    try:
        value = json.loads(read_text(path))
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}): fix or remove it.") from None
    if not isinstance(value, kind):
        raise UserError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}: fix or remove it.")
    return value


def check_stored(kind: Any, value: Any, path: Path) -> Any:
    """Return a value of a stored file as ``kind``; ``UserError`` with the field if it does not fit."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name, wrong = ".".join(map(str, first["loc"])), f"{first['input']!r:.40}"
        raise UserError(f"{path} is damaged: {name} is {wrong} ({first['msg']}). Restore the file.") from None


def expand_home(path: str | Path) -> Path:
    """Return a path with its ``~`` expanded. ``UserError`` if there is no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        if Path(path).parts[:1] == ("~",):
            raise UserError(f"{path}: no home folder. Set HOME, or FRUGALVIT_CACHE for the cache.") from None
        return Path(path)  # "~name" of an unknown user: an ordinary folder name


def read_error_message(path: str | Path, error: Exception) -> str:
    """Return the message for a file that the system refuses to read."""
    if isinstance(error, UnicodeDecodeError):
        return f"{path} is not UTF-8 text. Save it as UTF-8 (in a spreadsheet: 'CSV UTF-8')."
    hint = " Check the permissions." if isinstance(error, PermissionError) else ""
    return f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).{hint}"


def make_folder(path: Path, hint: str = "Choose another folder with --out.") -> Path:
    """Create a folder if needed and check that it is writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable.{os.getpid()}.part"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have removed it as a leftover
    except OSError as error:
        raise UserError(f"Cannot write to {path} ({error.strerror}). {hint}") from None
    return path


def check_new_file(path: Path, endings: Sequence[str], option: str = "--out") -> None:
    """Raise an error, before the work, if a file cannot be written to a path, or would replace one."""
    if path.suffix.lower() not in endings:
        raise UserError(f"{option} {path} must end with {' or '.join(endings)}.")
    if path.exists():
        raise UserError(f"{path} already exists: choose another name with {option}.")
    make_folder(path.parent)


class CannotLock(UserError):
    """The lock file itself is not writable."""


class FolderLock:
    """Allow one process at a time in a folder. The system frees the lock when the process ends.

    hint: what to do if the lock file is not writable
    wait: wait for another process instead of failing; ``CannotLock`` if the file system has no locks
    """

    def __init__(self, folder: Path, hint: str = "Choose another --out.", *, wait: bool = False) -> None:
        from filelock import FileLock

        self.path, self.hint = folder / ".lock", hint
        self._lock = FileLock(self.path, timeout=-1 if wait else 0, thread_local=False)

    def __enter__(self) -> Self:
        try:
            self._lock.acquire()
        except TimeoutError:
            raise UserError(
                f"Another process works in {self.path.parent}. Wait for it, or choose another --out."
            ) from None
        except (OSError, NotImplementedError) as error:  # not writable, or a file system without locks
            raise CannotLock(
                f"Cannot lock {self.path} ({getattr(error, 'strerror', None) or error}). {self.hint}"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; the caller moves its content there, the rest is removed.

    A lock keeps other processes out. What a killed process left is removed by the next one.
    """
    locked = target.with_name(f".{target.name}.partial")
    locked.mkdir(parents=True, exist_ok=True)
    with FolderLock(locked):
        folder = locked / "new"  # the lock file is not moved with it
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(locked, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    """Flush a rename to the disk, against power loss; Windows cannot."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
