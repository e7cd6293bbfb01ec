"""Accuracy against throughput and parameters (EsViT, Fig. 1): the chart of ``frugalvit bench --plot``."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from frugalvit.utils import palette
from frugalvit.utils.plotting import drawing


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
            axis.scatter(contender.throughput, contender.accuracy, s=area, color=palette.BLUE, alpha=0.45, linewidths=0)
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
            right.scatter(contender.parameters / 1e6, contender.accuracy, color=palette.BLUE, s=24, zorder=3)
            right.annotate(contender.name, (contender.parameters / 1e6, contender.accuracy), fontsize=7)
        right.set(xscale="log", xlabel="parameters (millions)", ylabel=f"blue: {accuracy} (%)")
        right.legend(title="linear on ImageNet-1K (paper)", frameon=False, fontsize=7, title_fontsize=7)
    return figure
