import itertools

import numpy as np
import pytest
from matplotlib import colormaps

from frugalvit.utils import palette


def linear(colour):
    parts = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


# Viénot, Brettel and Mollon (1999): what people without red or green cones see, in linear RGB.
DICHROMATS = {
    "protan": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
    "deutan": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
}


def test_heat_is_viridis():
    table = np.frombuffer(palette.heat_bytes(), dtype=np.uint8).reshape(256, 3)
    assert np.abs(table / 255 - colormaps["viridis"](range(256))[:, :3]).max() < 0.03


@pytest.mark.parametrize("matrix", DICHROMATS.values(), ids=DICHROMATS.keys())
@pytest.mark.parametrize("colours", [palette.SERIES, palette.SERIES_ON_DARK], ids=["light", "dark"])
def test_the_first_six_series_differ_for_dichromats(matrix, colours):
    seen = [matrix @ linear(colour) for colour in colours[:6]]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.03


def test_series_contrast_with_the_page():
    def contrast(a, b):
        light, dark = sorted((luminance(a), luminance(b)), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    assert min(contrast(colour, "#fcfbf9") for colour in palette.SERIES) > 2.9
    assert min(contrast(colour, "#15171b") for colour in palette.SERIES_ON_DARK) > 4.5
