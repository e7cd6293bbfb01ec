from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.backbones import create_backbone
from frugalvit.errors import UserError
from frugalvit.visualization import attention as lens
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import Box, eval_no_grad, model_input
from helpers.fake_backbones import PatchFeatures

SIX_BY_EIGHT = Regions((6, 8), (96, 128), (16, 16))


@given(seed=st.integers(0, 99), count=st.integers(1, 30), mass=st.floats(0.1, 0.95))
def test_mask_is_the_smallest_set_that_holds_the_mass(seed, count, mass):
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed)).softmax(0).double()
    mask = lens.mass_mask(weights, mass)
    kept = sorted(weights[mask].tolist())
    assert sum(kept) >= mass - 1e-5
    assert sum(kept[1:]) < mass
    assert not len(weights[~mask]) or weights[~mask].max() <= kept[0]


def test_entropy_by_hand():
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    assert lens.entropy(weights).tolist() == pytest.approx([2, 0, 1])
    assert lens.entropy(3 * weights).tolist() == pytest.approx([2, 0, 1])


@pytest.mark.parametrize("query", [(0, 0), (2, 5), None])
def test_maps_are_the_rows_of_the_model(query):
    backbone = PatchFeatures((24, 48))
    image = torch.rand(3, 24, 48, generator=torch.Generator().manual_seed(2))
    view = lens.attend(backbone, image, query)
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


def test_no_class_token_to_ask():
    attention = torch.full((2, 6, 6), 1 / 6)
    with pytest.raises(UserError, match="no class token"):
        lens.view_attention(attention, (2, 3), None)
    with pytest.raises(UserError, match="outside the 2x3 grid"):
        lens.view_attention(attention, (2, 3), (2, 0))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("0.5,0.5", (3, 4)),
        ("0.0,0.999", (5, 0)),
        ("1.0,1.0", (5, 7)),
        ("100,50", (0, 0)),  # the crop's top left corner
        ("259,169", (5, 7)),
        ("140,50", (0, 2)),
    ],
)
def test_query_lands_in_its_cell(text, cell):
    assert lens.parse_query(text, (220, 360), Box(100, 50, 160, 120), SIX_BY_EIGHT) == cell


@pytest.mark.parametrize(("side", "stride"), [(28, 8), (50, 16), (200, 32), (70, 32)])
@pytest.mark.parametrize("pads", [True, False])
def test_a_pixel_asks_the_region_it_lies_in(side, stride, pads):
    """Also where the stride does not divide the picture and the last region shows what is left over, or none does."""
    count = -(-side // stride) if pads else side // stride
    regions = Regions((count, count), (side, side), (stride, stride))
    for pixel in range(side):
        row = min(pixel // stride, count - 1)
        asked = lens.parse_query(f"{pixel},{pixel}", (side, side), Box(0, 0, side, side), regions)
        assert asked == (row, row)


def test_a_pixel_that_a_crop_cuts_lies_where_its_middle_does():
    """A box that begins between two pixels: of the tenth, 0.4 lie in the first region and 0.6 in the second."""
    regions = Regions((4, 4), (32, 32), (8, 8))
    places = [lens.parse_query(f"{x},{x}", (40, 40), Box(2.4, 2.4, 32, 32), regions) for x in (9, 10, 17, 18)]
    assert places == [(0, 0), (1, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("5", "give x,y"),
        ("a,b", "give x,y"),
        ("1.5,0.5", "between 0 and 1"),
        ("400,20", "outside"),
        ("10,10", "cropped"),
    ],
)
def test_query_mistakes_are_explained(text, complaint):
    with pytest.raises(UserError, match=complaint):
        lens.parse_query(text, (220, 360), Box(100, 50, 160, 120), SIX_BY_EIGHT)


def test_query_of_the_class_token():
    assert lens.parse_query("class", (220, 360), Box(0, 0, 360, 220), SIX_BY_EIGHT) is None


def test_mean_entropy_is_the_mean_over_heads_queries_and_images():
    backbone = create_backbone("swin_nano", img_size=32)
    images = torch.rand(5, 3, 32, 32)
    with eval_no_grad(backbone):
        weights = backbone.attention(model_input(backbone, images))
    expected = -(weights * weights.clamp_min(1e-30).log2()).sum(-1).mean().item()
    assert lens.mean_entropy(backbone, [images[:2], images[2:]]) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UserError, match="no images"):
        lens.mean_entropy(backbone, [])
