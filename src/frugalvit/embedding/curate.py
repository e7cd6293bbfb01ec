"""``frugalvit embed --select`` and ``--duplicates``: write tables and figures of the selected images."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, ImageDataset, join, open_data
from frugalvit.data.dataset import FileExamples, JoinedExamples
from frugalvit.data.paths import is_inside
from frugalvit.embedding.selection import cosines_with, group_duplicates, representatives
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

_MAX_DRAWN = 200  # images in a figure
_DRAWN_GROUPS, _LISTED_GROUPS = 40, 10


def select(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """Choose the images that represent the others best, in addition to the known ones, to be labelled."""
    began, count = time.monotonic(), config.select
    assert count is not None
    if not _are_files(examples):
        raise UserError(f"--select writes a table of files, but the images of {source.location} are not files.")
    labelled = None if config.known is None else open_data(config.known, split="given", labels="ignore")
    known = None if labelled is None else join(*labelled.splits.values())
    candidates = _candidates(examples, [] if known is None else known.names)
    _check_enough(count, len(candidates), config)
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    features = extractor(examples, source.name)
    known_features = None if known is None or labelled is None else extractor(known, labelled.name).features
    rows = [row for row, position in enumerate(features.positions) if position in candidates]
    _check_enough(count, len(rows), config)  # some may be unreadable
    device = probe_device(model)
    chosen = representatives(features.features[rows], count, known_features, device=device, seed=config.seed)
    rows = [rows[index] for index in chosen]
    names = [features.names[row] for row in rows]
    write_text(out, as_csv(["path", "label"], [[path_from_table(out, name), ""] for name in names]))
    _draw_selection(picture, features, examples, rows)
    data = _facts(config, source, features)
    data |= {"known": 0 if known_features is None else len(known_features), "chosen": names}
    data |= {"out": str(out), "picture": str(picture), "seconds": round(time.monotonic() - began, 2)}
    table = Table(["images", "known", "chosen", "table", "picture"],
                  [[len(features), data["known"], count, str(out), str(picture)]])  # fmt: skip
    return CommandResult(data, [table], [*source.notes, *_next_command(config, out)])


def duplicates(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """Group images whose features are nearly the same."""
    began = time.monotonic()
    assert config.duplicates is not None
    model = open_model(config.model, config)
    features = make_extractor(model, config, config.features, config.blocks)(examples, source.name)
    candidates = _candidates(examples)
    rows = torch.tensor([row for row, position in enumerate(features.positions) if position in candidates])
    first = rows[group_duplicates(features.features[rows], config.duplicates, device=probe_device(model))]
    similarity = cosines_with(features.features[rows], features.features[first]).tolist()
    groups: dict[int, list[tuple[int, float]]] = {}
    for row, leader, cosine in zip(rows.tolist(), first.tolist(), similarity, strict=True):
        groups.setdefault(leader, []).append((row, round(cosine, 6)))
    several = [group for group in groups.values() if len(group) > 1]
    lines = [[number, features.names[row], cosine] for number, group in enumerate(several, 1) for row, cosine in group]
    files = _are_files(examples)
    written = [[number, path_from_table(out, name) if files else name, cosine] for number, name, cosine in lines]
    write_text(out, as_csv(["group", "path", "similarity"], written))
    listed = [[{"image": features.names[row], "similarity": cosine} for row, cosine in group] for group in several]
    data = _facts(config, source, features) | {"threshold": config.duplicates, "groups": listed, "out": str(out)}
    notes = [*source.notes, *_describe_groups(several, len(rows), config.duplicates)]
    if several:
        _draw_groups(picture, features, examples, several)
        data["picture"] = str(picture)
        notes.append(f"table {out}, figure {picture}")
    data["seconds"] = round(time.monotonic() - began, 2)
    cells: list[list[object]] = [
        [number, len(group), features.names[group[0][0]], features.names[group[1][0]], group[1][1]]
        for number, group in enumerate(several[:_LISTED_GROUPS], 1)
    ]
    return CommandResult(data, [Table(["group", "images", "first", "second", "cosine"], cells)] if cells else [], notes)


def path_from_table(table: Path, name: str) -> str:
    """Return a file's path relative to the table's folder if it is below, so that both can move; else absolute.

    Nothing is resolved: ``..`` behind a link would change its meaning.
    """
    folder, file = table.parent.absolute(), Path(name).absolute()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file)


def check_outside_data(picture: Path, data: str) -> None:
    """Refuse a figure inside the dataset: it would be read as an image next time."""
    if is_inside(picture, data):
        raise UserError(f"{picture} is inside {data} and would be read as one of its images: choose another --picture.")


def _candidates(examples: ImageDataset, known: Iterable[str] = ()) -> set[int]:
    """Return the positions of the images to choose from: each file once, without the known ones."""
    if not _are_files(examples):  # two shards may have images of the same name
        return set(range(len(examples)))
    excluded = {Path(name).resolve() for name in known}
    first: dict[Path, int] = {}
    for position, name in enumerate(examples.names):
        first.setdefault(Path(name).resolve(), position)
    return {position for file, position in first.items() if file not in excluded}


def _check_enough(count: int, available: int, config: EmbedConfig) -> None:
    if count > available:
        others = "" if config.known is None else f" besides those of {config.known}"
        raise UserError(f"--select {count}: there are only {pluralize(available, 'image')}{others} to choose from.")


def _are_files(examples: ImageDataset) -> bool:
    """True if every image is a file, which a table can name."""
    if isinstance(examples, JoinedExamples):
        return all(_are_files(part) for part in examples.parts)
    return isinstance(examples, FileExamples)


def _facts(config: EmbedConfig, source: DatasetSplits, features: FeatureSet) -> dict[str, Any]:
    return {
        "model": config.model,
        "data": source.name,
        "features": config.features,
        "images": len(features),
        "bad": len(features.bad),
    }


def _next_command(config: EmbedConfig, out: Path) -> list[str]:
    """Return the next steps, with a command to copy."""
    table = out if config.known is None else Path(config.known)
    start = ["--init" if Path(config.model).exists() else "--backbone", shell_quote(config.model)]
    start += ["--backbone", shell_quote(config.backbone)] if config.backbone else []
    fill = f"fill in the column 'label' of {out}"
    if config.known is not None:
        fill += f", {'add its rows to' if Path(config.known).is_file() else 'sort its images into'} {config.known}"
    return [f"next        {fill}, then", f"            frugalvit train {shell_quote(table)} {' '.join(start)}"]


_SUSPICIOUS = 10  # images in one group; fewer may really be duplicates


def _describe_groups(groups: list[list[tuple[int, float]]], images: int, threshold: float) -> list[str]:
    if not groups:
        return [f"No two of the {images:,} images have a cosine of {threshold:g} or more."]
    inside, largest = sum(len(group) for group in groups), max(len(group) for group in groups)
    notes = [
        f"{pluralize(len(groups), 'group')} of {inside:,} images with a cosine of {threshold:g} or more, directly or "
        f"through others; with one of each, {images - inside + len(groups):,} of {images:,} images remain."
    ]
    if largest >= _SUSPICIOUS and 2 * largest > images:
        notes.append(f"One group has {largest:,} images: the model does not separate them; raise --duplicates.")
    return notes


def _draw_selection(picture: Path, features: FeatureSet, examples: ImageDataset, rows: list[int]) -> None:
    from frugalvit.embedding.contact_sheet import make_thumbnail, sheet_figure, short_name
    from frugalvit.utils.plotting import save

    ranked = enumerate(rows[:_MAX_DRAWN], 1)
    images = [
        make_thumbnail(examples, features.positions[row], f"{rank}\n{short_name(features.names[row])}")
        for rank, row in ranked
    ]
    save(sheet_figure([[image] for image in images]), picture)


def _draw_groups(
    picture: Path, features: FeatureSet, examples: ImageDataset, groups: list[list[tuple[int, float]]]
) -> None:
    from frugalvit.embedding.contact_sheet import COLUMNS, make_thumbnail, sheet_figure, short_name
    from frugalvit.utils.plotting import save

    sheet = []
    for number, group in enumerate(groups[:_DRAWN_GROUPS], 1):
        members = enumerate(group[:COLUMNS])
        texts = [(row, f"{cosine:.3f}" if index else f"group {number}") for index, (row, cosine) in members]
        sheet.append(
            [
                make_thumbnail(examples, features.positions[row], f"{text}\n{short_name(features.names[row])}")
                for row, text in texts
            ]
        )
    save(sheet_figure(sheet), picture)
