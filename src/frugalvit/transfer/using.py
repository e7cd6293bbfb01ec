"""What ``eval`` and ``predict`` need besides a model: one device, the images named, a folder to write to."""

from __future__ import annotations

from pathlib import Path

from lightning_fabric import Fabric

from frugalvit.data.listing import list_images
from frugalvit.errors import UserError
from frugalvit.files import make_folder
from frugalvit.training.setup import pick_device


def lone_fabric(device: str) -> Fabric:
    """One process on one device, in full precision."""
    return Fabric(accelerator=pick_device(device), devices=1, precision="32-true")


def find_images(words: list[str]) -> list[Path]:
    """Image files as named, and those in folders named."""
    paths: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            paths += [Path(name) for name in list_images(str(path)).images]
        elif path.is_file():
            paths.append(path)
        else:
            raise UserError(f"There is no image {word}.")
    if not paths:
        raise UserError(f"{words[0]} holds no images.")
    return paths


def out_folder(out: str | None) -> Path | None:
    return None if out is None else make_folder(Path(out))


def unique_names(paths: list[Path]) -> list[str]:
    """A name for every file: its own, numbered where two are called the same."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path.stem] = seen.get(path.stem, 0) + 1
        names.append(path.stem if seen[path.stem] == 1 else f"{path.stem}_{seen[path.stem]}")
    return names
