"""Figures of the probes: nearest neighbours, and the suite (EsViT, Fig. 5)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from frugalvit.utils import palette
from frugalvit.utils.plotting import drawing

AHEAD, BEHIND = palette.BLUE, palette.RED


def neighbours_figure(query: np.ndarray, neighbours: Sequence[np.ndarray], captions: Sequence[str]) -> Figure:
    """Draw the query image, then its neighbours, the nearest first; images are uint8 (H, W, 3)."""
    columns = max(1, min(5, len(neighbours)))
    rows = -(-len(neighbours) // columns)
    with drawing():
        figure = Figure(figsize=(1.6 * (columns + 1), 1.9 * rows), layout="constrained")
        axes = figure.subplots(rows, columns + 1, squeeze=False)
        for axis in axes.flat:
            axis.axis("off")
        axes[0, 0].imshow(query)
        axes[0, 0].set_title("query", fontsize=8, color=AHEAD, fontweight="bold")
        for number, (image, caption) in enumerate(zip(neighbours, captions, strict=True)):
            axis = axes[number // columns, number % columns + 1]
            axis.imshow(image)
            axis.set_title(caption, fontsize=7)
    return figure


def suite_figure(names: Sequence[str], scores: Sequence[float], others: Sequence[float] | None, title: str) -> Figure:
    """Draw one bar per dataset, sorted: the score, or the difference from another model (EsViT, Fig. 5)."""
    values = list(scores) if others is None else [a - b for a, b in zip(scores, others, strict=True)]
    order = sorted(range(len(values)), key=lambda i: values[i])
    values = [values[i] for i in order]
    with drawing():
        figure = Figure(figsize=(5.4, 0.9 + 0.24 * len(values)), layout="constrained")
        axis = figure.subplots()
        colours = [AHEAD if value >= 0 else BEHIND for value in values]
        bars = axis.barh(range(len(values)), values, color=colours, height=0.7)
        number = "{:.1f}" if others is None else "{:+.1f}"
        axis.bar_label(bars, [number.format(value) for value in values], padding=3, fontsize=7)
        axis.set_yticks(range(len(values)), [names[i] for i in order])
        axis.axvline(0, color="black", linewidth=0.8)
        axis.margins(x=0.15)
        axis.set_xlabel("score (%)" if others is None else "difference in score (points)")
        axis.set_title(title, loc="left", fontsize=9)
    return figure
