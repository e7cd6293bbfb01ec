import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.backbones import create_backbone
from frugalvit.visualization.grid import Regions


def shared_pixels(regions, first, second):
    """Count the pixels of column ``first`` in column ``second`` of the mirrored picture."""
    width, cell = regions.picture[1], regions.cell[1]
    return sum(int(x // cell) == first and int((width - 1 - x) // cell) == second for x in range(width))


@given(width=st.integers(2, 70), cell=st.integers(1, 32))
def test_right_match_shares_most_pixels(width, cell):
    count = -(-width // cell)
    regions = Regions((1, count), (8, width), (8, cell))
    off = regions.steps_off(1)
    for i in range(count):
        shared = [shared_pixels(regions, i, j) for j in range(count)]
        right = [j for j in range(count) if shared[j] == max(shared)]
        assert off[i].tolist() == [min(abs(j - k) for k in right) for j in range(count)]


def test_last_regions_are_cut_at_the_border():
    regions = Regions((2, 4), (32, 50), (16, 16))
    assert regions.extent == (32, 64)
    assert [regions.span(1, column) for column in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    assert regions.centre((1, 3)) == (24, 49)
    assert regions.at(1.0, 0.97) == (1, 3) and regions.at(0, 0.95) == (0, 2)
    assert regions.averaged((1, 2)).cell == (32, 32)


@pytest.mark.parametrize(
    ("name", "size", "grid", "cell"),
    [
        ("swin_nano", 32, 4, 8),
        ("swin_nano", 28, 4, 8),  # padded: 3.5 regions
        ("swin_nano", 50, 4, 16),
        ("cvt_13", 50, 4, 16),
        ("resnet10t", 50, 4, 16),  # its stem has another stride for small images
        ("convnext_atto", 50, 6, 8),  # cut: two pixels are ignored
    ],
)
def test_regions_of_networks(name, size, grid, cell):
    regions = Regions.of(create_backbone(name, img_size=size), (size, size))
    assert (regions.grid, regions.cell) == ((grid, grid), (cell, cell))
