"""Entropy, masks and maps of attention, and the query of ``look attend``."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.errors import UserError
from frugalvit.visualization import attention as lens
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import Box
from helpers.fake_backbones import PatchFeatures, attend

SIX_BY_EIGHT = Regions((6, 8), (96, 128), (16, 16))


@given(seed=st.integers(0, 99), count=st.integers(1, 30))
def test_mask_is_the_smallest_set_that_holds_the_mass(seed, count):
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed)).softmax(0).double()
    mask = lens.mass_mask(weights)
    inside = sorted(weights[mask].tolist())
    assert sum(inside) >= lens.MASS - 1e-5
    assert sum(inside[1:]) < lens.MASS
    assert not len(weights[~mask]) or weights[~mask].max() <= inside[0]


def test_entropy_by_hand():
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    assert lens.entropy(weights).tolist() == pytest.approx([2, 0, 1])
    assert lens.entropy(3 * weights).tolist() == pytest.approx([2, 0, 1])


@pytest.mark.parametrize("query", [(0, 0), (2, 5), None])
def test_maps_are_rows_of_the_models_attention(query):
    backbone = PatchFeatures((24, 48))
    image = torch.rand(3, 24, 48, generator=torch.Generator().manual_seed(2))
    view = attend(backbone, image, query)
    inputs = (image - 0.5) / 0.25
    full = backbone.attention(inputs[None])[0]
    line = 0 if query is None else 1 + query[0] * 6 + query[1]
    for head in range(3):
        for row in range(3):
            for column in range(6):
                assert view.maps[head, row, column] == pytest.approx(full[head, line, 1 + row * 6 + column].item())
        assert (view.maps[head].sum() + view.elsewhere[head]).item() == pytest.approx(1, abs=1e-5)
        share = (view.maps[head] / view.maps[head].sum()).flatten().tolist()
        assert view.entropy[head].item() == pytest.approx(-sum(p * math.log2(p) for p in share if p > 0), abs=1e-4)
    assert view.order == sorted(range(3), key=lambda head: view.entropy[head].item())


def test_invalid_queries_are_errors():
    attention = torch.full((2, 6, 6), 1 / 6)
    with pytest.raises(UserError, match="no class token"):
        lens.view_attention(attention, (2, 3), None)
    with pytest.raises(UserError, match="outside the 2x3 grid"):
        lens.view_attention(attention, (2, 3), (2, 0))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("class", None),
        ("0.5,0.5", (3, 4)),
        ("0.0,0.999", (5, 0)),
        ("1.0,1.0", (5, 7)),
        ("100,50", (0, 0)),  # the crop's top left corner
        ("259,169", (5, 7)),
        ("140,50", (0, 2)),
    ],
)
def test_query_is_converted_to_its_region(text, cell):
    assert lens.parse_query(text, (220, 360), Box(100, 50, 160, 120), SIX_BY_EIGHT) == cell


@pytest.mark.parametrize(("side", "stride"), [(28, 8), (50, 16), (200, 32), (70, 32)])
@pytest.mark.parametrize("pads", [True, False])
def test_pixels_are_converted_to_their_region(side, stride, pads):
    """Also if the stride does not divide the picture."""
    count = -(-side // stride) if pads else side // stride
    regions = Regions((count, count), (side, side), (stride, stride))
    for pixel in range(side):
        row = min(pixel // stride, count - 1)
        region = lens.parse_query(f"{pixel},{pixel}", (side, side), Box(0, 0, side, side), regions)
        assert region == (row, row)


@pytest.mark.parametrize(
    ("text", "message"),
    [("5", "x,y"), ("a,b", "x,y"), ("1.5,0.5", "between 0 and 1"), ("400,20", "outside"), ("10,10", "centre crop")],
)
def test_query_errors_name_the_reason(text, message):
    with pytest.raises(UserError, match=message):
        lens.parse_query(text, (220, 360), Box(100, 50, 160, 120), SIX_BY_EIGHT)
