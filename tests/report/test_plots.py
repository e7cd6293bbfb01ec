from __future__ import annotations

import dataclasses

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from frugalvit import palette
from frugalvit.figures import save
from frugalvit.lens import attention, correspondence
from frugalvit.lens.views import model_input
from frugalvit.report import plots
from lens.stand_ins import PatchFeatures


def matched(title, height=32, width=48):
    backbone = PatchFeatures((height, width))
    image = torch.rand(3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (backbone(model_input(backbone, view[None])) for view in (image, image.flip(2)))
    return plots.MatchedViews(title, image, image.flip(2), correspondence.correspond(first, second))


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_correspondences_in_every_format_and_twice_the_same(tmp_path, kind):
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path in paths:
        save(plots.correspondence_figure([matched("a $ sign"), matched("other")]), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    if kind == "png":
        assert Image.open(paths[0]).width > 800


def test_pictures_keep_their_room():
    figure = plots.correspondence_figure([matched("one", 32, 32)])
    FigureCanvasAgg(figure).draw()
    boxes = [axis.get_window_extent() for axis in figure.axes]
    assert sum(box.width for box in boxes) > 0.85 * figure.bbox.width


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_attention_shows_every_head_twice(tmp_path, heads):
    image = torch.rand(3, 32, 32)
    view = attention.attend(PatchFeatures(heads=heads), image, (1, 2))
    figure = plots.attention_figure(image, view, "title", 0.6)
    titles = [axis.get_title() for part in figure.subfigs for axis in part.axes]
    assert [title for title in titles if title] == [f"head {head}" for head in view.order] * 2
    if heads == 3:
        save(figure, tmp_path / "a.png")


def test_scores_of_several_models(tmp_path):
    score = correspondence.evaluate_correspondence(PatchFeatures(), [torch.rand(2, 3, 32, 32)])
    scores = {f"model {i}": dataclasses.replace(score, accuracy=i / 10) for i in range(9)}
    figure = plots.score_figure(scores)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(scores)
    save(figure, tmp_path / "scores.svg")


def test_probes_and_reports_draw_alike(tmp_path):
    from frugalvit.probing import figures

    assert (figures.AHEAD, figures.BEHIND) == (palette.BLUE, palette.RED)
    drawn = figures.suite_figure(["a $ sign"], [50.0], None, "title")
    for name in ("a", "b"):
        save(drawn, tmp_path / "new" / f"{name}.SVG")
    assert (tmp_path / "new" / "a.SVG").read_bytes() == (tmp_path / "new" / "b.SVG").read_bytes()
