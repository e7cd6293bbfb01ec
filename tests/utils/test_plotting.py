"""Figures are the same in every program that draws them."""

import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from frugalvit.comparison.chart import comparison_figure
from frugalvit.probing.figures import neighbours_figure
from frugalvit.utils.plotting import save

IMAGE = np.zeros((8, 8, 3), np.uint8)
THEIRS = {
    "text.usetex": True,
    "font.size": 30,
    "axes.facecolor": "black",
    "savefig.facecolor": "black",
    "lines.linewidth": 9,
}


def draw(folder: Path, name: str) -> tuple[bytes, bytes]:
    sheet, chart = folder / f"{name}_sheet.png", folder / f"{name}_chart.png"
    save(neighbours_figure(IMAGE, [IMAGE], ["one.png"]), sheet)
    save(comparison_figure({"a": [1.0, 2.0], "b": [2.0, 3.0]}, {"a": [], "b": []}, "top1"), chart)
    return sheet.read_bytes(), chart.read_bytes()


def test_settings_of_the_caller_change_no_figure(tmp_path: Path) -> None:
    plain = draw(tmp_path, "plain")
    with matplotlib.rc_context(THEIRS):
        assert draw(tmp_path, "theirs") == plain
        assert {name: matplotlib.rcParams[name] for name in THEIRS} == THEIRS


@pytest.mark.parametrize("name", ["花.png", "\u0915.png"])
def test_missing_letters_are_no_warning(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(neighbours_figure(IMAGE, [IMAGE], [name]), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0
