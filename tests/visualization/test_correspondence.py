"""Matches of regions and their scores, against loops over regions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.visualization import correspondence as lens
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import SecondView
from helpers.fake_backbones import ConstantFeatures, PaddedPositions, PatchFeatures, PositionFeatures, coordinate_images

FLIP_ONLY = SecondView(jitter=0, grey=0)


def full_cells(grid, cell):
    return Regions(grid, (grid[0] * cell[0], grid[1] * cell[1]), cell)


def steps_off(regions):
    return regions.steps_off(0), regions.steps_off(1)


def brute_force(first, second, cell, top):
    """The paper's protocol as loops: mirror, match by cosine, take the top pairs, measure."""
    hits, pixels = [], []
    for one, two in zip(first, second, strict=True):
        _, rows, columns = one.shape
        matches = []
        for r in range(rows):
            for c in range(columns):
                best = None
                for r2 in range(rows):
                    for c2 in range(columns):
                        a, b = one[:, r, c], two[:, r2, c2]
                        cosine = float(a @ b / (a.norm() * b.norm()))
                        if best is None or cosine > best[0]:
                            best = (cosine, r2, c2)
                matches.append((best[0], r, c, best[1], best[2]))
        matches.sort(reverse=True)
        for _, r, c, r2, c2 in matches[:top]:
            down, across = r2 - r, c2 - (columns - 1 - c)
            hits.append(down == 0 and across == 0)
            pixels.append(math.hypot(down * cell[0], across * cell[1]))
    return sum(hits) / len(hits), sum(pixels) / len(pixels)


@given(rows=st.integers(1, 4), columns=st.integers(2, 4), top=st.integers(1, 12), seed=st.integers(0, 99))
def test_score_equals_brute_force(rows, columns, top, seed):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(2, 5, rows, columns, generator=generator)
    # The mirrored grid with noise: some hits, some misses.
    second = first.flip(3) + 0.8 * torch.randn(first.shape, generator=generator)
    off = steps_off(full_cells((rows, columns), (16, 32)))
    hit, pixel, cells = lens.score_matches(first, second, off, (16, 32), top, (torch.Generator(), torch.Generator()))
    accuracy, error = brute_force(first.double(), second.double(), (16, 32), top)
    assert hit.double().mean().item() == pytest.approx(accuracy)
    assert pixel.mean().item() == pytest.approx(error)
    assert cells.mean().item() == pytest.approx(brute_force(first.double(), second.double(), (1, 1), top)[1])


@pytest.mark.parametrize(
    "backbone",
    [
        PositionFeatures((32, 64)),
        PositionFeatures((64, 24)),
        PaddedPositions((28, 28), 8),
        PaddedPositions((200, 200), 32),
        PaddedPositions((64, 50), 16),
        PaddedPositions((50, 64), 16),
    ],
    ids=lambda backbone: f"{type(backbone).__name__} {backbone.img_size}",
)
def test_perfect_embedding_scores_one(backbone):
    """Also if the last regions are cut at the border."""
    size = backbone.img_size
    score = lens.evaluate_correspondence(backbone, [coordinate_images(3, *size)], second_view=FLIP_ONLY)
    assert (score.accuracy, score.error, score.error_cells) == (1.0, 0.0, 0.0)
    assert score.images == 3 and score.grid == backbone.grid_size(size)


def test_error_is_measured_in_strides():
    """Two rows of 32 and 18 pixels are one stride of 32 apart."""
    off = steps_off(Regions((2, 1), (50, 32), (32, 32)))
    ties = (torch.Generator(), torch.Generator())
    grid = torch.tensor([[[[1.0], [0.0]], [[0.0], [1.0]]]])
    _, pixels, cells = lens.score_matches(grid, grid.flip(2), off, (32, 32), 2, ties)
    assert pixels.tolist() == [[32, 32]] and cells.tolist() == [[1, 1]]
    assert lens.chance(off, (32, 32)) == (0.5, 16)


