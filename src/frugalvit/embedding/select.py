"""``frugalvit embed --select``: choose the images that represent the others best, to label them.

``representatives`` is plain torch on any device; ``select`` writes the table and the figure.
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.backbones.weights.published import is_published
from frugalvit.config.probe import EmbedConfig
from frugalvit.data import DatasetSplits, ImageDataset, join, open_data
from frugalvit.embedding.image_table import are_files, distinct_files, draw, facts, path_from_table
from frugalvit.errors import UserError
from frugalvit.probing.knn import nearest
from frugalvit.probing.splits import make_extractor, open_model, probe_device
from frugalvit.probing.validation import require_finite
from frugalvit.utils import console
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

# The cosine of a vector with itself is 1 except for rounding: a threshold of 1 must find copies.
ROUNDING = 1e-6
MAX_COSINES = 1 << 26  # in memory when selecting: 256 MiB, those of 8,192 images with each other
_REFRESHED = 64  # rows computed at a time, to keep a GPU busy
_MISSED = 0.01  # the chance that a sample holds none of the rows that the best choice needs
_MAX_DRAWN = 200  # images in a figure


def select(
    config: EmbedConfig, source: DatasetSplits, examples: ImageDataset, out: Path, picture: Path
) -> CommandResult:
    """Choose the images that represent the others best, in addition to the known ones, to be labelled."""
    count = config.select
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
    draw(picture, features, examples, [[(row, str(rank))] for rank, row in enumerate(rows[:_MAX_DRAWN], 1)])
    data = facts(config, source, features)
    data |= {"known": 0 if known_features is None else len(known_features), "chosen": names}
    data |= {"out": str(out), "picture": str(picture)}
    cells: list[object] = [len(features), data["known"], count, str(out), str(picture)]
    named = not Path(config.model).exists() and not is_published(config.model)
    weights = ["--backbone" if named else "--init", config.model, *(["--pretrained"] if config.pretrained else [])]
    weights += ["--backbone", config.backbone] if config.backbone else []
    command = " ".join(map(shell_quote, ["frugalvit", "train", out, *weights]))
    next_step = f"next: fill in the column 'label' of {out}, then "
    if labelled is None:
        next_step += command
    elif labelled.kind == "table":
        next_step += f"copy its rows or its labels into {labelled.location}, and train or probe again"
    else:
        next_step += f"sort its images into the classes of {labelled.location}, and train or probe again"
    table = Table(["images", "known", "chosen", "table", "picture"], [cells])
    return CommandResult(data, [table], [*source.notes, next_step])


def representatives(
    features: Tensor,
    count: int,
    known: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    cells: int = MAX_COSINES,
) -> list[int]:
    """Choose the rows of (N, D) that represent the others best: greedy facility location.

    Each chosen row, together with those chosen before and those ``known`` (K, D), adds most to

        cover(S) = sum_i max_{s in S} cos(x_i, x_s)

    If N x N is above ``cells``, a step considers a random sample (stochastic greedy: Mirzasoleiman et al., AAAI 2015).
    """
    if not 1 <= count <= len(features):
        raise UserError(f"Cannot select {count:,} of {len(features):,} images.")
    unit = unit_rows(features, device)
    if known is None:
        closest = torch.full_like(unit[:, 0], -1.0)  # the lowest cosine: the first choice is nearest the mean
    else:
        require_finite(known, "features of the known images")
        closest = torch.cat([similarity[:, 0] for _, similarity, _ in nearest(known, unit, 1, device=unit.device)])
    if len(unit) ** 2 <= cells:
        return _choose_from_all(unit, closest, count)
    return _choose_from_samples(unit, closest, count, max(1, cells // len(unit)), seed)


def _choose_from_all(unit: Tensor, closest: Tensor, count: int) -> list[int]:
    """Lazy greedy: the gain of a row never rises, so each step recomputes only a few gains.

    closest: (N,), each row's largest cosine with a chosen or known row
    """
    cosines = unit @ unit.T
    bound = torch.full_like(closest, 2.0 * len(unit))  # an upper bound of the gain; -inf once the row is chosen
    chosen: list[int] = []
    for _ in console.progress(range(count), label="selecting"):
        stale = bound.clone()
        while stale[best := _first_best(bound)] > -torch.inf:
            rows = stale.topk(min(_REFRESHED, len(unit))).indices
            bound[rows] = torch.minimum(bound[rows], _gains(cosines[rows], closest))
            stale[rows] = -torch.inf
        chosen.append(best)
        bound[best] = -torch.inf
        closest = torch.maximum(closest, cosines[best])
    return chosen


def _choose_from_samples(unit: Tensor, closest: Tensor, count: int, most: int, seed: int) -> list[int]:
    """Stochastic greedy: each step considers N / count ln(1 / missed) random rows, at most ``most``."""
    sample = min(most, math.ceil(len(unit) / count * math.log(1 / _MISSED)))
    left = torch.ones(len(unit), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    chosen: list[int] = []
    for _ in console.progress(range(count), label="selecting"):
        rows = left.nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)[:sample]].sort().values
        best = int(rows[_first_best(_gains(unit[rows.to(unit.device)] @ unit.T, closest))])
        chosen.append(best)
        left[best] = False
        closest = torch.maximum(closest, unit @ unit[best])
    return chosen


def _gains(cosines: Tensor, closest: Tensor) -> Tensor:
    """Compute what each of M rows adds to the cover: (M, N), which is overwritten, and (N,) -> (M,)."""
    return cosines.sub_(closest).clamp_min_(0).sum(1)


def _first_best(gains: Tensor) -> int:
    """Return the first row whose gain equals the largest except for rounding, which differs by device."""
    largest = gains.max()
    return int((gains >= largest - ROUNDING * (1 + largest)).nonzero()[0])


def unit_rows(features: Tensor, device: torch.device | str | None) -> Tensor:
    require_finite(features, "features")
    return F.normalize(features.to(features.device if device is None else device).float(), dim=1)
