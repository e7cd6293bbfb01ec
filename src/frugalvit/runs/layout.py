"""The names under which runs and comparisons write: what somebody else has put there is kept."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path

from frugalvit.config.run import AT_START
from frugalvit.errors import UserError
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import FolderLock, is_part, read_json

REQUEST_FILE = "asked.json"
"""What a run of a comparison was asked to be."""

BEFORE_STEPS = (*AT_START, "trackers.json")

RUN_FILES = (
    *BEFORE_STEPS,
    *("checkpoints", "metrics.jsonl", "tensorboard", "fault", "model", "summary.json", "report.html", "lens.json"),
    *("augmentations.jpg", "mistakes.json", "mistakes.jpg"),
)

TRANSFER_FILES = (*RUN_FILES, "transfer.safetensors", "transfer.json", "transfer_report.json", "pictures")
"""What detectors and segmenters write."""

OF_COMPARISON = (
    *(f"comparison.{kind}" for kind in ("md", "csv", "tex", "png", "json")),
    *("report.html", "tensorboard", "trackers.json"),
)


def check_free_for_run(folder: Path, names: Iterable[str] = RUN_FILES) -> None:
    """Refuse a folder without a run where somebody's own file would be written over; other files may lie there.

    A run that ended before its first step goes for nothing: what it left may be written over.
    """
    left = (folder / ".lock").exists() or all((folder / name).exists() for name in AT_START)
    _refuse(folder, [name for name in names if not (left and name in BEFORE_STEPS)])


def check_free_for_comparison(folder: Path) -> None:
    """Refuse a folder without a comparison, begun or finished, where somebody's own file would be written over."""
    begun = any(folder.glob(f"*/seed_*/{REQUEST_FILE}"))
    ours = begun or "settings" in (read_json(folder / "comparison.json", dict) or {})
    _refuse(folder, () if ours else OF_COMPARISON)


def _refuse(folder: Path, names: Iterable[str]) -> None:
    taken = [name for name in names if _is_taken(folder / name)]
    if taken:
        shown = ", ".join(taken[:3]) + (" …" if len(taken) > 3 else "")
        raise UserError(f"{folder} has {shown} already, which would be written over: choose another --out.")


def _is_taken(path: Path) -> bool:
    """Whether something lies under a name; in an empty folder, or among the parts of killed runs, nothing is lost."""
    return not all(map(is_part, path.iterdir())) if path.is_dir() else path.exists() or path.is_symlink()


EMPTY_RUN_FILES = {*AT_START, REQUEST_FILE, ".lock", "checkpoints"}


def missing_parents(folder: Path) -> list[Path]:
    """The folder and those it lies in, as far as they are not there yet, from the inside out."""
    return list(itertools.takewhile(lambda place: not place.exists(), (folder, *folder.parents)))


def remove_empty_run(made: list[Path], error: UserError) -> None:
    """Remove the folders that were made for a run, if nothing but what precedes its first step is there.

    Nobody else may be working in it: two processes that are asked for the same run both find that it is not there yet.

    made:  as ``missing`` gave them
    error: what has ended the run; where it says to resume it, as after a disk that was full, the folder stays
    """
    if not made or not made[0].is_dir() or f"--resume {shell_quote(made[0])}" in str(error):
        return
    folder, *above = made
    try:
        with FolderLock(folder):
            if {entry.name for entry in folder.iterdir()} - EMPTY_RUN_FILES or any((folder / "checkpoints").glob("*")):
                return
            for name in {*EMPTY_RUN_FILES} - {".lock"}:
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
