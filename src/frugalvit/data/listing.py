"""Finding image files under a folder: fast, in a fixed order, through symbolic links without going round in circles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frugalvit.data.signatures import EXTENSIONS, is_image
from frugalvit.errors import UserError
from frugalvit.words import some

# What file managers and archivers leave behind.
_LITTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"})


@dataclass
class Folder:
    """The entries of one folder, sorted by name; full paths."""

    folders: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass
class Listing:
    """All images at and below a folder. ``direct`` of them lie in the folder itself, or in its folder ``images``."""

    images: list[str] = field(default_factory=list)
    direct: int = 0
    others: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def list_folder(path: str) -> Folder:
    """What lies directly in a folder; hidden files and litter left out. Raises OSError when it cannot be read."""
    found = Folder()
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _LITTER:
                continue
            if entry.is_dir():
                found.folders.append(entry.path)
            elif _names_image(entry):
                found.images.append(entry.path)
            else:
                found.others.append(entry.path)
    found.folders.sort()
    found.images.sort()
    found.others.sort()
    return found


def list_images(path: str, above: frozenset[tuple[int, int]] = frozenset()) -> Listing:
    """All images below ``path``. A folder that links lead to twice, or to one in ``above``, is listed once."""
    listing, seen, waiting = Listing(), set(above), [path]
    while waiting:
        here = waiting.pop()
        try:
            identity = identity_of(here)
            if identity in seen:
                continue
            seen.add(identity)
            found = list_folder(here)
        except OSError:
            listing.unreadable.append(here)
            continue
        if here == path or here == f"{path}{os.sep}images":  # Tiny ImageNet puts another folder between
            listing.direct += len(found.images)
        listing.images += found.images
        listing.others += found.others
        waiting += reversed(found.folders)
    listing.images.sort()
    return listing


def identity_of(folder: str) -> tuple[int, int]:
    """The same for every path that leads to a folder."""
    facts = Path(folder).stat()
    return facts.st_dev, facts.st_ino


def open_root(path: str) -> Folder:
    """``list_folder`` for the folder that the user named: what is wrong with it is said."""
    try:
        return list_folder(path)
    except PermissionError:
        raise UserError(f"No permission to read {path}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


def may_not_read(where: str, unreadable: Sequence[str]) -> UserError:
    """The error for a folder without images whose folders could not all be looked into."""
    if list(unreadable) == [where]:
        return UserError(f"No permission to read {where}.")
    return UserError(f"{where} holds no images that can be read: no permission to read {some(unreadable)}.")


def base(path: str) -> str:
    """The last part of a path."""
    return Path(path).name


def _names_image(entry: os.DirEntry[str]) -> bool:
    stem, dot, extension = entry.name.rpartition(".")
    if dot and stem:
        # A dead link with an image's name is kept: reading it says that it is missing.
        return f".{extension.lower()}" in EXTENSIONS and (entry.is_file() or entry.is_symlink())
    if not entry.is_file():
        return False
    try:
        with Path(entry.path).open("rb") as file:
            return is_image(file.read(16))
    except OSError:
        return False
