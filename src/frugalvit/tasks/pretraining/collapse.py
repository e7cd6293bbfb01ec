"""Health of a pre-training run: collapse alarms with the option to change, and k-NN.

On small data most label-free runs fail silently. Two collapses have clear signs (K prototypes, teacher outputs p_t):

    uniform         every image gets the same flat distribution: entropy H(p_t) and loss stay at ln K
    one prototype   every image gets the same sharp distribution: H(p_t) and the entropy of the mean output fall to 0

Views and regions have separate heads, so each level can collapse alone.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.data.loader import eval_batches
from frugalvit.engine.health import DEAD_RANK, Alarm, RunHealth, effective_rank, feature_deviation
from frugalvit.experiment.builders import EvalSet
from frugalvit.probing.knn import knn_accuracy
from frugalvit.utils.tables import Table

_PARTS = ("view_loss", "region_loss", "localization", "koleo")
"""The parts of the total loss; not every step has all of them."""

_FEW_PROTOTYPES = 10
"""With at most this many used prototypes a run may have collapsed, for any K: few crops use few of 65,536."""

_UNIFORM_GAP = 0.01
"""ln K minus the teacher's entropy, in nats, below which the teacher is uniform.

All measured runs that learned stayed above 0.16; teachers flattened on purpose reach 1e-6.
"""

_MIN_STAGNATION_STEP = 200  # before this step a constant loss is normal

_ADVICE = {
    "uniform collapse": "Lower matching.teacher_temp, raise --lr, lower matching.momentum, or use fewer "
    "matching.prototypes",
    "one-prototype collapse": "Raise matching.teacher_temp, lower matching.center_momentum, lower --lr, or try "
    "matching.centering sinkhorn",
    "divergence": "Lower --lr, lengthen optimizer.warmup, or lower optimizer.clip",
    "stagnation": "Raise --lr, lower matching.momentum, or stop here: more steps will not help",
    "dead features": "Lower --lr and lengthen optimizer.warmup; check the images with 'frugalvit data'",
    "worse features": "Raise matching.momentum, lower --lr or lengthen optimizer.warmup: the teacher changes too fast",
}
_ADVICE_WITHOUT_TEACHER = {
    "stagnation": "Raise --lr, or stop here: more steps will not help",
    "worse features": "Lower --lr, or lengthen optimizer.warmup",
}


class Level(NamedTuple):
    """A matching level: its name, what it matches, and the prefix of its metrics."""

    name: str
    items: str
    prefix: str


def _levels(metrics: Mapping[str, float]) -> list[Level]:
    """Return the levels in a metrics line. Without a view loss the region metrics have no prefix."""
    if "view_loss" not in metrics:
        return [Level("region", "regions", "")]
    return [Level("view", "images", ""), Level("region", "regions", "region_")]


@dataclass
class Health(RunHealth):
    """Checks the metrics of pre-training, or of distillation (``prototypes`` is 0)."""

    prototypes: int
    steps: int
    settled: int  # first step at which collapse can be detected: runs start with uniform outputs, a frozen last layer
    stop: bool = False
    series: defaultdict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """(step, value) of every metric."""
    losses: dict[frozenset[str], tuple[float, float, int]] = field(default_factory=dict)
    """For each combination of loss parts: the first and the lowest total loss, and the number of lines."""

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take one metrics line; return the new alarms. Non-finite values are ignored: the trainer counts steps."""
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, value in metrics.items():
            self.series[name].append((step, value))
        signs = {"divergence": self._diverged(metrics)}  # it also remembers the losses before ``settled``
        if step < self.settled:
            return []
        of_levels: dict[str, str | None] = {}
        for level in _levels(metrics):
            of_levels[f"uniform collapse ({level.name}s)"] = self._uniform(metrics, level)
            of_levels[f"one-prototype collapse ({level.name}s)"] = self._one_prototype(metrics, level)
        signs |= {"stagnation": self._stagnant(step, metrics), "dead features": self._dead_features(metrics)}
        signs = of_levels | signs | {"worse features": self._worse_features(metrics)}
        for name in (name for name, sign in signs.items() if sign == ""):
            self.counts[name] = 0
        advice = _ADVICE | ({} if self.prototypes else _ADVICE_WITHOUT_TEACHER)
        alarms = [Alarm(name, sign, advice[name.partition(" (")[0]]) for name, sign in signs.items() if sign]
        return [alarm for alarm in alarms if self._is_new(alarm)]

    @property
    def collapsed(self) -> bool:
        return any(
            name.startswith(("uniform collapse", "one-prototype collapse", "dead features")) for name in self.raised
        )

    # -- one check each: the sign of an alarm, "" if all is well, None if the line does not tell

    def _uniform(self, metrics: Mapping[str, float], level: Level) -> str | None:
        entropy, loss = metrics.get(f"{level.prefix}teacher_entropy"), metrics.get(f"{level.name}_loss")
        if entropy is None or loss is None:
            return None
        flat = math.log(self.prototypes)
        learns = flat - entropy > _UNIFORM_GAP and self._separates_images(metrics, level, flat)
        if entropy < 0.98 * flat or loss < 0.98 * flat or learns:
            return ""
        values = f"teacher entropy {entropy:.2f} and {level.name} loss {loss:.2f} stay at ln K = {flat:.2f}"
        return f"{values}: all {level.items} get the same output"

    def _separates_images(self, metrics: Mapping[str, float], level: Level, flat: float) -> bool:
        """True if the other level learns, or features stay spread: those of a random network shrink in a collapse."""
        other = "region_loss" if level.name == "view" else "view_loss"
        spread = [value for _, value in self.series["feature_deviation"]]
        return metrics.get(other, flat) < 0.9 * flat or (bool(spread) and spread[-1] > max(0.5, 0.9 * spread[0]))

    def _one_prototype(self, metrics: Mapping[str, float], level: Level) -> str | None:
        entropy = metrics.get(f"{level.prefix}teacher_entropy")
        used = metrics.get(f"{level.prefix}prototypes_used")
        if entropy is None or used is None:
            return None
        if used > max(1.5, min(0.02 * self.prototypes, _FEW_PROTOTYPES)) or entropy > 0.5:
            return ""
        share = f"{used:.1f} of {self.prototypes:,} prototypes"
        return f"teacher entropy {entropy:.3f}, and all {level.items} together use {share}"

    def _diverged(self, metrics: Mapping[str, float]) -> str | None:
        if "loss" not in metrics:
            return None
        # Compare only sums of the same parts: a part that joins later makes the sum larger.
        parts, now = frozenset(name for name in metrics if name in _PARTS), metrics["loss"]
        if self.losses and parts not in self.losses:  # this line averages steps with and without the new part
            self.losses[parts] = math.inf, math.inf, -1
            return None
        start, low, count = self.losses.get(parts, (now, now, 0))
        start, low, count = now if count < 0 else start, min(low, now), max(count, 0) + 1
        self.losses[parts] = start, low, count
        if count < 5:
            return None
        if now < start * 1.2 or now < low + 0.5 * abs(start):
            return ""
        return f"the loss is {now:.2f} after {low:.2f}, above its start ({start:.2f})"

    def _stagnant(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Tell if the loss did not move, and k-NN and rank did not rise from the first to the last third of the steps.

        The check reads all lines, so it runs less often as lines accumulate: otherwise a resume, which replays them,
        would take hours.
        """
        lines = len(self.series["loss"])
        is_early = step < max(0.5 * self.steps, _MIN_STAGNATION_STEP)
        if is_early or ("loss" in metrics and lines % max(1, lines // 200)):
            return None
        settled = [(at, value) for at, value in self.series["loss"] if at >= self.settled]
        if len(settled) < 9:
            return None
        moved, start = _swing([value for _, value in settled]), settled[0][0]
        if moved > 0.005 or any(value >= 99 for _, value in self.series["knn"][-1:]):
            return ""
        third = (step - start) / 3

        def mean(name: str, first: float, last: float) -> float:
            numbers = [value for at, value in self.series[name] if first <= at <= last]
            return sum(numbers) / len(numbers) if numbers else math.nan

        gained = mean("knn", step - third, step) - mean("knn", start, start + third)
        rank = mean("effective_rank", step - third, step) / mean("effective_rank", start, start + third)
        if gained > 0.5 or rank > 1.05:  # NaN, for a third without scores, is not larger
            return ""
        return f"the loss moved by {100 * moved:.2f} % since step {start:,}, and the features did not improve"

    def _dead_features(self, metrics: Mapping[str, float]) -> str | None:
        rank, deviation = metrics.get("effective_rank"), metrics.get("feature_deviation")
        if rank is None or deviation is None:
            return None
        if rank > DEAD_RANK or deviation > 0.02:
            return ""
        return f"all images have the same embedding: effective rank {rank:.2f}, deviation {deviation:.4f}"

    def _worse_features(self, metrics: Mapping[str, float]) -> str | None:
        """Tell if k-NN lost two fifths of its best value and more than 3 points."""
        now = metrics.get("knn")
        if now is None:
            return None
        best, at = max((value, step) for step, value in self.series["knn"])
        if best - now <= max(3.0, 0.4 * best):
            return ""
        return f"k-NN is {now:.1f} after {best:.1f} at step {at:,}: the features get worse"


def _swing(losses: list[float]) -> float:
    """Return the range of the smoothed loss (over a third of its values), relative to its size."""
    width, sums = len(losses) // 3, [0.0, *itertools.accumulate(losses)]
    means = [(sums[at + width] - sums[at]) / width for at in range(len(losses) - width + 1)]
    return (max(means) - min(means)) / max(abs(means[0]), 1e-9)


class FeatureMonitor:
    """Embeds sample images with the teacher. Measures rank and deviation, and k-NN accuracy if there are labels."""

    def __init__(self, gallery: EvalSet, queries: EvalSet | None, classes: int, fabric: Fabric) -> None:
        self.gallery, self.queries, self.classes, self.fabric = gallery, queries, classes, fabric

    def facts(self) -> dict[str, Any]:
        """Return the number of images that k-NN is scored on, and its chance level."""
        store = (self.queries or self.gallery).store
        if store.labels is None or self.classes < 2:
            return {}
        chance = 100 * float(store.labels.bincount().max()) / len(store.labels)
        return {"scored_images": store.readable, "chance": {"knn": chance}}

    def evaluate(self, backbone: Backbone) -> dict[str, float]:
        """Return effective rank, feature deviation and, with labels, the 20-NN top-1 accuracy."""
        features, labels = self._embed(backbone, self.gallery)
        scores = {"effective_rank": effective_rank(features), "feature_deviation": feature_deviation(features)}
        if labels is None or self.classes < 2 or not bool(torch.isfinite(features).all()):
            return scores
        queries, targets = (None, None) if self.queries is None else self._embed(backbone, self.queries)
        accuracy = knn_accuracy(features, labels, queries, targets, ks=(20,), classes=self.classes)
        return scores | {"knn": float(next(iter(accuracy.values()))["top1"])}

    @torch.inference_mode()
    def _embed(self, backbone: Backbone, images: EvalSet) -> tuple[Tensor, Tensor | None]:
        features, labels = [], []
        with self.fabric.autocast():
            for batch, target, _ in eval_batches(images.store, images.transform, images.batch):
                features.append(backbone(batch).pooled.float())
                labels.append(target)
        return torch.cat(features), torch.cat(labels) if labels[0] is not None else None


def health_table(verdict: str, signs: Mapping[str, float | None], alarms: Iterable[Alarm]) -> Table:
    """Return the last value of each health metric, then each alarm with the option to change."""
    rows: list[list[object]] = [["verdict", verdict, None]]
    rows += [[name, f"{value:.4g}", None] for name, value in signs.items() if value is not None]
    for alarm in alarms:
        rows.append([f"alarm: {alarm.name}", alarm.sign, alarm.knob])
    return Table(["metric", "value", "option to change"], rows, "Health")
