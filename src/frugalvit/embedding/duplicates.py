"""``frugalvit embed --duplicates``: group the images whose features are nearly the same."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, ImageDataset
from frugalvit.data.duplicates import connect_groups
from frugalvit.embedding.image_table import are_files, distinct_files, draw, facts, path_from_table
from frugalvit.embedding.select import ROUNDING, unit_rows
from frugalvit.probing.knn import CELLS
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.utils import console
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

_DRAWN_GROUPS, _LISTED_GROUPS = 40, 10


def duplicates(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
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
        draw(
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
    cells: list[list[object]] = [
        [number, len(group), features.names[group[0][0]], features.names[group[1][0]], group[1][1]]
        for number, group in enumerate(groups[:_LISTED_GROUPS], 1)
    ]
    return CommandResult(data, [Table(["group", "images", "first", "second", "cosine"], cells)] if cells else [], notes)


def group_duplicates(
    features: Tensor, threshold: float, *, device: torch.device | str | None = None, chunk: int | None = None
) -> Tensor:
    """Return the first row of every row's group: (N, D) -> int64 (N,) on the CPU.

    Rows whose cosine is at least ``threshold`` are in one group, and so are all rows that such pairs connect. At most
    chunk x chunk cosines are in memory.
    """
    unit = unit_rows(features, device)
    chunk = chunk or int(CELLS.get(unit.device.type, CELLS["cpu"]) ** 0.5)
    first = torch.arange(len(unit), device=unit.device)
    for start in console.progress(range(0, len(unit), chunk), label="comparing"):
        rows = unit[start : start + chunk]
        for begin in range(start, len(unit), chunk):
            pairs = (rows @ unit[begin : begin + chunk].T >= threshold - ROUNDING).nonzero()
            first = connect_groups(first, pairs[:, 0] + start, pairs[:, 1] + begin)
    return first.cpu()
