"""The chart of a comparison: legend, labels and dots stay visible."""

import itertools
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from frugalvit.comparison.chart import Curve, comparison_chart, comparison_figure, sideways

NAMES = {
    "two": ["with", "without"],
    "four": ["EsViT + Drloc", "EsViT", "Drloc", "from scratch"],
    "three": ["EsViT", "supervised", "random"],
    "wide": ["EsViT + Drloc", "EsViT"],
    "long": [f"optimizer.weight_decay=0.0{n} localization.weight=0.{n}" for n in range(3)],
    "many": [f"setting_{n}" for n in range(8)],
    "sixteen": [f"{n}0 epochs, windows of 4, half mixed" for n in range(16)],
    "endless": ["x" * 300, "short"],
}


def made(names: list[str]) -> tuple[dict[str, list[float]], dict[str, list[Curve]]]:
    """Curves that fill the whole chart, so that there is no free corner."""
    curves = {
        name: [[(float(x), 50 + 50 * math.sin(x / 2 + k + seed)) for x in range(20)] for seed in range(3)]
        for k, name in enumerate(names)
    }
    return {name: [curve[-1][1] for curve in found] for name, found in curves.items()}, curves


def drawn(names: list[str]) -> Figure:
    figure = comparison_figure(*made(names), "top1")
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_the_legend_is_outside_the_axes(names: list[str]) -> None:
    figure = drawn(names)
    (legend,) = figure.legends
    place = legend.get_window_extent()
    for text, name in zip(legend.get_texts(), names, strict=True):
        assert name[:60] in text.get_text()
    assert not any(place.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert place.x0 >= 0 and place.x1 <= figure.bbox.x1 and place.y1 <= figure.bbox.y1
    assert min(axes.get_window_extent().height for axes in figure.axes) > 0.4 * figure.bbox.height


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_every_mean_has_a_tick_label(names: list[str]) -> None:
    """By its name, or by the number it has in the legend; no two run into each other."""
    figure = drawn(names)
    feet = figure.axes[1].get_xticklabels()
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    for foot, text in zip(feet, told, strict=True):
        assert text == foot.get_text() or text.startswith(f"{foot.get_text()}  ")
    if not feet[0].get_rotation():
        places = [foot.get_window_extent() for foot in feet]
        assert all(first.x1 + 3 < second.x0 for first, second in itertools.pairwise(places))


@pytest.mark.parametrize("names", [["a", "b"], NAMES["many"]])
def test_no_legend_without_curves(names: list[str]) -> None:
    figure = comparison_figure({name: [1.0] for name in names}, {name: [[]] for name in names}, "miou")
    assert len(figure.legends) == (len(names) > 2)


def test_more_settings_than_colors_differ() -> None:
    (legend,) = drawn([f"setting_{n}" for n in range(20)]).legends
    styles = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in legend.get_lines()}
    assert len(styles) == 20


def test_a_curve_of_one_point_has_a_marker() -> None:
    figure = comparison_figure({"a": [1.0], "b": [2.0]}, {"a": [[(5.0, 1.0)]], "b": [[(5.0, 2.0)]]}, "miou")
    assert [line.get_marker() for line in figure.axes[0].get_lines()] == ["o", "o"]


def test_axis_labels() -> None:
    values, curves = made(["a", "b"])
    for labels, told in ((None, ["top1", "final top1"]), (("on val", "on test"), ["on val", "on test"])):
        assert [axes.get_ylabel() for axes in comparison_figure(values, curves, "top1", labels).axes] == told


@pytest.mark.parametrize("values", [[100.0] * 4, [99.0, 100.0], [0.0, 0.5]])
@pytest.mark.parametrize(("metric", "ends"), [("top1", True), ("seconds", False)])
def test_percentages_end_at_100(values: list[float], metric: str, ends: bool) -> None:
    figure = comparison_figure({"a": values, "b": values}, {"a": [[*enumerate(values)]], "b": [[]]}, metric)
    inside = [axes.get_ylim()[0] >= 0 and axes.get_ylim()[1] <= 100 for axes in figure.axes]
    assert inside == [ends, ends]


@pytest.mark.parametrize("values", [[50.0] * 2, [50.0] * 9, [50.0, 50.001, 70.0], [50.0, 60.0, 70.0]])
def test_equal_values_are_drawn_side_by_side(values: list[float]) -> None:
    aside = sideways(values, reach=0.5)
    assert max(map(abs, aside)) <= 0.3 and sum(aside) == pytest.approx(0)
    for (one, first), (two, second) in itertools.combinations(zip(values, aside, strict=True), 2):
        assert abs(one - two) > 0.5 or abs(first - second) > 0.05
    assert all(where == 0 for value, where in zip(values, aside, strict=True) if value > 50.5)


def test_dollar_signs_are_not_math(tmp_path: Path) -> None:
    values, curves = made(["$\\no$", "b$"])
    comparison_chart(values, curves, "top1", tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.width > 1000
