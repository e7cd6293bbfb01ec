"""What ``embed`` writes about images: tables of paths, and figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, ImageDataset
from frugalvit.data.dataset import FileExamples
from frugalvit.probing.extractor import FeatureSet
from frugalvit.utils import console

T = TypeVar("T")


def path_from_table(table: Path, name: str) -> str:
    """Return a file's path relative to the table's folder, or absolute if it is not inside.

    So table and images can move together. Links are not resolved: ``..`` behind a link would change its meaning.
    """
    folder, file = table.parent.absolute(), Path(name).absolute()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file)


def distinct_files(names: Sequence[str], excluded: Sequence[str] = ()) -> set[int]:
    """Return the position of each file's first occurrence, without the excluded files."""
    first: dict[Path, int] = {}
    for position, name in enumerate(names):
        first.setdefault(Path(name).resolve(), position)
    return {first[file] for file in first.keys() - {Path(name).resolve() for name in excluded}}


def are_files(examples: ImageDataset) -> bool:
    """True if every image is a file, which a table can name."""
    return all(isinstance(leaf, FileExamples) for leaf in examples.leaves())


def drop_held_out(parts: dict[str, T]) -> dict[str, T]:
    """Leave val and test out: labelled images are trained on, and would make scores optimistic."""
    held_out = [split for split in ("val", "test") if split in parts]
    if not held_out or len(held_out) == len(parts):
        return parts
    console.info(f"--select ignores {' and '.join(held_out)}, because labelled images are trained on; see --split all")
    return {split: examples for split, examples in parts.items() if split not in held_out}


def facts(config: EmbedConfig, source: DatasetSplits, features: FeatureSet) -> dict[str, Any]:
    """Return the facts in the JSON of every kind of embed."""
    return {
        "model": config.model,
        "data": source.name,
        "features": config.features,
        "images": len(features),
        "bad": len(features.bad),
    }


def draw(picture: Path, features: FeatureSet, examples: ImageDataset, groups: list[list[tuple[int, str]]]) -> None:
    """Draw groups of images, each as its row of the features and the first line of its caption."""
    from frugalvit.embedding.contact_sheet import COLUMNS, make_thumbnail, sheet_figure
    from frugalvit.utils.plotting import save

    sheet = [
        [make_thumbnail(examples, features.positions[row], text) for row, text in group[:COLUMNS]] for group in groups
    ]
    save(sheet_figure(sheet), picture)
