"""How a score is shown: usually in per cent, with what it was scored on, the number of images, interval and chance.

A summary holds a score under its key (``top1``), its 95 % interval under ``top1_interval``, and chance levels under
``chance``. AP and IoU are shares from 0 to 1 in summaries; people always read per cent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frugalvit.utils.intervals import wilson_interval
from frugalvit.utils.tables import Table
from frugalvit.utils.text import pluralize

_AP_SIZES = {"": "", "50": "50", "75": "75", "_small": ", small objects", "_medium": ", medium", "_large": ", large"}
SCORE_NAMES = {
    "top1": "top-1",
    "top5": "top-5",
    "mean_per_class": "mean per class",
    **{f"{kind}_ap{key}": f"{kind} AP{size}" for kind in ("box", "mask") for key, size in _AP_SIZES.items()},
    "knn": "k-NN top-1",
    "map": "mAP",
    "map11": "11-point mAP",
    "f1": "F1",
    "r2": "R²",
    "mae": "mean absolute error",
    "rounded": "right if rounded",
    "miou": "mIoU",
    "single_scale_miou": "mIoU, single scale",
    "mean_accuracy": "mean accuracy",
    "pixel_accuracy": "pixel accuracy",
}
"""Scores by their key in a summary; the first one of a summary is its main score."""

_SIZES = ("_small", "_medium", "_large")

_IMAGE_COUNTS = ("top1", "top5", "knn")
"""Scores that are a share of the images, so that their interval follows from value and count."""


@dataclass(frozen=True)
class Score:
    """A score, usually in per cent, and what it was measured on.

    interval: 95 %, from low to high; None if unknown
    chance:   the score of a model that does not look at the images; None if unknown
    chosen:   True if the same images chose the weights, so that the score is too high; None if unknown
    """

    name: str
    value: float
    split: str
    images: int
    interval: tuple[float, float] | None = None
    chance: float | None = None
    chosen: bool | None = None

    def __str__(self) -> str:
        """Return the score in one line, with everything that a reader needs to judge it."""
        chance = "" if self.chance is None else f"; chance {self.show(self.chance)}"
        return f"{self.name} {self.show(self.value)} ({self.interval_text}) on {self.scored_on}{chance}"

    @property
    def unit(self) -> str:
        return "" if self.name == SCORE_NAMES["mae"] else " %"

    def show(self, *values: float) -> str:
        """Return a value, or a range, with the unit."""
        return " to ".join(f"{value:.1f}" if self.unit else f"{value:.3g}" for value in values) + self.unit

    @property
    def interval_text(self) -> str:
        return f"95 %: {self.show(*self.interval).removesuffix(self.unit)}" if self.interval else "no interval"

    @property
    def scored_on(self) -> str:
        """Return the split and the number of images in words."""
        note = "" if self.chosen is None or self.split == "test" else ", not used to train or to choose the weights"
        note = ", which also chose the weights" if self.chosen else note
        text = f"{pluralize(self.images, 'image')} of {self.split}{note}"
        return text.replace("of train, held out", "held out of train")


def as_percent(key: str, value: float) -> float:
    """Return a score of a summary in per cent."""
    is_share = key.removeprefix("val_") in SCORE_NAMES and ("_ap" in key or "miou" in key or key.endswith("_accuracy"))
    return 100 * value if is_share else value


def is_percent(key: str) -> bool:
    """True for a score that is shown in per cent; a fact of a run is no score."""
    return key.removeprefix("val_") in SCORE_NAMES and key != "mae"


def main_score(summary: Mapping[str, Any]) -> str:
    return next((key for key in SCORE_NAMES if key in summary), "top1")


def share_interval(percent: float, images: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of the images, in per cent."""
    return wilson_interval(round(percent * images / 100), images)


def read_scores(summary: Mapping[str, Any]) -> list[Score]:
    """Return the scores of a summary, the main one first; no top-5 for five classes or fewer, and no value twice."""
    images, split = int(summary.get("scored_images") or 0), str(summary.get("scored_on", "val"))
    chosen = summary["chosen_on"] == split if "chosen_on" in summary else None
    scores: list[Score] = []
    for key, name in SCORE_NAMES.items():
        value = summary.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        value, chance = as_percent(key, value), (summary.get("chance") or {}).get(key)
        same = "top1" if key == "mean_per_class" else key.rpartition("_")[0] if key.endswith(_SIZES) else ""
        is_repeated = same in summary and abs(as_percent(same, summary[same]) - value) < 0.05
        if is_repeated or (key == "top5" and (chance or 0) >= 100):
            continue
        interval = summary.get(f"{key}_interval")
        if interval is not None:
            interval = as_percent(key, interval[0]), as_percent(key, interval[1])
        elif key in _IMAGE_COUNTS and images:
            interval = share_interval(value, images)
        scores.append(
            Score(name, value, split, images, interval, None if chance is None else as_percent(key, chance), chosen)
        )
    return scores


def score_table(scores: list[Score], title: str = "") -> Table:
    """Return scores as a table: value, 95 % interval, chance level. The title says what they were scored on."""
    title = title or (scores[0].scored_on if scores else "")
    rows: list[list[object]] = [
        [
            score.name,
            score.show(score.value),
            "-" if score.interval is None else score.show(*score.interval),
            "-" if score.chance is None else score.show(score.chance),
        ]
        for score in scores
    ]
    return Table(["score", "value", "95 % interval", "chance"], rows, title)
