"""Which images to label next, and which are nearly the same, by the cosines of their features.

Plain torch on any device, nothing on disk; ``curate.py`` makes tables and pictures of what is found here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.probing.knn import CELLS, nearest
from frugalvit.probing.metrics import require_finite
from frugalvit.utils import console

# The cosine of a vector with itself is 1 but for float32's rounding: a copy must be found at a threshold of 1, too.
ROUNDING = 1e-6
HELD = 1 << 26  # cosines held at once when choosing: 256 MiB, those of 8,192 images with each other
_REFRESHED = 64  # rows computed at a time: one alone would leave a GPU waiting
_MISSED = 0.01  # the chance that a sample holds none of the rows that the best choice would still need


def representatives(
    features: Tensor,
    count: int,
    known: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    cells: int = HELD,
) -> list[int]:
    """Rows that stand for the others best, the most telling first: greedy facility location.

    Each one is the row that, added to those taken and those ``known`` (K, D), adds most to

        cover(S) = sum_i max_{s in S} cos(x_i, x_s)

    Of equals the first is taken. features: (N, D). Where N x N is at most ``cells``, every row is considered at every
    step; beyond, a random sample of them (stochastic greedy: Mirzasoleiman et al., AAAI 2015).
    """
    if features.ndim != 2 or (known is not None and (known.ndim != 2 or known.shape[1] != features.shape[1])):
        raise UserError("Choosing images needs one vector an image, all of one width.")
    if not 1 <= count <= len(features):
        raise UserError(f"{count:,} of {len(features):,} images cannot be chosen.")
    unit = _unit(features, device)
    if known is None:
        closest = torch.full_like(unit[:, 0], -1.0)  # the lowest cosine: the first one taken is nearest the mean
    else:
        require_finite(known, "features of the known images")
        closest = torch.cat([similarity[:, 0] for _, similarity, _ in nearest(known, unit, 1, device=unit.device)])
    if len(unit) ** 2 <= cells:
        return _among_all(unit, closest, count)
    return _among_samples(unit, closest, count, max(1, cells // len(unit)), seed)


def _among_all(unit: Tensor, closest: Tensor, count: int) -> list[int]:
    """Lazy greedy: what a row adds only falls as others are taken, so that few have to be computed anew at each step.

    closest: (N,), each row's largest cosine with one that is taken or known.
    """
    cosines = unit @ unit.T
    bound = torch.full_like(closest, 2.0 * len(unit))  # no row adds more than 2 to each; -inf once it is taken
    taken: list[int] = []
    for _ in console.progress(range(count), label="choosing"):
        stale = bound.clone()
        while stale[best := _first_best(bound)] > -torch.inf:
            rows = stale.topk(min(_REFRESHED, len(unit))).indices
            bound[rows] = torch.minimum(bound[rows], _gains(cosines[rows], closest))
            stale[rows] = -torch.inf
        taken.append(best)
        bound[best] = -torch.inf
        closest = torch.maximum(closest, cosines[best])
    return taken


def _among_samples(unit: Tensor, closest: Tensor, count: int, most: int, seed: int) -> list[int]:
    """Stochastic greedy: each step considers N / count ln(1 / missed) of the rows left, or ``most``, which fit."""
    tried = min(most, math.ceil(len(unit) / count * math.log(1 / _MISSED)))
    left = torch.ones(len(unit), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    taken: list[int] = []
    for _ in console.progress(range(count), label="choosing"):
        rows = left.nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)[:tried]].sort().values
        best = int(rows[_first_best(_gains(unit[rows.to(unit.device)] @ unit.T, closest))])
        taken.append(best)
        left[best] = False
        closest = torch.maximum(closest, unit @ unit[best])
    return taken


def _gains(cosines: Tensor, closest: Tensor) -> Tensor:
    """What each of some rows would add to the cover. (M, N), overwritten, and (N,) -> (M,)."""
    return cosines.sub_(closest).clamp_min_(0).sum(1)


def _first_best(gains: Tensor) -> int:
    """The first of those that are equal to the largest but for rounding, which differs by device."""
    largest = gains.max()
    return int((gains >= largest - ROUNDING * (1 + largest)).nonzero()[0])


def first_alike(
    features: Tensor, threshold: float, *, device: torch.device | str | None = None, chunk: int | None = None
) -> Tensor:
    """For every row the first row of its group; its own number where it is alone or the first.

    Two rows whose cosine is at least ``threshold`` are in one group, and so are all that such pairs connect.

    features: (N, D) -> int64 (N,) on the CPU. Blocks of chunk x chunk cosines exist at a time, each pair in one.
    """
    if features.ndim != 2:
        raise UserError("Near duplicates are found by one vector an image.")
    if not 0 < threshold <= 1:
        raise UserError(f"Near duplicates have a cosine above 0 and up to 1, not {threshold:g}.")
    unit = _unit(features, device)
    chunk = chunk or int(CELLS.get(unit.device.type, CELLS["cpu"]) ** 0.5)
    first = torch.arange(len(unit), device=unit.device)
    for start in console.progress(range(0, len(unit), chunk), label="comparing"):
        rows = unit[start : start + chunk]
        for begin in range(start, len(unit), chunk):
            alike = (rows @ unit[begin : begin + chunk].T >= threshold - ROUNDING).nonzero()
            first = _connect(first, alike[:, 0] + start, alike[:, 1] + begin)
    return first.cpu()


def _connect(first: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Unite the groups of each pair. first: (N,), the first row of every row's group; one, other: (P,) rows.

    All pairs at once: the later group goes to the earliest it is connected with, until none is left to unite. Ten
    thousand black frames are fifty million pairs, too many to be looked at one by one.
    """
    while True:
        apart = first[one] != first[other]
        if not apart.any():
            return first
        one, other = one[apart], other[apart]
        low, high = torch.minimum(first[one], first[other]), torch.maximum(first[one], first[other])
        first = first.scatter_reduce(0, high, low, "amin")
        while not torch.equal(first, first[first]):  # whoever followed a group that has moved follows it there
            first = first[first]


def cosines_with(features: Tensor, others: Tensor) -> Tensor:
    """The cosine of each row with the row of ``others`` at the same place. (N, D), (N, D) -> (N,), at most 1."""
    return F.cosine_similarity(features.float(), others.float(), dim=1).clamp(max=1)


def _unit(features: Tensor, device: torch.device | str | None) -> Tensor:
    require_finite(features, "features")
    return F.normalize(features.to(features.device if device is None else device).float(), dim=1)
