"""What a command that fails before its run's first step leaves behind: nothing, where nothing was before."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path

from frugalvit.config.run import AT_START
from frugalvit.console import shown
from frugalvit.errors import UserError
from frugalvit.files import FolderLock
from frugalvit.training.written import ASKED

_UNBEGUN = {*AT_START, ASKED, ".lock", "checkpoints"}


def missing(folder: Path) -> list[Path]:
    """The folder and those it lies in, as far as they are not there yet, from the inside out."""
    return list(itertools.takewhile(lambda place: not place.exists(), (folder, *folder.parents)))


def remove_unbegun(made: list[Path], error: UserError) -> None:
    """Remove the folders that were made for a run, if nothing but what precedes its first step is there.

    Nobody else may be working in it: two processes that are asked for the same run both find that it is not there yet.

    made:  as ``missing`` gave them
    error: what has ended the run; where it says to resume it, as after a disk that was full, the folder stays
    """
    if not made or not made[0].is_dir() or f"--resume {shown(made[0])}" in str(error):
        return
    folder, *above = made
    try:
        with FolderLock(folder):
            if {entry.name for entry in folder.iterdir()} - _UNBEGUN or any((folder / "checkpoints").glob("*")):
                return
            for name in {*_UNBEGUN} - {".lock"}:
                path = folder / name
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
    except UserError:
        return  # somebody else's
    with contextlib.suppress(OSError):  # closed by now: Windows removes no file that is open
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()
    for place in above:
        with contextlib.suppress(OSError):  # something else lies there by now
            place.rmdir()
