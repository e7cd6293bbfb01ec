"""The chart of a comparison: curves, final values, legend."""

import math
from pathlib import Path

import pytest
from PIL import Image

from frugalvit.comparison.chart import Curve, comparison_figure
from frugalvit.utils.plotting import save

NAMES = {
    "two": ["with", "without"],
    "long": [f"optimizer.weight_decay=0.0{n} localization.weight=0.{n}" for n in range(3)],
    "many": [f"setting_{n}" for n in range(20)],
    "endless": ["x" * 300, "short"],
}


def make_curves(names: list[str]) -> tuple[dict[str, list[float]], dict[str, list[Curve]]]:
    curves = {
        name: [[(float(x), 50 + 50 * math.sin(x / 2 + k + seed)) for x in range(20)] for seed in range(3)]
        for k, name in enumerate(names)
    }
    return {name: [curve[-1][1] for curve in group] for name, group in curves.items()}, curves


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_the_legend_is_outside_the_axes(names: list[str]) -> None:
    figure = comparison_figure(*make_curves(names), "top1", ("on val", "on test"))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    for text, name in zip(legend.get_texts(), names, strict=True):
        assert name[:60] in text.get_text()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    styles = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in legend.get_lines()}
    assert len(styles) == len(names), "every setting has its own line style"
    assert [axes.get_ylabel() for axes in figure.axes] == ["on val", "on test"]
    assert len(figure.axes[1].get_xticks()) == len(names)


def test_short_and_missing_curves() -> None:
    figure = comparison_figure({"a": [1.0], "b": [2.0]}, {"a": [[(5.0, 1.0)]], "b": [[]]}, "miou")
    assert figure.axes[0].get_lines()[0].get_marker() == "o", "a single point is visible"


def test_dollar_signs_are_not_math(tmp_path: Path) -> None:
    save(comparison_figure(*make_curves(["$\\no$", "b$"]), "top1"), tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.width > 1000
