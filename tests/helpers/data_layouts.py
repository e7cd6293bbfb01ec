"""Small datasets on disk."""

from pathlib import Path

import pytest
from PIL import Image

from frugalvit.data.formats import folder as listing


def picture(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (shade % 256, 0, 0)).save(path)
    return path


def fill(root: Path, counts: dict[str, int]) -> Path:
    """Write images: ``{"train/cat": 3}`` puts three into that folder."""
    for number, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(root / folder / f"{i:03d}.png", 16 * number + i)
    return root


def lock(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make folders of this name unreadable, also for root."""
    list_folder = listing.list_folder

    def refuse(path: str) -> listing.Folder:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", path)
        return list_folder(path)

    monkeypatch.setattr(listing, "list_folder", refuse)


def sizes(source) -> dict[str, int]:
    return {split: len(examples) for split, examples in source.splits.items()}
