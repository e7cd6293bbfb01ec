"""Curves as inline SVG."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.report import svg_charts
from frugalvit.report.run_record import read_run
from helpers.report_samples import write_run


@pytest.mark.parametrize(
    ("metric", "heading"),
    [
        ("cross_entropy", "Loss"),
        ("localization", "Loss"),
        ("region_loss", "Loss"),
        ("top1", "Score"),
        ("knn", "k-NN"),
        ("localization_error", "Localization error"),
        ("lr", "Schedules"),
        ("region_teacher_entropy", "Health"),
        ("feature_deviation", "Health"),
        ("region_agreement", "Health"),
        ("something", "Other"),
    ],
)
def test_every_metric_has_a_heading(metric, heading):
    assert svg_charts.heading_of(metric) == heading


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low, span):
    span = max(span, 1e-6 * abs(low))
    high = low + span
    ticks = svg_charts.ticks(low, high)
    assert len(ticks) <= 6
    assert all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in ticks)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 2.5, 5.0], ["0.0", "2.5", "5.0"]),
        ([100.001, 100.002], ["100.001", "100.002"]),
        ([0.0, 2.5e-4, 5e-4], ["0", "0.00025", "0.0005"]),
        ([0.0, 100000.0], ["0", "1e+05"]),
        ([1000.0, 2000.0], ["1,000", "2,000"]),
        ([], []),
    ],
)
def test_tick_texts_differ(values, texts):
    assert svg_charts.tick_texts(values) == texts


def test_log_ticks():
    assert svg_charts.log_ticks(-2, 3) == [0.01, 0.1, 1, 10, 100, 1000]
    assert svg_charts.log_ticks(0, 1) == [1, 2, 5, 10]


def panel(curve, label="a<b>"):
    return svg_charts.Panel("Loss <b>", "loss <b>", "epoch", [svg_charts.Series(label, 0, curve)], False)


@pytest.mark.parametrize(
    ("heading", "values", "ends"),
    [("Score", (60.0, 100.0), True), ("k-NN", (99.0, 100.0), True), ("Loss", (60.0, 100.0), False)],
)
def test_percentages_end_at_100(heading, values, ends):
    text = svg_charts.chart(
        svg_charts.Panel(heading, "top1", "epoch", [svg_charts.Series("a", 0, [*enumerate(values)])], False)
    )
    points = re.search(r'points="([^"]*)"', text)[1].split()
    tops = [float(point.partition(",")[2]) for point in points]
    assert (min(tops) == 10.0) is ends  # the frame's upper edge


@pytest.mark.parametrize(
    "curve",
    [
        [(0.0, 1.0)],
        [(0.0, 0.0), (1.0, 0.0)],
        [(0.0, -3.0), (5.0, 4.0)],
        [(float(x), 10.0 ** (-x)) for x in range(6)],
        [(float(x), math.sin(x)) for x in range(2000)],
    ],
)
def test_charts_are_well_formed(curve):
    text = svg_charts.chart(panel(curve))
    assert "<b>" not in text
    svg = re.search(r"<svg viewBox.*?</svg>", text)
    assert svg is not None
    root = ElementTree.fromstring(svg[0])
    for polyline in root.iter("polyline"):
        for point in polyline.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= svg_charts.WIDTH and 0 <= y <= svg_charts.HEIGHT
    data = json.loads(re.search(r"<script[^>]*>(.*?)</script>", text)[1])
    assert data["series"][0]["label"] == "a<b>"
    assert data["series"][0]["y"][-1] == pytest.approx(curve[-1][1], rel=1e-4)


def test_splits_of_one_kind_share_a_panel(tmp_path):
    record = read_run(write_run(tmp_path / "run"))
    panels = {panel.title: panel for panel in svg_charts.panels([record])}
    assert [series.label for series in panels["loss"].series] == ["train", "val"]
    assert [series.style for series in panels["loss"].series] == [0, 1]


def test_several_kinds_have_a_panel_per_split(tmp_path):
    runs = [read_run(write_run(tmp_path / f"{w}_{s}", seed=s, weight=w)) for w in (0.0, 0.5) for s in (0, 1)]
    panels = {panel.title: panel for panel in svg_charts.panels(runs)}
    assert {"loss (train)", "loss (val)", "top-1"} <= set(panels)
    series = panels["top-1"].series
    assert [(line.weight, line.style) for line in series] == [
        ("faint", 0),
        ("faint", 0),
        ("mean", 0),
        ("faint", 1),
        ("faint", 1),
        ("mean", 1),
    ]
    first, second, mean = (dict(line.curve) for line in series[:3])
    assert mean == {x: pytest.approx((first[x] + second[x]) / 2) for x in first}


def test_json_block_is_escaped():
    block = svg_charts.json_block({"name": "</script><script>alert(1)</script>\u2028"})
    assert block.count("<") == 2 and "\u2028" not in block
    inside = re.search(r">(.*)<", block)
    assert inside is not None and json.loads(inside[1])["name"].startswith("</script>")
