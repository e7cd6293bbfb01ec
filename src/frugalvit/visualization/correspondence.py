"""Match the regions of two views, and score the matches.

EsViT §4.3, Eq. 2: with final tokens z and z' of two views, region i matches j* = argmax_j cos(z_i, z'_j). Figure 6
draws the ten most similar pairs. Figure 8 scores them against the known transform (supplement B.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.data.rng import generator_for
from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import SecondView, model_input

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone

TOP = 10
"""The number of pairs that the paper draws and scores."""

_SAME = 1e-6
"""Similarities closer than this are ties."""


class Matches(NamedTuple):
    """The best match of every region of the first view: flat indices and cosines, both (B, T)."""

    index: Tensor
    similarity: Tensor


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """Compute the cosine of every pair of regions of two grids (B, D, h, w): (B, h·w, h'·w')."""
    one = F.normalize(first.flatten(2).float(), dim=1)
    two = F.normalize(second.flatten(2).float(), dim=1)
    return one.transpose(1, 2) @ two


def best_matches(first: Tensor, second: Tensor, generator: torch.Generator | None = None) -> Matches:
    """Find the most similar region of ``second`` for every region of ``first`` (Eq. 2).

    With a generator ties are broken at random. The first of equals would favour a corner: a constant embedding would
    score far above chance.
    """
    similarity = cosines(first, second)
    if generator is not None:
        similarity = _break_ties(similarity, generator)
    best = similarity.max(dim=2)
    return Matches(best.indices, best.values.float())


def top_matches(matches: Matches, count: int = TOP, generator: torch.Generator | None = None) -> Tensor:
    """Return the regions of the first view with the most similar matches: flat indices (B, count)."""
    count = min(count, matches.similarity.shape[1])
    similarity = matches.similarity
    if generator is not None:
        similarity = _break_ties(similarity, generator)
    return similarity.topk(count, dim=1).indices


def nearest_region(grid: Tensor, pooled: Tensor) -> Tensor:
    """Find the region most similar to a global feature: (B, D, h, w), (B, D) -> flat indices (B,)."""
    return cosines(grid, pooled[:, :, None, None]).squeeze(2).argmax(dim=1)


def global_feature(features: Features) -> Tensor:
    """Return the pooled feature (B, D), or the mean of the regions if its width differs from theirs.

    It differs in MobileNet (a last layer after the pooling) and in distilled DeiT (two tokens).
    """
    width = features.grid.shape[1]
    return features.pooled if features.pooled.shape[1] == width else features.grid.mean((2, 3))


@dataclass(frozen=True)
class CorrespondenceScore:
    """The two numbers of Figure 8, and those of chance.

    accuracy:     share of the top pairs that hit the right region
    error:        mean distance from the right region, in pixels of the model's input
    error_cells:  the same in cells of the grid
    chance_accuracy, chance_error: the same for random matches
    """

    accuracy: float
    error: float
    error_cells: float
    chance_accuracy: float
    chance_error: float
    images: int
    top: int
    grid: tuple[int, int]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def score_matches(
    first: Tensor,
    second: Tensor,
    off: tuple[Tensor, Tensor],
    cell: tuple[float, float],
    top: int,
    ties: tuple[torch.Generator, torch.Generator],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hits, pixel distances and cell distances of the top pairs, each (B, top).

    first, second: grids (B, D, h, w)
    off:           see :meth:`SecondView.steps_off`
    cell:          height and width of a region in pixels
    ties:          break ties among a region's matches, and among the pairs
    """
    _require_regions(first)
    columns = first.shape[3]
    matches = best_matches(first, second, ties[0])
    chosen = top_matches(matches, top, ties[1])
    matched = matches.index.gather(1, chosen)
    down = off[0][chosen // columns, matched // columns].double()
    across = off[1][chosen % columns, matched % columns].double()
    pixels = torch.hypot(down * cell[0], across * cell[1])
    return (down == 0) & (across == 0), pixels, torch.hypot(down, across)


def evaluate_correspondence(
    backbone: Backbone,
    images: Iterable[Tensor],
    *,
    top: int = TOP,
    second_view: SecondView | None = None,
    seed: int = 0,
) -> CorrespondenceScore:
    """Score the ``top`` most similar pairs between images and their second views (Fig. 8).

    images: batches (B, 3, H, W) in [0, 1], all of one size, as the model sees them, before normalisation

    The n-th image has the same second view for every model and batch size.
    """
    second_view = second_view or SecondView()
    # Separate generators: the number of draws for ties depends on the grid and must not change the views.
    generator, matches, pairs = (generator_for(seed, kind) for kind in ("second views", "matches", "pairs"))
    hits, pixels, cells = [], [], []
    regions, off = None, None
    for batch in images:
        views = second_view(batch, generator)
        with eval_no_grad(backbone):
            first, second = (backbone(model_input(backbone, view)).grid for view in (batch, views))
        if regions is None or off is None:
            regions = Regions.of(backbone, (batch.shape[2], batch.shape[3]))
            off = second_view.steps_off(regions)
        hit, pixel, distance = score_matches(first, second, off, regions.cell, top, (matches, pairs))
        hits.append(hit.double())
        pixels.append(pixel)
        cells.append(distance)
    if regions is None or off is None:
        raise UserError("There are no images to score correspondences on.")
    hit, pixel, distance = torch.cat(hits), torch.cat(pixels), torch.cat(cells)
    chance_accuracy, chance_error = chance(off, regions.cell)
    return CorrespondenceScore(
        accuracy=hit.mean().item(),
        error=pixel.mean().item(),
        error_cells=distance.mean().item(),
        chance_accuracy=chance_accuracy,
        chance_error=chance_error,
        images=len(hit),
        top=hit.shape[1],
        grid=regions.grid,
    )


def chance(off: tuple[Tensor, Tensor], cell: tuple[float, float]) -> tuple[float, float]:
    """Return accuracy and mean pixel distance of uniform random matches."""
    down, across = (steps.double().flatten() for steps in off)
    accuracy = (down == 0).double().mean() * (across == 0).double().mean()
    return accuracy.item(), torch.hypot(down[:, None] * cell[0], across * cell[1]).mean().item()


@dataclass(frozen=True)
class Pair:
    """One numbered line of Figure 6: regions as (row, column) in the first and second view."""

    rank: int
    first: tuple[int, int]
    second: tuple[int, int]
    similarity: float


@dataclass(frozen=True)
class Correspondence:
    """The content of Figure 6 for two views.

    own:   for each view, the region nearest its own global feature (blue dot)
    other: for each view, the region nearest the other view's global feature (red triangle)
    """

    pairs: list[Pair]
    own: tuple[tuple[int, int], tuple[int, int]]
    other: tuple[tuple[int, int], tuple[int, int]]
    grids: tuple[tuple[int, int], tuple[int, int]]


def correspond(first: Features, second: Features, top: int = TOP) -> Correspondence:
    """Find the ``top`` best pairs between the features of two images (B = 1), and the marked regions."""
    _require_regions(first.grid)
    _require_regions(second.grid)
    matches = best_matches(first.grid, second.grid)
    chosen = top_matches(matches, top)[0].tolist()
    grids = (_size(first.grid), _size(second.grid))
    pairs = [
        Pair(
            rank,
            divmod(index, grids[0][1]),
            divmod(int(matches.index[0, index]), grids[1][1]),
            float(matches.similarity[0, index]),
        )
        for rank, index in enumerate(chosen, 1)
    ]

    def nearest(features: Features, other: Features, size: tuple[int, int]) -> tuple[int, int]:
        return divmod(int(nearest_region(features.grid, global_feature(other))), size[1])

    return Correspondence(
        pairs,
        own=(nearest(first, first, grids[0]), nearest(second, second, grids[1])),
        other=(nearest(first, second, grids[0]), nearest(second, first, grids[1])),
        grids=grids,
    )


def _break_ties(similarity: Tensor, generator: torch.Generator) -> Tensor:
    """Put values that are equal to a millionth into random order (on the CPU: some devices lack float64)."""
    noise = torch.rand(similarity.shape, generator=generator, dtype=torch.float64)
    return (similarity.cpu().double() / _SAME).round() * _SAME + noise * (_SAME / 2)


def _size(grid: Tensor) -> tuple[int, int]:
    return grid.shape[2], grid.shape[3]


def _require_regions(grid: Tensor) -> None:
    if grid.shape[2] * grid.shape[3] < 2:
        raise UserError(
            "The model ends with a 1x1 grid, whose single region has nothing to match. Use larger images (--img-size) "
            "or a model with a smaller stride."
        )