def test_constant_embedding_scores_chance():
    batches = [coordinate_images(50, 32, 48) for _ in range(20)]
    score = lens.evaluate_correspondence(ConstantFeatures((32, 48)), batches)
    assert score.chance_accuracy == pytest.approx(1 / 24)
    assert score.accuracy == pytest.approx(1 / 24, abs=0.006)  # 10,000 guesses: three deviations
    assert score.error == pytest.approx(score.chance_error, rel=0.03)


@pytest.mark.parametrize("grid", [(1, 2), (3, 3), (2, 5)])
def test_chance_equals_a_double_loop(grid):
    cells = [(r * 8, c * 4) for r in range(grid[0]) for c in range(grid[1])]
    distances = [math.dist(a, b) for a in cells for b in cells]
    accuracy, error = lens.chance(steps_off(full_cells(grid, (8, 4))), (8, 4))
    assert accuracy == pytest.approx(1 / len(cells))
    assert error == pytest.approx(sum(distances) / len(distances))


def test_score_does_not_depend_on_the_batch_size():
    images = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    for backbone in (PatchFeatures(), ConstantFeatures((32, 32))):
        scores = [lens.evaluate_correspondence(backbone, images.split(size), seed=5) for size in (1, 5, 12)]
        assert scores[0] == scores[1] == scores[2]


def test_second_views_do_not_depend_on_the_grid():
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    views: dict[int, list[torch.Tensor]] = {}

    class Recording(SecondView):
        def __call__(self, batch, generator):
            views.setdefault(size, []).append(super().__call__(batch, generator))
            return views[size][-1]

    for size in (4, 16):
        lens.evaluate_correspondence(PatchFeatures(cell=size), images.split(3), second_view=Recording())
    torch.testing.assert_close(views[4], views[16], rtol=0, atol=0)


def test_mean_replaces_a_pooled_feature_of_another_width():
    grid = torch.randn(1, 8, 3, 5, generator=torch.Generator().manual_seed(0))
    wide, mean = Features(grid, torch.randn(1, 20)), Features(grid, grid.mean((2, 3)))
    assert lens.correspond(wide, wide) == lens.correspond(mean, mean)


def test_single_regions_are_an_error():
    with pytest.raises(UserError, match="1x1 grid"):
        lens.evaluate_correspondence(PatchFeatures((8, 8)), [torch.rand(1, 3, 8, 8)])
    one = Features(torch.rand(1, 4, 1, 1), torch.rand(1, 4))
    with pytest.raises(UserError, match="1x1 grid"):
        lens.correspond(one, one)
    with pytest.raises(UserError, match="no images"):
        lens.evaluate_correspondence(PatchFeatures(), [])


def test_pairs_and_marked_regions():
    grid = torch.randn(1, 8, 3, 5, generator=torch.Generator().manual_seed(0))
    first = Features(grid, grid[:, :, 2, 4])
    second = Features(grid.flip(3), grid[:, :, 0, 1])
    matches = lens.correspond(first, second)
    assert [pair.rank for pair in matches.pairs] == list(range(1, 11))
    assert all(pair.second == (pair.first[0], 4 - pair.first[1]) for pair in matches.pairs)
    assert all(pair.similarity == pytest.approx(1, abs=1e-5) for pair in matches.pairs)
    assert matches.own == ((2, 4), (0, 3))
    assert matches.other == ((0, 1), (2, 0))


def test_views_of_different_sizes_match():
    first = Features(torch.randn(1, 4, 2, 3), torch.randn(1, 4))
    second = Features(torch.randn(1, 4, 5, 4), torch.randn(1, 4))
    matches = lens.correspond(first, second)
    assert matches.grids == ((2, 3), (5, 4))
    assert len(matches.pairs) == 6
    assert all(pair.second[0] < 5 and pair.second[1] < 4 for pair in matches.pairs)
