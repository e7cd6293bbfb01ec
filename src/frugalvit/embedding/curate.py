"""``frugalvit embed --select`` and ``--duplicates``: write tables and figures of the selected images."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from frugalvit.backbones.weights.published import is_published
from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, ImageDataset, join, open_data
from frugalvit.data.dataset import FileExamples, JoinedExamples
from frugalvit.embedding.selection import group_duplicates, representatives
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils import console
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

_MAX_DRAWN = 200  # images in a figure
_DRAWN_GROUPS, _LISTED_GROUPS = 40, 10
T = TypeVar("T")


def select(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """Choose the images that represent the others best, in addition to the known ones, to be labelled."""
    began, count = time.monotonic(), config.select
    assert count is not None
    if not are_files(examples):
        raise UserError(f"--select writes a table of files, but the images of {source.location} are not files.")
    # Of a table with some labels only the labelled rows are known; without any label, every image is.
    labelled = None if config.known is None else open_data(config.known, split="given")
    known = None if labelled is None else join(*labelled.splits.values())
    candidates = distinct_files(examples.names, [] if known is None else known.names)
    if count > len(candidates):
        others = f" besides those of {config.known}" if config.known else ""
        raise UserError(f"--select {count}: there are only {pluralize(len(candidates), 'image')}{others}.")
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    features = extractor(examples, source.name)
    known_features = None if known is None else extractor(known, "known images").features
    rows = [row for row, position in enumerate(features.positions) if position in candidates]
    device = probe_device(model)
    chosen = representatives(features.features[rows], count, known_features, device=device, seed=config.seed)
    rows = [rows[index] for index in chosen]
    names = [features.names[row] for row in rows]
    write_text(out, as_csv(["path", "label"], [[path_from_table(out, name), ""] for name in names]))
    _draw(picture, features, examples, [[(row, str(rank))] for rank, row in enumerate(rows[:_MAX_DRAWN], 1)])
    data = facts(config, source, features)
    data |= {"known": 0 if known_features is None else len(known_features), "chosen": names}
    data |= {"out": str(out), "picture": str(picture), "seconds": round(time.monotonic() - began, 2)}
    cells: list[object] = [len(features), data["known"], count, str(out), str(picture)]
    named = not Path(config.model).exists() and not is_published(config.model)
    weights = ["--backbone" if named else "--init", config.model, *(["--pretrained"] if config.pretrained else [])]
    weights += ["--backbone", config.backbone] if config.backbone else []
    command = " ".join(map(shell_quote, ["frugalvit", "train", out, *weights]))
    next_step = f"next: fill in the column 'label' of {out}, then "
    if labelled is None:
        next_step += command
    else:
        next_step += f"copy its rows or its labels into {labelled.location}, and train or probe again"
    table = Table(["images", "known", "chosen", "table", "picture"], [cells])
    return CommandResult(data, [table], [*source.notes, next_step])


def duplicates(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """Group images whose features are nearly the same."""
    began = time.monotonic()
    assert config.duplicates is not None
    model = open_model(config.model, config)
    features = make_extractor(model, config, config.features, config.blocks)(examples, source.name)
    files = are_files(examples)
    candidates = distinct_files(examples.names) if files else range(len(examples))
    rows = torch.tensor([row for row, position in enumerate(features.positions) if position in candidates])
    first = rows[group_duplicates(features.features[rows], config.duplicates, device=probe_device(model))]
    cosines = F.cosine_similarity(features.features[rows], features.features[first], dim=1).clamp(max=1)
    by_leader: dict[int, list[tuple[int, float]]] = {}
    for row, leader, cosine in zip(rows.tolist(), first.tolist(), cosines.tolist(), strict=True):
        by_leader.setdefault(leader, []).append((row, round(cosine, 6)))
    groups = [group for group in by_leader.values() if len(group) > 1]
    names = [path_from_table(out, name) if files else name for name in features.names]
    lines = [[number, names[row], cosine] for number, group in enumerate(groups, 1) for row, cosine in group]
    write_text(out, as_csv(["group", "path", "similarity"], lines))
    listed = [[{"image": features.names[row], "similarity": cosine} for row, cosine in group] for group in groups]
    data = facts(config, source, features) | {"threshold": config.duplicates, "groups": listed, "out": str(out)}
    similar = f"with a cosine of {config.duplicates:g} or more"
    notes = [*source.notes, f"No two of the {len(rows):,} images are in one group {similar}."]
    if groups:
        _draw(
            picture,
            features,
            examples,
            [
                [(row, f"{cosine:.3f}" if index else f"group {number}") for index, (row, cosine) in enumerate(group)]
                for number, group in enumerate(groups[:_DRAWN_GROUPS], 1)
            ],
        )
        data["picture"] = str(picture)
        inside = sum(map(len, groups))
        notes[-1] = (
            f"{pluralize(len(groups), 'group')} of {inside:,} images {similar}, directly or through others; "
            f"with one of each, {len(rows) - inside + len(groups):,} of {len(rows):,} images remain."
        )
        notes.append(f"table {out}, figure {picture}")
    data["seconds"] = round(time.monotonic() - began, 2)
    cells: list[list[object]] = [
        [number, len(group), features.names[group[0][0]], features.names[group[1][0]], group[1][1]]
        for number, group in enumerate(groups[:_LISTED_GROUPS], 1)
    ]
    return CommandResult(data, [Table(["group", "images", "first", "second", "cosine"], cells)] if cells else [], notes)


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
    if isinstance(examples, JoinedExamples):
        return all(are_files(part) for part in examples.parts)
    return isinstance(examples, FileExamples)


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


def _draw(picture: Path, features: FeatureSet, examples: ImageDataset, groups: list[list[tuple[int, str]]]) -> None:
    """Draw groups of images, each as its row of the features and the first line of its caption."""
    from frugalvit.embedding.contact_sheet import COLUMNS, make_thumbnail, sheet_figure
    from frugalvit.utils.plotting import save

    sheet = [
        [make_thumbnail(examples, features.positions[row], text) for row, text in group[:COLUMNS]] for group in groups
    ]
    save(sheet_figure(sheet), picture)
