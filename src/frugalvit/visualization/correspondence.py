"""Match the regions of two views, and score the matches.

EsViT §4.3, Eq. 2: with final tokens z and z' of two views, region i matches j* = argmax_j cos(z_i, z'_j). Figure 6
draws the ten most similar pairs. Figure 8 scores them against the known transform (supplement B.5).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.backbones import Backbone
from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.data.rng import generator_for
from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import SecondView, model_input

TOP = 10  # pairs that the paper draws and scores
_SAME = 1e-6  # similarities closer than this are ties


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """Compute the cosine of every pair of regions of two grids (B, D, h, w): (B, h·w, h'·w')."""
    rows = F.normalize(first.flatten(2).float(), dim=1)
    columns = F.normalize(second.flatten(2).float(), dim=1)
    return rows.transpose(1, 2) @ columns


def best_pairs(
    first: Tensor, second: Tensor, top: int, ties: tuple[torch.Generator, torch.Generator] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Match every region of ``first`` to the most similar of ``second`` (Eq. 2); return the ``top`` best pairs.

    first, second: grids (B, D, h, w) and (B, D, h', w')
    ties:          break ties at random, among a region's matches and among the pairs. The first of equals would favour
                   a corner: a constant embedding would score far above chance.
    Returns the regions of the first view, their matches (flat indices), and the cosines, each (B, top).
    """
    require_regions(first)
    require_regions(second)
    similarity = cosines(first, second)
    best = (similarity if ties is None else _break_ties(similarity, ties[0])).max(dim=2)
    similarity = best.values.float()
    ranked = similarity if ties is None else _break_ties(similarity, ties[1])
    chosen = ranked.topk(min(top, ranked.shape[1]), dim=1).indices
    return chosen, best.indices.gather(1, chosen), similarity.gather(1, chosen)


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
    """The two numbers of Figure 8, and those of chance."""

    accuracy: float  # share of the top pairs that hit the right region
    error: float  # mean distance from the right region, in pixels of the model's input
    error_cells: float  # the same in cells of the grid
    chance_accuracy: float  # of random matches
    chance_error: float
    images: int
    top: int
    grid: tuple[int, int]


def score_matches(
    first: Tensor,
    second: Tensor,
    off: tuple[Tensor, Tensor],
    cell: tuple[float, float],
    top: int,
    ties: tuple[torch.Generator, torch.Generator],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hits (0 or 1), pixel distances and cell distances of the top pairs, each (B, top), as float64.

    first, second: grids (B, D, h, w)
    off:           the error of a match in rows (h, h) and columns (w, w), by :meth:`Regions.steps_off`
    cell:          height and width of a region in pixels
    ties:          see :func:`best_pairs`
    """
    columns = first.shape[3]
    chosen, matched, _ = best_pairs(first, second, top, ties)
    down = off[0][chosen // columns, matched // columns].double()
    across = off[1][chosen % columns, matched % columns].double()
    pixels = torch.hypot(down * cell[0], across * cell[1])
    return ((down == 0) & (across == 0)).double(), pixels, torch.hypot(down, across)


def evaluate_correspondence(
    backbone: Backbone,
    images: Iterable[Tensor],
    *,
    top: int = TOP,
    second_view: SecondView | None = None,
    seed: int = 0,
) -> CorrespondenceScore:
    """Score the ``top`` most similar pairs between images and their second views (Fig. 8).

    images: batches (B, C, H, W), all of one size, as the model sees them, before normalization

    The n-th image has the same second view for every model and batch size.
    """
    second_view = second_view or SecondView.of(backbone.pixel_type)
    # Separate generators: the number of draws for ties depends on the grid and must not change the views.
    generator, matches, pairs = (generator_for(seed, kind) for kind in ("second views", "matches", "pairs"))
    scores: list[Tensor] = []
    regions, off = None, None
    for batch in images:
        views = second_view(batch, generator)
        with eval_no_grad(backbone):
            first, second = (backbone(model_input(backbone, view)).grid for view in (batch, views))
        if regions is None or off is None:
            regions = Regions.of(backbone, (batch.shape[2], batch.shape[3]))
            off = regions.steps_off(0), regions.steps_off(1)
        scores.append(torch.stack(score_matches(first, second, off, regions.cell, top, (matches, pairs))))
    if regions is None or off is None:
        raise UserError("There are no images to score correspondences on.")
    images_and_pairs = torch.cat(scores, dim=1)  # (3, images, top)
    accuracy, error, error_cells = images_and_pairs.mean((1, 2)).tolist()
    _, count, found = images_and_pairs.shape
    return CorrespondenceScore(
        accuracy, error, error_cells, *chance(off, regions.cell), images=count, top=found, grid=regions.grid
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
    """The content of Figure 6 for two views."""

    pairs: list[Pair]
    own: tuple[tuple[int, int], tuple[int, int]]  # of each view, the region nearest its own global feature (blue dot)
    other: tuple[tuple[int, int], tuple[int, int]]  # nearest the other view's global feature (red triangle)
    grids: tuple[tuple[int, int], tuple[int, int]]


def correspond(first: Features, second: Features, top: int = TOP) -> Correspondence:
    """Find the ``top`` best pairs between the features of two images (B = 1), and the marked regions."""
    chosen, matched, similarity = best_pairs(first.grid, second.grid, top)
    (rows, columns), (other_rows, other_columns) = (features.grid.shape[2:] for features in (first, second))
    pairs = [
        Pair(rank, divmod(int(region), columns), divmod(int(match), other_columns), float(cosine))
        for rank, (region, match, cosine) in enumerate(zip(chosen[0], matched[0], similarity[0], strict=True), 1)
    ]

    def nearest(features: Features, other: Features) -> tuple[int, int]:
        return divmod(int(nearest_region(features.grid, global_feature(other))), features.grid.shape[3])

    return Correspondence(
        pairs,
        own=(nearest(first, first), nearest(second, second)),
        other=(nearest(first, second), nearest(second, first)),
        grids=((rows, columns), (other_rows, other_columns)),
    )


def _break_ties(similarity: Tensor, generator: torch.Generator) -> Tensor:
    """Put values that are equal to a millionth into random order (on the CPU: some devices lack float64)."""
    noise = torch.rand(similarity.shape, generator=generator, dtype=torch.float64)
    return (similarity.cpu().double() / _SAME).round() * _SAME + noise * (_SAME / 2)


def require_regions(grid: Tensor) -> None:
    """Raise an error if a grid (B, D, h, w) has one region only."""
    if grid.shape[2] * grid.shape[3] < 2:
        raise UserError(
            "The model ends with a 1x1 grid, which has nothing to compare. Use larger images (--img-size), "
            "or a model with a smaller stride."
        )
