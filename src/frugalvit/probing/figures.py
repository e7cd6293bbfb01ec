"""Figures of the probes: nearest neighbours, the suite (EsViT, Fig. 5), accuracy against throughput (Fig. 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from frugalvit.errors import UserError
from frugalvit.utils import palette
from frugalvit.utils.files import make_folder
from frugalvit.utils.plotting import drawing

AHEAD, BEHIND = palette.BLUE, palette.RED
FORMATS = (".png", ".svg", ".pdf")


def check_figure_path(path: Path) -> None:
    """Raise an error if a figure cannot be written to a path, or would overwrite a file."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} must end with {', '.join(FORMATS)}.")
    if path.exists():
        raise UserError(f"{path} already exists: choose another name.")
    make_folder(path.parent)


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


@dataclass(frozen=True)
class Contender:
    """A model in Fig. 1."""

    name: str
    throughput: float  # images per second
    accuracy: float  # percent
    parameters: int


PAPER_POINTS = {
    "DINO": [(21, 77.0), (85, 78.2)],
    "MoCo-v3": [(85, 76.7), (632, 79.1)],
    "EsViT": [(28, 78.1), (49, 79.5), (87, 80.4)],
    "ConvNets": [(250, 79.6), (586, 78.5), (794, 79.8)],
}
"""Millions of parameters and accuracy of linear probes on ImageNet-1K: EsViT, Table 1, moderate sequence lengths."""


def tradeoff_figure(contenders: Sequence[Contender], accuracy: str, hardware: str) -> Figure:
    """Draw accuracy against throughput (left; area: parameters) and against parameters (right, with the paper's)."""
    with drawing():
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        axis, right = figure.subplots(1, 2)
        largest = max(contender.parameters for contender in contenders)
        for contender in contenders:
            area = 40 + 600 * contender.parameters / largest
            axis.scatter(contender.throughput, contender.accuracy, s=area, color=AHEAD, alpha=0.45, linewidths=0)
            label = f"{contender.name}\n{contender.parameters / 1e6:.1f} M"
            axis.annotate(label, (contender.throughput, contender.accuracy), fontsize=7, ha="center", va="center")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(0.2)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.set_xlabel(f"images / s ({hardware})")
        axis.set_ylabel(f"{accuracy} (%)")
        for number, (method, points) in enumerate(PAPER_POINTS.items()):
            marker = "osD^"[number]
            right.plot(*zip(*points, strict=True), color=palette.SERIES[-1], marker=marker, markersize=4, label=method)
        for contender in contenders:
            right.scatter(contender.parameters / 1e6, contender.accuracy, color=AHEAD, s=24, zorder=3)
            right.annotate(contender.name, (contender.parameters / 1e6, contender.accuracy), fontsize=7)
        right.set(xscale="log", xlabel="parameters (millions)", ylabel=f"blue: {accuracy} (%)")
        right.legend(title="linear on ImageNet-1K (paper)", frameon=False, fontsize=7, title_fontsize=7)
    return figure
