"""Device, output folder and output names of ``eval`` and ``predict``."""

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from lightning_fabric import Fabric

from frugalvit.engine.hardware import numbered_device
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import make_folder


def single_device_fabric(device: str) -> Fabric:
    """Return a Fabric of one process on one device, in full precision."""
    kind, number = numbered_device(device)
    return Fabric(accelerator=kind, devices=[number] if kind == "cuda" else 1, precision="32-true")


def out_folder(out: str | None) -> Path | None:
    """Make the output folder, or return None without one. Call it before the work, since it may raise UserError."""
    return None if out is None else make_folder(check_empty_folder(Path(out)))


@contextmanager
def save_on_interrupt(folder: Path, done: Sized, count: int, save: Callable[[], None] | None = None) -> Iterator[None]:
    """On any exception save the partial results and log how to continue."""
    try:
        yield
    except BaseException:
        if len(done):
            if save is not None:
                save()
            console.warning(f"{len(done)} of {count} images are done, in {folder}. Run the others with another --out.")
        raise


def unique_names(paths: list[Path]) -> list[str]:
    """Return a unique name for every file: its stem, with a number if another file has the same."""
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
    """Return the folder if it is empty: earlier results, or the images themselves, are never overwritten."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists and is not empty. Choose another folder with --out.")
    return out
