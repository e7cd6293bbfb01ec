"""Small datasets on disk."""

from pathlib import Path

from PIL import Image


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


def sizes(source) -> dict[str, int]:
    return {split: len(examples) for split, examples in source.splits.items()}
