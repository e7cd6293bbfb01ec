"""Files that survive a kill: atomic writes, locks that vanish with their process, folders that appear when whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from frugalvit.errors import UserError

Read = TypeVar("Read", dict[str, Any], list[Any])
_PART = ".*.part"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, keep: Path | None = None) -> None:
    """Let ``write`` fill a temporary neighbour, flush it to the disk, then rename it over ``path``.

    A kill at any moment leaves either the old file or the new one, never a part of one. With ``keep`` the old file
    stays under that name, from the moment the new one is whole.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        if keep is not None and path.exists():
            _second_name(path, keep)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def remove_parts(folder: Path) -> None:
    """Remove what a killed process left half written below. Only for the one who holds the folder's lock."""
    for part in folder.rglob(_PART):
        part.unlink(missing_ok=True)


def is_part(path: Path) -> bool:
    """Whether a file is what a killed process left half written: nobody's own, and never read."""
    return path.match(_PART)


def _second_name(path: Path, name: Path) -> None:
    """Let ``name`` mean what ``path`` does, atomically: a second name where the file system has links, else a copy."""
    temporary = name.with_name(f".{name.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except (OSError, NotImplementedError):  # FAT, some network file systems
            shutil.copyfile(path, temporary)
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
        temporary.replace(name)
    finally:
        # Renaming one name of a file over another of the same file does nothing (POSIX), so the part is still there
        # when ``name`` already meant ``path``: after a kill between this and the next rename.
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """``write_atomically`` for a whole text file, in UTF-8; what that cannot hold is written as in ``storable``."""
    write_atomically(path, lambda handle: handle.write(utf8_safe(text).encode("utf-8")))


def utf8_safe(text: str) -> str:
    """The text in letters that UTF-8 has: a byte of a file's name that means no letter stands there as ``\\udce9``.

    Different names stay different, and JSON reads this as the very character it stands for.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_json(path: Path, kind: type[Read]) -> Read | None:
    """What a JSON file holds, an object or a list; None where there is none, and a clear line where it is damaged."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}): mend or remove it.") from None
    if not isinstance(value, kind):
        raise UserError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}: mend or remove it.")
    return value


def read_error_message(path: str | Path, error: OSError) -> str:
    """The line for a file that the system does not hand out, whatever may be in it."""
    if isinstance(error, PermissionError):
        return f"{path} may not be read ({error.strerror}): give yourself the right to, or ask whose it is."
    return f"{path} cannot be read ({error.strerror or error})."


def make_folder(path: Path, way: str = "Choose another folder with --out.") -> Path:
    """The folder, made if it was not there; no permission is a mistake said in one line, with the ``way`` on."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable.{os.getpid()}.part"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process that found a part may have removed it
    except OSError as error:
        raise UserError(f"Cannot write to {path} ({error.strerror}). {way}") from None
    return path


class CannotLock(UserError):
    """The lock itself may not be written: it is another person's, or the disk takes no files."""


class FolderLock:
    """One process at a time in a folder. The operating system frees the lock when the process ends, however it ends.

    way: what to do where the lock cannot be written
    wait: wait for another process instead of failing; ``CannotLock`` if the file system has no locks
    """

    def __init__(self, folder: Path, way: str = "Choose another --out.", *, wait: bool = False) -> None:
        self.path, self.way, self.wait = folder / ".lock", way, wait
        self._handle: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._handle = self.path.open("a+")
        except OSError as error:
            raise CannotLock(
                f"{self.path} cannot be written ({error.strerror}): is it another person's? {self.way}"
            ) from None
        try:
            _lock(self._handle, self.wait)
        except OSError as error:
            self._handle.close()
            if self.wait:
                raise CannotLock(f"Cannot lock {self.path} ({error.strerror}). {self.way}") from None
            raise UserError(
                f"Another process is working in {self.path.parent}. Wait for it, or choose another --out."
            ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None


_PARTIAL = ".partial"


@contextmanager
def working_folder(place: Path, *, inside: bool) -> Iterator[Path]:
    """An empty folder to write what becomes ``place`` in, which is to be moved there; what is not moved vanishes.

    It lies beside ``place``, or inside, where that is there and stays what it is; within a folder that is locked as
    long as its process lives, so that ``remove_leftovers`` knows what a killed one has left.
    """
    parent = place if inside else place.parent
    parent.mkdir(parents=True, exist_ok=True)
    held = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=_PARTIAL, dir=parent))
    try:
        with ExitStack() as alive:
            with suppress(UserError):  # a file system without locks: nobody else knows this folder's name anyway
                alive.enter_context(FolderLock(held))
            folder = held / "new"  # the lock stays behind when it is moved
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(held, ignore_errors=True)


def remove_leftovers(place: Path) -> None:
    """Remove what killed processes have left of their ``working_folder`` for this very place.

    Where locks do not work nothing is removed: it might be somebody's who is still at work.
    """
    ours = re.compile(rf"\.{re.escape(place.name)}\.[a-z0-9_]{{8}}{re.escape(_PARTIAL)}")  # as tempfile makes names
    for parent in (place, place.parent):
        try:
            left = [path for path in parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink()]
        except OSError:  # not there yet, or not to be looked into
            continue
        for folder in left:
            if (folder / ".lock").is_file() and not _is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    """Whether a process works there, or it is another person's."""
    try:
        with FolderLock(folder):
            return False
    except UserError:
        return True


def _lock(handle: IO[str], wait: bool) -> None:
    """Lock a file. ``OSError`` if it is locked, or (waiting) if there are no locks; Windows waits ten seconds."""
    if os.name == "nt":
        import msvcrt

        mode = msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK  # type: ignore[attr-defined]
        msvcrt.locking(handle.fileno(), mode, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _flush_folder(folder: Path) -> None:
    """A rename is only safe against power loss once its folder is on the disk too (not possible on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
