"""Colours, defined once for figures and pages: told apart by colour-blind readers and in grey print.

Series take Okabe and Ito's colours, ordered so that neighbours differ in lightness too, and each has its own dash.
Heat maps take viridis, whose lightness rises evenly.
"""

from __future__ import annotations

SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0588a", "#8a6d00", "#3a9bd9", "#555555", "#e69f00")
SERIES_ON_DARK = ("#56a8e0", "#ff8a3d", "#2fc49b", "#e29bc4", "#d9c14a", "#8fd0ff", "#b9b9b9", "#ffbf3f")
DASHES = ((), (6, 3), (2, 2.5), (8, 3, 2, 3), (4, 2), (1, 2), (10, 4), (6, 2, 1, 2, 1, 2))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "ooo", "+++")

BLUE, RED, YELLOW = "#0072b2", "#d55e00", "#f0e442"
"""Marks of the paper's Figure 6: own global feature, other view's global feature, lines."""

HEAT = (
    "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26",
    "#fde725",
)  # fmt: skip
"""Viridis at eleven even steps; between them colours are interpolated."""


def heat_bytes() -> bytes:
    """The heat colours as 256 RGB triples."""
    stops = [tuple(bytes.fromhex(colour[1:])) for colour in HEAT]
    table = bytearray()
    for level in range(256):
        place = level / 255 * (len(stops) - 1)
        index = min(int(place), len(stops) - 2)
        share = place - index
        table += bytes(round(a + (b - a) * share) for a, b in zip(stops[index], stops[index + 1], strict=True))
    return bytes(table)


def css_variables() -> tuple[str, str]:
    """The series' colours as CSS custom properties, for light and for dark pages."""
    light = "".join(f"--series-{i}:{colour};" for i, colour in enumerate(SERIES))
    dark = "".join(f"--series-{i}:{colour};" for i, colour in enumerate(SERIES_ON_DARK))
    return light, dark


def dash(index: int) -> str:
    """The SVG dash pattern of a series."""
    return " ".join(f"{length:g}" for length in DASHES[index % len(DASHES)])
