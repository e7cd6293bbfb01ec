"""Colours of figures and pages, distinguishable for colour-blind readers and in grey print.

Series have colours close to Okabe and Ito's, with neighbours of different lightness, and a dash pattern each.
Heat maps use viridis, whose lightness rises evenly.
"""

import numpy as np

SERIES = ("#0072b2", "#e06500", "#009e73", "#7a3b78", "#3a9bd9", "#222222", "#b58900", "#888888")
SERIES_ON_DARK = ("#56a8e0", "#ff8a3d", "#2fc49b", "#c58bd0", "#a9dcff", "#f0f0f0", "#e6c34d", "#8f959d")
DASHES = ((), (6, 3), (2, 2.5), (8, 3, 2, 3), (4, 2), (1, 2), (10, 4), (6, 2, 1, 2, 1, 2))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "ooo", "+++")

BLUE, RED, YELLOW = "#0072b2", "#d55e00", "#f0e442"
"""Marks of EsViT's Figure 6: own global feature, other view's global feature, lines."""

HEAT = (
    "#440154", "#48186a", "#472d7b", "#424086", "#3b528b", "#33638d", "#2c728e", "#26828e", "#21918c",
    "#1fa088", "#28ae80", "#3fbc73", "#5ec962", "#84d44b", "#addc30", "#d8e219", "#fde725",
)  # fmt: skip
"""Viridis at seventeen even steps; colours between them are interpolated."""


def heat_bytes() -> bytes:
    """Return the heat colours as 256 RGB triples."""
    stops = np.array([list(bytes.fromhex(colour[1:])) for colour in HEAT])
    levels = np.linspace(0, len(HEAT) - 1, 256)
    channels = [np.interp(levels, range(len(HEAT)), stops[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8).tobytes()


def css_variables() -> tuple[str, str]:
    """Return the series' colours as CSS custom properties, for light and for dark pages."""
    light = "".join(f"--series-{i}:{colour};" for i, colour in enumerate(SERIES))
    dark = "".join(f"--series-{i}:{colour};" for i, colour in enumerate(SERIES_ON_DARK))
    return light, dark


def colour(index: int) -> int:
    """Return the index of a series' colour."""
    return index % len(SERIES)


def dashes(index: int) -> tuple[float, ...]:
    """Return the dash pattern of a series; colour and dash together distinguish 64 series."""
    return DASHES[(index + index // len(SERIES)) % len(DASHES)]


def dash(index: int) -> str:
    """Return the dash pattern for SVG."""
    return " ".join(f"{length:g}" for length in dashes(index))
