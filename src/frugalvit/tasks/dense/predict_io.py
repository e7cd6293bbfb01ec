"""What ``eval`` and ``predict`` need besides a model: one device, a folder to write to, names for what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from lightning_fabric import Fabric

from frugalvit.engine.hardware import numbered_device
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import make_folder


def single_device_fabric(device: str) -> Fabric:
    """One process on one device, in full precision."""
    kind, number = numbered_device(device)
    return Fabric(accelerator=kind, devices=[number] if kind == "cuda" else 1, precision="32-true")


def out_folder(out: str | None) -> Path | None:
    """The folder for what is written, if any is; to be asked for before the work, since it may be refused."""
    return None if out is None else make_folder(check_empty_folder(Path(out)))


@contextmanager
def save_on_interrupt(folder: Path, done: Sized, count: int, save: Callable[[], None] | None = None) -> Iterator[None]:
    """Work that ends before its end, whatever ends it: what is done is saved and said, and how to go on."""
    try:
        yield
    except BaseException:
        if len(done):
            if save is not None:
                save()
            console.warning(f"{len(done)} of {count} images are done, in {folder}; name the others and another --out")
        raise


def unique_names(paths: list[Path]) -> list[str]:
    """A name for every file: its own, numbered where two are called the same."""
    taken = {path.stem for path in paths}
    names: list[str] = []
    used: set[str] = set()
    for path in paths:
        name, number = path.stem, 1
        while name in used or (number > 1 and name in taken):
            number += 1
            name = f"{path.stem}_{number}"
        used.add(name)
        names.append(name)
    return names


def check_empty_folder(out: Path) -> Path:
    """The folder, if nothing lies in it yet: earlier results, or the images themselves, are never written over."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists and is kept; choose another folder with --out.")
    return out
