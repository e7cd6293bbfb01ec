"""Checkpoints of a run: save atomically, verify, load. Nothing in a file is executed."""

import zipfile
from pathlib import Path
from typing import Any

import torch

from frugalvit.errors import UserError
from frugalvit.runs.layout import BEST, CHECKPOINTS, LAST, PREVIOUS
from frugalvit.utils import console
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import open_regular, write_atomically
from frugalvit.utils.text import short_message


def save_state(folder: Path, state: dict[str, Any], name: str = LAST) -> None:
    """Write ``last.pt`` (and move the one before to ``previous.pt``), or another checkpoint, atomically."""
    target = folder / CHECKPOINTS / name
    previous = folder / CHECKPOINTS / PREVIOUS if name == LAST else None
    write_atomically(target, lambda handle: torch.save(state, handle), keep=previous)


def load_newest_state(folder: Path, *, set_aside: bool) -> dict[str, Any] | None:
    """Load ``last.pt``, or ``previous.pt`` if that is damaged; None if a run has no checkpoint.

    set_aside: rename a damaged file, so that the next save does not move it over the good one
    """
    damaged: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / CHECKPOINTS / name
        if not path.exists():
            continue
        state, fault = read_state(path)
        if state is not None:
            if damaged:
                console.warning(f"going back to {path}, step {state['step']}")
            return state
        damaged.append(name)
        console.warning(f"{path} is damaged ({fault})")
        if set_aside:
            path.replace(path.with_suffix(".damaged"))
    if damaged:
        best = shell_quote(folder / CHECKPOINTS / BEST)
        raise UserError(
            f"No checkpoint of {folder} is intact (damaged: {' and '.join(damaged)}). Start a new run, with --init "
            f"{best} if that file exists."
        )
    return None


def load_or_warn(path: Path, consequence: str) -> dict[str, Any] | None:
    """Load a checkpoint; None with a warning if it is damaged."""
    state, fault = read_state(path)
    if state is None:
        console.warning(f"{path} is damaged ({fault}); {consequence}")
    return state


def read_state(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the state in a checkpoint file, or None and what is wrong with it."""
    fault = find_damage(path)
    if fault is not None:
        return None, fault
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any byte may be damaged, so any error may come
        return None, short_message(error)
    complete = isinstance(state, dict) and "step" in state and "task" in state
    return (state, "") if complete else (None, "it does not hold the state of a run")


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint file, or None. Torch's format is a zip with checksums."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                return "it is compressed, so torch.save did not write it"  # it could unpack to any size
            bad = archive.testzip()
    except Exception as error:  # zipfile raises many kinds, depending on the damaged byte
        return short_message(error)
    return f"checksum of {bad} does not match" if bad else None
