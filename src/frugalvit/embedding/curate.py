"""``frugalvit embed --select`` and ``--duplicates``: tables and pictures of what to label next and of what is alike."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, ImageDataset, join, open_data
from frugalvit.data.dataset import FileExamples, JoinedExamples
from frugalvit.data.paths import is_inside
from frugalvit.embedding.selection import cosines_with, first_alike, representatives
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

_DRAWN = 200  # images in a picture, which a person still looks through
_DRAWN_GROUPS, _LISTED_GROUPS = 40, 10


def select(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """The images that stand for the others best, beside those known already, for a person to label."""
    began, count = time.monotonic(), config.select
    assert count is not None
    if not _in_files(examples):
        raise UserError(f"{source.location}: --select makes a table of files, and these images have none of their own.")
    given = None if config.known is None else open_data(config.known, split="given", labels="ignore")
    known = None if given is None else join(*given.splits.values())
    candidates = _candidates(examples, [] if known is None else known.names)
    _check_enough(count, len(candidates), config)
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    found = extractor(examples, source.name)
    seen = None if known is None or given is None else extractor(known, given.name).features
    rows = [row for row, position in enumerate(found.positions) if position in candidates]
    _check_enough(count, len(rows), config)  # some could not be read
    taken = representatives(found.features[rows], count, seen, device=probe_device(model), seed=config.seed)
    names = [found.names[rows[place]] for place in taken]
    write_text(out, as_csv(["path", "label"], [[seen_from(out, name), ""] for name in names]))
    _draw_selection(picture, found, examples, [rows[place] for place in taken])
    data = _facts(config, source, found) | {"known": 0 if seen is None else len(seen), "chosen": names}
    data |= {"out": str(out), "picture": str(picture), "seconds": round(time.monotonic() - began, 2)}
    table = Table(["images", "known", "chosen", "table", "picture"],
                  [[len(found), data["known"], count, str(out), str(picture)]])  # fmt: skip
    return CommandResult(data, [table], [*source.notes, *_next(config, out)])


def duplicates(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """Groups of images that look nearly the same to the model."""
    began = time.monotonic()
    assert config.duplicates is not None
    model = open_model(config.model, config)
    found = make_extractor(model, config, config.features, config.blocks)(examples, source.name)
    candidates = _candidates(examples)
    rows = torch.tensor([row for row, position in enumerate(found.positions) if position in candidates])
    first = rows[first_alike(found.features[rows], config.duplicates, device=probe_device(model))]
    similarity = cosines_with(found.features[rows], found.features[first]).tolist()
    groups: dict[int, list[tuple[int, float]]] = {}
    for row, leader, cosine in zip(rows.tolist(), first.tolist(), similarity, strict=True):
        groups.setdefault(leader, []).append((row, round(cosine, 6)))
    several = [group for group in groups.values() if len(group) > 1]
    lines = [[number, found.names[row], cosine] for number, group in enumerate(several, 1) for row, cosine in group]
    files = _in_files(examples)
    written = [[number, seen_from(out, name) if files else name, cosine] for number, name, cosine in lines]
    write_text(out, as_csv(["group", "path", "similarity"], written))
    listed = [[{"image": found.names[row], "similarity": cosine} for row, cosine in group] for group in several]
    data = _facts(config, source, found) | {"threshold": config.duplicates, "groups": listed, "out": str(out)}
    notes = [*source.notes, *_said(several, len(rows), config.duplicates)]
    if several:
        _draw_groups(picture, found, examples, several)
        data["picture"] = str(picture)
        notes.append(f"{out} has them all, {picture} shows {'them' if len(several) <= _DRAWN_GROUPS else 'the first'}.")
    data["seconds"] = round(time.monotonic() - began, 2)
    cells: list[list[object]] = [
        [number, len(group), found.names[group[0][0]], found.names[group[1][0]], group[1][1]]
        for number, group in enumerate(several[:_LISTED_GROUPS], 1)
    ]
    return CommandResult(data, [Table(["group", "images", "first", "second", "cosine"], cells)] if cells else [], notes)


def seen_from(table: Path, name: str) -> str:
    """A file as a table names it: from the table's own folder where it lies below, so that both can move; else whole.

    Nothing is resolved: ``..`` behind a link means another place than it looks.
    """
    folder, file = table.parent.absolute(), Path(name).absolute()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file)


def check_picture_place(picture: Path, data: str) -> None:
    """A picture among the images would be one of them the next time."""
    if is_inside(picture, data):
        raise UserError(f"{picture} would lie among the images of {data}: choose another place with --picture.")


def _candidates(examples: ImageDataset, known: Iterable[str] = ()) -> set[int]:
    """Positions of the images to choose from: each file once, whatever splits it stands in, and none that is known."""
    if not _in_files(examples):  # two shards may well have an image of the same name
        return set(range(len(examples)))
    before = {Path(name).resolve() for name in known}
    first: dict[Path, int] = {}
    for position, name in enumerate(examples.names):
        first.setdefault(Path(name).resolve(), position)
    return {position for file, position in first.items() if file not in before}


def _check_enough(count: int, there: int, config: EmbedConfig) -> None:
    if count > there:
        besides = "" if config.known is None else f" besides those of {config.known}"
        raise UserError(f"--select {count}: there are only {pluralize(there, 'image')}{besides} to choose from.")


def _in_files(examples: ImageDataset) -> bool:
    """Whether every image is a file of its own, which a table can name."""
    if isinstance(examples, JoinedExamples):
        return all(_in_files(part) for part in examples.parts)
    return isinstance(examples, FileExamples)


def _facts(config: EmbedConfig, source: DatasetSplits, found: FeatureSet) -> dict[str, Any]:
    return {
        "model": config.model,
        "data": source.name,
        "features": config.features,
        "images": len(found),
        "bad": len(found.bad),
    }


def _next(config: EmbedConfig, out: Path) -> list[str]:
    """What to do with the table, as a command that can be copied."""
    table = out if config.known is None else Path(config.known)
    begin = ["--init" if Path(config.model).exists() else "--backbone", shell_quote(config.model)]
    begin += ["--backbone", shell_quote(config.backbone)] if config.backbone else []
    fill = f"fill in the column 'label' of {out}"
    if config.known is not None:
        fill += f", {'add its rows to' if Path(config.known).is_file() else 'sort its images into'} {config.known}"
    return [f"next        {fill}, then", f"            frugalvit train {shell_quote(table)} {' '.join(begin)}"]


_SUSPICIOUS = 10  # images of one group: of fewer, all may well be alike


def _said(groups: list[list[tuple[int, float]]], images: int, threshold: float) -> list[str]:
    if not groups:
        return [f"No two of the {images:,} images have a cosine of {threshold:g} or more."]
    inside, largest = sum(len(group) for group in groups), max(len(group) for group in groups)
    said = [
        f"{pluralize(len(groups), 'group')} of {inside:,} images with a cosine of {threshold:g} or more, directly or by "
        f"way of others; with one of each, {images - inside + len(groups):,} of {images:,} images remain."
    ]
    if largest >= _SUSPICIOUS and 2 * largest > images:  # a model that learned little sees one image everywhere
        said.append(f"{largest:,} of them are in one group: this model hardly tells them apart; raise --duplicates.")
    return said


def _draw_selection(picture: Path, found: FeatureSet, examples: ImageDataset, rows: list[int]) -> None:
    from frugalvit.embedding.contact_sheet import sheet_figure, short_name, small
    from frugalvit.utils.plotting import save

    ranked = enumerate(rows[:_DRAWN], 1)
    images = [small(examples, found.positions[row], f"{rank}\n{short_name(found.names[row])}") for rank, row in ranked]
    save(sheet_figure([[image] for image in images]), picture)


def _draw_groups(
    picture: Path, found: FeatureSet, examples: ImageDataset, groups: list[list[tuple[int, float]]]
) -> None:
    from frugalvit.embedding.contact_sheet import COLUMNS, sheet_figure, short_name, small
    from frugalvit.utils.plotting import save

    sheet = []
    for number, group in enumerate(groups[:_DRAWN_GROUPS], 1):
        members = enumerate(group[:COLUMNS])
        texts = [(row, f"{cosine:.3f}" if place else f"group {number}") for place, (row, cosine) in members]
        sheet.append(
            [small(examples, found.positions[row], f"{text}\n{short_name(found.names[row])}") for row, text in texts]
        )
    save(sheet_figure(sheet), picture)
