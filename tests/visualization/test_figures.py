"""The figures: their axes, marks and colour scales."""

import dataclasses

import pytest
import torch

from frugalvit.utils.plotting import save
from frugalvit.visualization import correspondence
from frugalvit.visualization import figures as plots
from frugalvit.visualization.attention import view_attention
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import model_input
from helpers.fake_backbones import PatchFeatures, attend


def matched(title, height=32, width=48):
    backbone = PatchFeatures((height, width))
    image = torch.rand(3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (backbone(model_input(backbone, view[None])) for view in (image, image.flip(2)))
    return plots.MatchedViews(
        title, image, image.flip(2), correspondence.correspond(first, second), (regions_of(height, width),) * 2
    )


def regions_of(height=32, width=32):
    return Regions((height // 8, width // 8), (height, width), (8, 8))


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_correspondence_figure_is_deterministic(tmp_path, kind):
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path in paths:
        save(plots.correspondence_figure([matched("a $ sign"), matched("other")]), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    (key,) = plots.correspondence_figure([matched("one")]).legends
    assert [text.get_text().split()[0] for text in key.get_texts()] == ["matches,", "nearest", "nearest"]


def test_regions_with_several_matches_show_all_numbers():
    row = matched("one", 32, 32)
    pairs = [dataclasses.replace(pair, second=row.matches.pairs[0].second) for pair in row.matches.pairs]
    figure = plots.correspondence_figure(
        [dataclasses.replace(row, matches=dataclasses.replace(row.matches, pairs=pairs))]
    )
    texts = sorted(text.get_text() for text in figure.axes[1].texts)
    ranks = [str(pair.rank) for pair in pairs]
    assert texts == sorted([*ranks, " ".join(sorted(ranks, key=int))])


def test_all_heads_share_one_colour_scale():
    attention_of = torch.full((2, 17, 17), 1 / 17)
    attention_of[1] = torch.eye(17)
    view = view_attention(attention_of, (4, 4), (1, 2))
    figure = plots.attention_figure(torch.rand(3, 32, 32), view, regions_of(), "title")
    maps = [axis.images[-1] for axis in figure.subfigs[2].axes if len(axis.images) == 2]
    assert len(maps) == 2 and {(image.norm.vmin, image.norm.vmax) for image in maps} == {(0, 1)}
    assert any("share of a head's attention" in axis.get_xlabel() for axis in figure.subfigs[3].axes)
    bars = figure.subfigs[0].axes[1]
    assert [list(line.get_ydata()) for line in bars.get_lines()] == [[4, 4]]


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_attention_figure_has_a_mask_and_a_map_per_head(tmp_path, heads):
    image = torch.rand(3, 32, 32)
    view = attend(PatchFeatures(heads=heads), image, (1, 2))
    figure = plots.attention_figure(image, view, regions_of(), "title")
    titles = [axis.get_title() for part in figure.subfigs for axis in part.axes]
    assert [title for title in titles if title] == [f"head {head}" for head in view.order] * 2
    if heads == 3:
        save(figure, tmp_path / "a.png")


def test_regions_of_a_padded_picture_are_cut():
    """With 28 pixels and a stride of 8 the fourth column has 4 pixels."""
    image, regions = torch.rand(3, 28, 28), Regions((4, 4), (28, 28), (8, 8))
    view = view_attention(torch.full((1, 16, 16), 1 / 16), (4, 4), (1, 3))
    figure = plots.attention_figure(image, view, regions, "title")
    for part in figure.subfigs[1:3]:
        (axis,) = (axis for axis in part.axes if axis.images)
        assert axis.images[-1].get_extent() == [-0.5, 31.5, 31.5, -0.5]
        assert (axis.get_xlim(), axis.get_ylim()) == ((-0.5, 27.5), (27.5, -0.5))
        (box,) = axis.patches
        assert (box.get_xy(), box.get_width(), box.get_height()) == ((23.5, 7.5), 4, 8)


def test_score_figure(tmp_path):
    score = correspondence.evaluate_correspondence(PatchFeatures(), [torch.rand(2, 3, 32, 32)])
    scores = {f"model {i}": dataclasses.replace(score, accuracy=i / 10) for i in range(9)}
    figure = plots.score_figure(scores)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(scores)
    save(figure, tmp_path / "scores.svg")
