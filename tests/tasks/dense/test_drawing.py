"""Drawings: names are readable, and every colour is in the legend."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.tasks.dense.drawing import colour, colours_of, draw_classes, draw_objects, with_legend


def test_boxes_at_the_edge_are_drawn_completely() -> None:
    picture = draw_objects(np.zeros((100, 100, 3), np.uint8), [{"label": 1, "bbox": [60, 60, 40, 40]}], ["a"], 100)
    pixels = np.asarray(picture)
    assert (pixels[99, 60:] == colour(1)).all() and (pixels[60:, 99] == colour(1)).all()


def test_small_images_are_enlarged_without_mixing_classes() -> None:
    labels = np.zeros((20, 30), np.uint8)
    labels[:, 15:] = 2
    drawn = draw_classes(np.zeros((20, 30, 3), np.uint8), labels, strength=1, enlarge=90)
    assert drawn.size == (90, 60)
    assert {tuple(pixel) for pixel in np.asarray(drawn).reshape(-1, 3)} == {colour(0), colour(2)}
    assert draw_classes(np.zeros((20, 30, 3), np.uint8), None, enlarge=90).size == (90, 60)
    assert draw_classes(np.zeros((200, 300, 3), np.uint8), None, enlarge=90).size == (300, 200)


def test_a_legend_has_the_colours_in_the_image() -> None:
    classes = ["ground", "square", "a name that takes much room", "another one that does"]
    full = with_legend(Image.new("RGB", (300, 40)), [0, 2, 3, 255], classes)
    strip = np.asarray(full)[40:]
    shades = {tuple(pixel) for pixel in strip.reshape(-1, 3)}
    assert {colour(0), colour(2), colour(3), (90, 90, 90)} <= shades and colour(1) not in shades
    one = with_legend(Image.new("RGB", (300, 40)), [0], classes)
    assert full.height > one.height > 40 and full.width == 300  # several lines, one line


def test_colours_are_in_json_and_report(
    segmenter: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(scenes / "images" / "val" / "0.png"), "--out", str(tmp_path / "found"), "--device", "cpu"]
    assert main(["segment", "predict", str(segmenter), *words, "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["colours"] == colours_of(result["classes"]) and len(set(result["colours"].values())) == 3
    with Image.open(tmp_path / "found" / "0.jpg") as picture:
        assert picture.width == 480 and picture.height > 480  # enlarged, over its legend
    page = (segmenter / "report.html").read_text(encoding="utf-8")
    rows = re.findall(r'<th scope="row"><svg[^>]*><[^>]*fill="(#\w+)"/></svg> (\w+)</th>', page)
    assert rows and all(result["colours"][name] == shade for shade, name in rows)
