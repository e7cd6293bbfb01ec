"""Figures for papers: correspondences (Fig. 6), their scores (Fig. 8), attention (Fig. 7, 10 to 12)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch, Rectangle
from matplotlib.patheffects import Normal, Stroke
from torch import Tensor

from frugalvit.utils import palette
from frugalvit.utils.plotting import drawing
from frugalvit.visualization.attention import MASS, AttentionView
from frugalvit.visualization.correspondence import Correspondence, CorrespondenceScore
from frugalvit.visualization.grid import Regions

_BAR = 0.5  # inches of the colour bar below the maps

_OPEN: Any = {"linestyle": "none", "markerfacecolor": "none", "markeredgewidth": 1.8}
_OWN: Any = _OPEN | {"marker": "o", "markeredgecolor": palette.BLUE, "markersize": 13}
_OTHER: Any = _OPEN | {"marker": "^", "markeredgecolor": palette.RED, "markersize": 20}


@dataclass(frozen=True)
class MatchedViews:
    """One row of Figure 6: two views (3, H, W) in [0, 1], their matches, and their regions."""

    title: str
    first: Tensor
    second: Tensor
    matches: Correspondence
    regions: tuple[Regions, Regions]


def correspondence_figure(rows: Sequence[MatchedViews]) -> Figure:
    """Draw numbered lines between the most similar regions (EsViT, Fig. 6).

    A ring marks the region nearest its view's global feature, a triangle the one nearest the other view's.
    """
    with drawing():
        aspect = rows[0].first.shape[1] / rows[0].first.shape[2]
        figure = Figure(figsize=(6.4, len(rows) * (2.9 * aspect + 0.3) + 0.25), layout="constrained")
        axes = figure.subplots(len(rows), 2, squeeze=False)
        for row, (left, right) in zip(rows, axes, strict=True):
            left.set_title(row.title, loc="left", fontsize=8)
            for axis, image in ((left, row.first), (right, row.second)):
                _show(axis, image)
            _draw_pairs(left, right, row)
            for side, axis in enumerate((left, right)):
                for region, mark in ((row.matches.own[side], _OWN), (row.matches.other[side], _OTHER)):
                    y, x = _centre(region, row.regions[side])
                    # On the right axes like the numbers, and hollow, so that neither mark hides the other.
                    line = Line2D([x], [y], **mark, transform=axis.transData, zorder=6, clip_on=False)
                    line.set_path_effects([Stroke(linewidth=3.6, foreground="white"), Normal()])
                    line.set_in_layout(False)
                    right.add_artist(line)
        pair = {"marker": "o", "color": palette.YELLOW, "markeredgecolor": "black", "markersize": 6}
        key = [
            (Line2D([], [], **pair, linewidth=1.1), "matches, the most similar first"),
            (Line2D([], [], **_OWN | {"markersize": 8}), "nearest to its view's global feature"),
            (Line2D([], [], **_OTHER | {"markersize": 8}), "nearest to the other view's"),
        ]
        lines, texts = zip(*key, strict=True)
        figure.legend(lines, texts, frameon=False, fontsize=7, loc="outside lower center", ncols=len(key))
        return figure


def _draw_pairs(left: Any, right: Any, row: MatchedViews) -> None:
    """Draw lines between matched regions, with numbers at the ends: several regions may match one."""
    outline = [Stroke(linewidth=2.4, foreground="black"), Normal()]
    ends: dict[tuple[int, float, float], list[int]] = {}
    for pair in reversed(row.matches.pairs):
        y1, x1 = _centre(pair.first, row.regions[0])
        y2, x2 = _centre(pair.second, row.regions[1])
        line = ConnectionPatch(
            (x1, y1), (x2, y2), "data", "data", axesA=left, axesB=right, color=palette.YELLOW, linewidth=1.1, zorder=3
        )
        line.set_path_effects(outline)
        # Lines and numbers must not change the layout.
        line.set_in_layout(False)
        right.add_artist(line)
        for end in ((0, x1, y1), (1, x2, y2)):
            ends.setdefault(end, []).append(pair.rank)
    for (side, x, y), ranks in ends.items():
        # Numbers of the left axes are drawn on the right axes too, above the lines.
        shape = "circle,pad=0.15" if len(ranks) == 1 else "round,pad=0.2"
        bubble = {"boxstyle": shape, "facecolor": palette.YELLOW, "edgecolor": "black", "lw": 0.5}
        where: Any = {"xycoords": (left, right)[side].transData, "ha": "center", "va": "center", "zorder": 5}
        label = " ".join(map(str, sorted(ranks)))
        number = right.annotate(label, (x, y), fontsize=5.5, annotation_clip=False, bbox=bubble, **where)
        number.set_in_layout(False)


def attention_figure(image: Tensor, view: AttentionView, regions: Regions, title: str) -> Figure:
    """Draw the entropy of every head, the masks that hold most of the attention, and the maps.

    All maps share one colour scale, so that uniform heads look uniform. It follows the square root: otherwise one head
    with a single region would leave all others dark.
    """
    count = len(view.order)
    columns = min(count, 8)
    lines = -(-count // columns)
    aspect = image.shape[1] / image.shape[2]
    with drawing():
        rows = lines * (6.4 / columns * aspect + 0.16)
        figure = Figure(figsize=(6.8, 1.7 + 2 * rows + _BAR), layout="constrained")
        figure.suptitle(title, fontsize=8, x=0.01, ha="left")
        heights = [1.5, rows, rows, _BAR]
        scale = PowerNorm(0.5, 0, view.maps.max().item())
        top, masks, maps, bottom = np.ravel(np.array(figure.subfigures(4, 1, height_ratios=heights)))
        _entropy_bars(top, image, view, regions)
        for kind, part in (("mask", masks), ("map", maps)):
            part.supylabel(f"{100 * MASS:.0f} % mass" if kind == "mask" else "attention", fontsize=7)
            axes = part.subplots(lines, columns, squeeze=False).ravel()
            for axis in axes[count:]:
                axis.set_axis_off()
            for axis, head in zip(axes, view.order, strict=False):
                _show(axis, image, grey=True)
                _overlay(axis, view, head, kind, regions, scale)
                _draw_windows(axis, view, regions, 0.5)
                axis.set_title(f"head {head}", fontsize=6, pad=2)
                _mark_query(axis, view, regions)
        bar = bottom.colorbar(ScalarMappable(scale, "viridis"), cax=bottom.subplots(), orientation="horizontal")
        bar.set_label("share of a head's attention that a region gets", fontsize=6)
        bar.ax.tick_params(labelsize=6)
        return figure


def most_bits(view: AttentionView) -> float:
    """Return the entropy of uniform attention over all visible regions (in a Swin those of a window)."""
    return math.log2(max(2, view.reach))


def _entropy_bars(figure: Any, image: Tensor, view: AttentionView, regions: Regions) -> None:
    picture, bars = figure.subplots(1, 2, width_ratios=(1, 3))
    _show(picture, image)
    _draw_regions(picture, regions)
    _draw_windows(picture, view, regions)
    _mark_query(picture, view, regions, size=7)
    bars.bar(range(len(view.order)), [view.entropy[head].item() for head in view.order], 0.7, color=palette.BLUE)
    bars.set_xticks(range(len(view.order)), [str(head) for head in view.order], fontsize=6)
    uniform_bits = most_bits(view)
    bars.axhline(uniform_bits, color="black", linestyle=":", linewidth=1)
    text = f"{uniform_bits:.3g}: uniform attention"
    bars.annotate(text, (1, uniform_bits), (0, 2), ("axes fraction", "data"), "offset points", ha="right", fontsize=6)
    bars.set_ylim(0, 1.15 * uniform_bits)
    bars.set_ylabel("entropy (bits)", fontsize=7)
    bars.set_xlabel("head", fontsize=7)
    bars.tick_params(labelsize=6)


def _draw_windows(axis: Any, view: AttentionView, regions: Regions, width: float = 1.2) -> None:
    """Draw lines between neighbours that cannot attend to each other: the windows, with their shift."""
    (tall, wide), (across, down) = regions.cell, view.borders
    style = {"color": "white", "linewidth": width, "zorder": 2}
    for row, column in across.nonzero().tolist():
        axis.vlines((column + 1) * wide - 0.5, row * tall - 0.5, (row + 1) * tall - 0.5, **style)
    for row, column in down.nonzero().tolist():
        axis.hlines((row + 1) * tall - 0.5, column * wide - 0.5, (column + 1) * wide - 0.5, **style)


def _draw_regions(axis: Any, regions: Regions) -> None:
    style = {"color": "white", "linewidth": min(0.5, 7 / max(regions.grid)), "alpha": 0.6, "zorder": 2}
    axis.vlines([i * regions.cell[1] - 0.5 for i in range(1, regions.grid[1])], -0.5, regions.picture[0] - 0.5, **style)
    axis.hlines([i * regions.cell[0] - 0.5 for i in range(1, regions.grid[0])], -0.5, regions.picture[1] - 0.5, **style)


def _overlay(axis: Any, view: AttentionView, head: int, kind: str, regions: Regions, scale: PowerNorm) -> None:
    height, width = regions.extent
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    if kind == "map":
        weights = view.maps[head].numpy()
        axis.imshow(weights, cmap="viridis", norm=scale, alpha=0.7, extent=extent, interpolation="nearest")
    else:
        layer = np.zeros((*view.masks[head].shape, 4))
        layer[..., :3] = tuple(part / 255 for part in bytes.fromhex(palette.RED[1:]))
        layer[..., 3] = 0.65 * view.masks[head].numpy()
        axis.imshow(layer, extent=extent, interpolation="nearest")
    # The part of a region in the padding is not drawn.
    axis.set(xlim=(-0.5, regions.picture[1] - 0.5), ylim=(regions.picture[0] - 0.5, -0.5))


def score_figure(scores: Mapping[str, CorrespondenceScore]) -> Figure:
    """Draw accuracy and distance error of the top pairs, one bar per model, chance as a dotted line (Fig. 8)."""
    names, values, rows = list(scores), list(scores.values()), np.arange(len(scores))
    colours, hatches = (
        [cycle[row % len(palette.SERIES)] for row in rows] for cycle in (palette.SERIES, palette.HATCHES)
    )
    with drawing():
        figure = Figure(figsize=(6.4, 0.8 + 0.34 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axis, label, lengths, chances in (
            (left, "accuracy", [s.accuracy for s in values], [s.chance_accuracy for s in values]),
            (right, "distance error (pixels)", [s.error for s in values], [s.chance_error for s in values]),
        ):
            bars = axis.barh(rows, lengths, 0.7, color=colours, hatch=hatches, edgecolor="white")
            axis.bar_label(bars, [f"{length:.3g}" for length in lengths], padding=3, fontsize=7)
            axis.vlines(chances, rows - 0.42, rows + 0.42, "black", ":", linewidth=1.2)
            axis.set_xlabel(label)
            axis.margins(x=0.16)
        left.set_xlim(0, 1.15)
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        right.plot([], [], ":", color="black", linewidth=1.2, label="chance")
        figure.legend(frameon=False, fontsize=7, loc="outside upper right")
        return figure


def _show(axis: Any, image: Tensor, grey: bool = False) -> None:
    pixels = image.clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    if grey:
        pixels = np.repeat((pixels @ np.array([0.299, 0.587, 0.114]))[..., None], 3, axis=2)
    axis.imshow(pixels, interpolation="nearest" if max(pixels.shape) < 96 else "antialiased")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def _mark_query(axis: Any, view: AttentionView, regions: Regions, size: float = 3.5) -> None:
    if view.query is None:
        return
    y, x = _centre(view.query, regions)
    axis.plot(x, y, "o", color=palette.BLUE, markersize=size, markeredgecolor="white", markeredgewidth=0.6)
    height, width = (end - start for start, end in map(regions.span, (0, 1), view.query))
    axis.add_patch(
        Rectangle((x - width / 2, y - height / 2), width, height, fill=False, edgecolor="white", linewidth=0.5)
    )


def _centre(region: tuple[int, int], regions: Regions) -> tuple[float, float]:
    """Return the centre of a region in the coordinates of ``imshow``, where pixel 0 spans -0.5 to 0.5."""
    y, x = regions.centre(region)
    return y - 0.5, x - 0.5
