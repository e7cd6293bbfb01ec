"""Select images to label, and group near duplicates, by the cosines of their features.

Plain torch on any device; ``curate.py`` writes tables and figures.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.data.copies import connect_groups
from frugalvit.errors import UserError
from frugalvit.probing.knn import CELLS, nearest
from frugalvit.probing.validation import require_finite
from frugalvit.utils import console

# The cosine of a vector with itself is 1 except for rounding: a threshold of 1 must find copies.
ROUNDING = 1e-6
MAX_COSINES = 1 << 26  # in memory when selecting: 256 MiB, those of 8,192 images with each other
_REFRESHED = 64  # rows computed at a time, to keep a GPU busy
_MISSED = 0.01  # the chance that a sample holds none of the rows that the best choice needs


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

    The first of equal rows is chosen. If N x N is at most ``cells``, every step considers all rows, else a random
    sample (stochastic greedy: Mirzasoleiman et al., AAAI 2015).
    """
    if not 1 <= count <= len(features):
        raise UserError(f"Cannot select {count:,} of {len(features):,} images.")
    unit = _unit(features, device)
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


def group_duplicates(
    features: Tensor, threshold: float, *, device: torch.device | str | None = None, chunk: int | None = None
) -> Tensor:
    """Return the first row of every row's group: (N, D) -> int64 (N,) on the CPU.

    Rows whose cosine is at least ``threshold`` are in one group, and so are all rows that such pairs connect. At most
    chunk x chunk cosines are in memory.
    """
    unit = _unit(features, device)
    chunk = chunk or int(CELLS.get(unit.device.type, CELLS["cpu"]) ** 0.5)
    first = torch.arange(len(unit), device=unit.device)
    for start in console.progress(range(0, len(unit), chunk), label="comparing"):
        rows = unit[start : start + chunk]
        for begin in range(start, len(unit), chunk):
            pairs = (rows @ unit[begin : begin + chunk].T >= threshold - ROUNDING).nonzero()
            first = connect_groups(first, pairs[:, 0] + start, pairs[:, 1] + begin)
    return first.cpu()


def _unit(features: Tensor, device: torch.device | str | None) -> Tensor:
    require_finite(features, "features")
    return F.normalize(features.to(features.device if device is None else device).float(), dim=1)
