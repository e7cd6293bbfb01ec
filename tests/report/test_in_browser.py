"""Pages in a headless Chromium: pointer, keys, read-outs, themes."""

import pytest

from frugalvit.report import html as page
from frugalvit.report import svg_charts
from frugalvit.visualization.explorer_data import Picture, gather
from helpers.fake_backbones import PaddedPositions, PatchFeatures
from helpers.report_samples import picture, write_run

READY = "document.querySelector('.explorer').dataset.ready === 'yes'"
# The content of a canvas.
SHOWN = "document.querySelectorAll('.pane canvas')[{}].toDataURL()"


class Examples:
    names = ("one.jpg", "two.jpg")

    def __len__(self):
        return 2

    def read(self, index):
        return picture(index, 120, 160)


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    models = [("swin", PatchFeatures((96, 96), cell=12, heads=4)), ("vit", PatchFeatures((96, 96), cell=8, heads=2))]
    data = gather(
        models, [Picture("first", picture(0)), Picture("<b>second</b>", picture(1)), Picture("c", picture(2))]
    )
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    path.write_text(page.explorer(data, "explorer <i>"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "run", classes=("<script>alert(1)</script>", "dog", "bird"))
    return page.write_report([run], folder / "report.html", model=PatchFeatures((96, 96), 12), examples=Examples())


def centre_of_region(browser, pane, row, column, grid):
    box = browser.value(
        f"(() => {{ const c = document.querySelectorAll('.pane canvas')[{pane}]; c.scrollIntoView({{block: 'center'}});"
        f"const b = c.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    )
    return box[0] + (column + 0.5) * box[2] / grid, box[1] + (row + 0.5) * box[3] / grid


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_open_without_errors_or_requests(browser, explorer, report, width, dark):
    for path in (explorer, report):
        browser.open(path, width=width, dark=dark)
        browser.wait_for(READY)
        assert browser.complaints() == []
        assert browser.requests() == []
        assert browser.value("document.documentElement.scrollWidth") == width
        colours = ["rgb(252, 251, 249)", "rgb(21, 23, 27)"]
        background = "getComputedStyle(document.body).backgroundColor"
        assert browser.value(background) == colours[dark]
        browser.value("document.getElementById('theme').click()")
        assert browser.value(background) == colours[not dark]


def test_hovering_a_region_changes_the_heat_map(browser, explorer):
    browser.open(explorer)
    browser.wait_for(READY)
    browser.move(*centre_of_region(browser, 0, 1, 2, 8))
    browser.wait_for("document.querySelector('.explorer').dataset.region === '10'")
    before = browser.value(SHOWN.format(1)), browser.value("document.querySelector('.heads canvas').toDataURL()")
    browser.move(*centre_of_region(browser, 0, 6, 5, 8))
    browser.wait_for("document.querySelector('.explorer').dataset.region === '53'")
    after = browser.value(SHOWN.format(1)), browser.value("document.querySelector('.heads canvas').toDataURL()")
    assert before[0] != after[0] and before[1] != after[1]
    # The second image works the same way.
    browser.move(*centre_of_region(browser, 1, 2, 2, 8))
    browser.wait_for("document.querySelector('.explorer').dataset.pane === '1'")
    assert browser.complaints() == []


def test_regions_of_a_padded_grid_are_found(browser, tmp_path):
    """84 pixels are five regions of 16 and a sixth of 4 pixels."""
    data = gather([("m", PaddedPositions((84, 84), cell=16, heads=1))], [Picture("a", picture(0))])
    (tmp_path / "page.html").write_text(page.explorer(data, "padded"), encoding="utf-8")
    browser.open(tmp_path / "page.html")
    browser.wait_for(READY)
    for pixel, region in ((79, "28"), (81, "35"), (17, "7")):
        position = (pixel + 0.5) / 84 - 0.5  # in a grid of one region, whose centre is 0.5
        browser.move(*centre_of_region(browser, 0, position, position, 1))
        browser.wait_for(f"document.querySelector('.explorer').dataset.region === '{region}'")
    assert browser.complaints() == []


def test_best_match_is_shown(browser, explorer):
    data = "JSON.parse(document.querySelector('.explorer script').textContent).models[0].best"
    browser.open(explorer, fragment="#explorer=0,3,4")
    browser.wait_for(READY)
    assert browser.value("document.querySelector('.explorer').dataset.region") == "28"
    best = browser.value(f"{data}['0-1'][28]")
    assert browser.value("+document.querySelector('.explorer').dataset.best") == best
    row, column = divmod(best, 8)
    assert f"row {row + 1}, column {column + 1}" in browser.value(
        "document.querySelector('.explorer .readout').textContent"
    )


def test_keys_move_and_switch(browser, explorer):
    browser.open(explorer, fragment="#explorer=0,0,0")
    browser.wait_for(READY)
    browser.value("document.querySelector('.pane canvas').focus()")
    state = "document.querySelector('.explorer').dataset.region"
    for key, region in (("ArrowRight", "1"), ("ArrowDown", "9"), ("ArrowLeft", "8"), ("ArrowUp", "0"), ("End", "7")):
        browser.press(key)
        assert browser.value(state) == region
    picture_before = browser.value(SHOWN.format(0))
    browser.press("]")
    assert browser.value("document.querySelectorAll('.heads [aria-pressed=true]').length") == 1
    assert browser.value(SHOWN.format(0)) != picture_before
    browser.press("l")
    assert browser.value("document.querySelectorAll('.lines circle').length") == 20
    browser.press(".")
    assert "<b>second</b>" in browser.value("document.querySelector('.pane .name').textContent")
    browser.press("m")
    assert browser.value("document.querySelectorAll('.heads button').length") == 2
    assert browser.value("document.getElementById('explorer-model').value") == "1"
    assert browser.complaints() == []


def test_click_pins_the_region(browser, explorer):
    browser.open(explorer)
    browser.wait_for(READY)
    position = centre_of_region(browser, 0, 4, 4, 8)
    browser.move(*position)
    browser.click(*position)
    browser.move(*centre_of_region(browser, 0, 0, 0, 8))
    assert browser.value("document.querySelector('.explorer').dataset.region") == "36"
    assert "Pinned" in browser.value("document.querySelector('.explorer .readout').textContent")


def test_charts_show_values_under_the_pointer(browser, report):
    browser.open(report)
    svg = "document.querySelector('figure.chart > svg')"
    browser.value(f"{svg}.scrollIntoView({{block: 'center'}})")
    box = browser.value(
        f"(() => {{ const b = {svg}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    )
    readout = "document.querySelector('figure.chart .readout').textContent"
    browser.move(box[0] + box[2] * 0.3, box[1] + box[3] / 2)
    browser.wait_for(f"{readout}.startsWith('epoch')")
    first = browser.value(readout)
    assert "train" in first and "val" in first
    browser.move(box[0] + box[2] * 0.8, box[1] + box[3] / 2)
    browser.wait_for(f"{readout} !== {first!r}")


def test_no_value_beyond_the_end_of_a_run(browser, tmp_path):
    lines = [
        svg_charts.Series("short", 0, [(0.0, 1.0), (4.0, 2.0)]),
        svg_charts.Series("long", 1, [(0.0, 3.0), (10.0, 5.0)]),
    ]
    text = page.render("t", "", svg_charts.chart(svg_charts.Panel("Loss", "loss", "epoch", lines, False)))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "page.html")
    browser.value("document.querySelector('figure.chart > svg').focus()")
    browser.press("ArrowRight")
    readout = "document.querySelector('figure.chart .readout').textContent"
    assert browser.value(readout) == "epoch 10short –long 5"
    browser.press("ArrowLeft")
    assert browser.value(readout) == "epoch 4short 2long 3"
