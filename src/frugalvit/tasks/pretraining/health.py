"""Is a label-free run learning? Signs that are watched in every run, and what to turn when one is bad.

On small data most label-free runs fail silently. Two collapses have clear signs (K prototypes, teacher outputs p_t):

    uniform         every image gets the same flat distribution: entropy H(p_t) and loss stay at ln K
    one prototype   every image gets the same sharp distribution: H(p_t) and the entropy of the mean output fall to 0

Views and regions have heads of their own, so each level can collapse alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.data.loader import eval_batches
from frugalvit.experiment.builders import EvalSet
from frugalvit.utils.tables import Table

_PARTS = ("view_loss", "region_loss", "localization")
"""The losses that the whole is made of; not every step has all of them."""

_FEW = 10
"""Prototypes that are too few, of however many: a sample of a hundred crops uses no more than a hundred of 65,536."""

_SILENT = 0.01
"""Nats below ln K of a teacher that says nothing, however spread the features are that its student was born with.

Of all runs measured none that learned came below 0.16, and those whose teachers were flattened by force lie at 1e-6.
"""

_TOO_EARLY = 200
"""Steps before which a loss that does not move means nothing: a run that short is all beginning."""


@dataclass(frozen=True)
class Alarm:
    """A bad sign: its name, what was seen, and the knob to turn."""

    name: str
    sign: str
    knob: str

    def __str__(self) -> str:
        return f"{self.name}: {self.sign}. {self.knob}"


class Level(NamedTuple):
    """A level that is matched: its name, what it looks at, and what the names of its signs begin with."""

    name: str
    seen: str
    prefix: str


def _levels(metrics: Mapping[str, float]) -> list[Level]:
    """The levels of a line. Where only regions are matched their signs are plain, as those of the views otherwise."""
    if "view_loss" not in metrics:
        return [Level("region", "regions", "")]
    return [Level("view", "images", ""), Level("region", "regions", "region_")]


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """RankMe (Garrido et al., 2023): exp of the entropy of the normalised singular values of (N, D) features.

    One for a constant embedding, at most min(N, D) when all directions are used equally.
    """
    # Through the Gram matrix: some LAPACK builds return NaN for the singular values of a constant matrix.
    rows = (features.cpu() if features.device.type == "mps" else features).double()  # MPS has no doubles
    gram = rows.mT @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.mT
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    total = values.sum()
    if total <= 0:
        return 1.0
    share = values / total
    return math.exp(-torch.special.xlogy(share, share).sum().item())


@torch.no_grad()
def feature_deviation(features: Tensor) -> float:
    """Deviation of L2-normalised (N, D) features over the images, times √D: about 1 when spread, 0 when collapsed."""
    unit = torch.nn.functional.normalize(features.float(), dim=1)
    return (unit.std(0, correction=0).mean() * math.sqrt(features.shape[1])).item()


@dataclass
class Health:
    """Watches the metrics of a run and raises each alarm once.

    ``settled`` is the step from which collapse can be told from a beginning: every run starts with outputs that are
    nearly uniform, and the prototypes do not even learn at first.
    """

    prototypes: int
    steps: int
    settled: int
    patience: int = 3
    stop: bool = False
    raised: dict[str, Alarm] = field(default_factory=dict)
    history: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    losses: dict[frozenset[str], tuple[float, float, int]] = field(default_factory=dict)
    """Of every set of losses that came together: the first sum, the lowest, and how many there were."""
    lines: int = 0  # with a loss

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take note of one line of metrics; the alarms that are new.

        What is no number is no sign: the loop counts bad steps, and stops where there are too many.
        """
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.history.append((step, metrics))
        self.lines += "loss" in metrics
        diverged = self._diverged(metrics)
        if step < self.settled:
            return []
        signs = [sign(metrics, level) for level in _levels(metrics) for sign in (self._uniform, self._one_prototype)]
        signs += [diverged, self._stagnant(step, metrics)]
        signs += [self._same_features(metrics), self._worse_features(metrics)]
        return [alarm for alarm in signs if alarm is not None and self._persistent(alarm)]

    @property
    def collapsed(self) -> bool:
        return any(
            name.startswith(("uniform collapse", "one-prototype collapse", "dead features")) for name in self.raised
        )

    def verdict(self) -> str:
        return ", ".join(self.raised) if self.raised else "healthy"

    # -- one sign each

    def _uniform(self, metrics: Mapping[str, float], level: Level) -> Alarm | None:
        flat, name = math.log(self.prototypes), f"uniform collapse ({level.name}s)"
        entropy, loss = metrics.get(f"{level.prefix}teacher_entropy"), metrics.get(f"{level.name}_loss")
        if entropy is None or loss is None:
            return None
        told = flat - entropy > _SILENT and self._tells_apart(metrics, level, flat)
        if entropy < 0.98 * flat or loss < 0.98 * flat or told:
            return self._clear(name)
        return Alarm(
            name,
            f"teacher entropy {entropy:.2f} and {level.name} loss {loss:.2f} stay at ln K = {flat:.2f}: "
            f"all {level.seen} look alike to it",
            "Lower matching.teacher_temp, raise --lr, lower matching.momentum, or use fewer matching.prototypes",
        )

    def _tells_apart(self, metrics: Mapping[str, float], level: Level, flat: float) -> bool:
        """Whether something else says that images do not look alike: the other level, or features that stay spread.

        A random network's features are spread too, and shrink where all outputs become alike.
        """
        other = "region_loss" if level.name == "view" else "view_loss"
        spread = [values["feature_deviation"] for _, values in self.history if "feature_deviation" in values]
        return metrics.get(other, flat) < 0.9 * flat or (bool(spread) and spread[-1] > max(0.5, 0.9 * spread[0]))

    def _latest(self, name: str) -> float:
        """The newest value of what is measured now and then; 0 before the first."""
        return next((values[name] for _, values in reversed(self.history) if name in values), 0.0)

    def _one_prototype(self, metrics: Mapping[str, float], level: Level) -> Alarm | None:
        name = f"one-prototype collapse ({level.name}s)"
        entropy = metrics.get(f"{level.prefix}teacher_entropy")
        used = metrics.get(f"{level.prefix}prototypes_used")
        if entropy is None or used is None:
            return None
        if used > max(1.5, min(0.02 * self.prototypes, _FEW)) or entropy > 0.5:
            return self._clear(name)
        return Alarm(
            name,
            f"teacher entropy {entropy:.3f}, and all {level.seen} together use {used:.1f} of {self.prototypes:,} "
            "prototypes",
            "Raise matching.teacher_temp, lower matching.center_momentum, or lower --lr",
        )

    def _diverged(self, metrics: Mapping[str, float]) -> Alarm | None:
        if "loss" not in metrics:
            return None
        # Only sums of the same losses can be compared: one that is added later makes the sum larger.
        parts, now = frozenset(name for name in metrics if name in _PARTS), metrics["loss"]
        if self.losses and parts not in self.losses:  # a line's mean is over steps with and without what was added
            self.losses[parts] = math.inf, math.inf, -1
            return None
        start, low, count = self.losses.get(parts, (now, now, 0))
        start, low, count = now if count < 0 else start, min(low, now), max(count, 0) + 1
        self.losses[parts] = start, low, count
        if count < 5:
            return None
        if now < start * 1.2 or now < low + 0.5 * abs(start):
            return self._clear("divergence")
        return Alarm(
            "divergence",
            f"the loss is {now:.2f} after {low:.2f}, above where it began ({start:.2f})",
            "Lower --lr, lengthen optimizer.warmup, or lower optimizer.clip",
        )

    def _stagnant(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """From the first to the last third of what has been trained so far, neither loss, k-NN nor rank got better.

        Losses come on lines of their own, more often than k-NN and rank: thirds are thirds of the steps. A loss that
        falls and rises again (temperatures change, losses are added) has moved too, though its ends are alike.

        A look through all lines at each of them would take a long run minutes, and one that is resumed hours: with more
        lines it is asked less often.
        """
        if step < max(0.5 * self.steps, _TOO_EARLY) or ("loss" in metrics and self.lines % max(1, self.lines // 200)):
            return None
        points = [(at, values) for at, values in self.history if at >= self.settled]
        losses = [values["loss"] for _, values in points if "loss" in values]
        if len(losses) < 9:
            return None
        if self._latest("knn") >= 99 or _swing(losses) > 0.01:
            return self._clear("stagnation")
        began, third = points[0][0], (points[-1][0] - points[0][0]) / 3
        first = [point for point in points if point[0] <= began + third]
        last = [point for point in points if point[0] >= step - third]

        def mean(part: list[tuple[int, dict[str, float]]], name: str) -> float:
            found = [values[name] for _, values in part if name in values]
            return sum(found) / len(found) if found else math.nan

        change = abs(mean(first, "loss") - mean(last, "loss")) / max(abs(mean(first, "loss")), 1e-9)
        if not math.isfinite(change):  # a third without a single loss cannot be compared
            return None
        gained = mean(last, "knn") - mean(first, "knn")
        rank = (
            mean(last, "effective_rank") / mean(first, "effective_rank") if mean(first, "effective_rank") else math.nan
        )
        if change > 0.005 or (math.isfinite(gained) and gained > 0.5) or (math.isfinite(rank) and rank > 1.05):
            return self._clear("stagnation")
        return Alarm(
            "stagnation",
            f"the loss moved by {100 * change:.2f} % since step {began:,}, and the features got no better",
            "Raise --lr, lower matching.momentum, or stop here: more steps will not help",
        )

    def _same_features(self, metrics: Mapping[str, float]) -> Alarm | None:
        rank, deviation = metrics.get("effective_rank"), metrics.get("feature_deviation")
        if rank is None or deviation is None:
            return None
        if rank > 1.5 or deviation > 0.02:
            return self._clear("dead features")
        return Alarm(
            "dead features",
            f"all images have the same embedding: effective rank {rank:.2f}, deviation {deviation:.4f}",
            "Lower --lr and lengthen optimizer.warmup; check the images with 'frugalvit data'",
        )

    def _worse_features(self, metrics: Mapping[str, float]) -> Alarm | None:
        """k-NN has lost two fifths of the best it had, and more than the chance of which images are asked about."""
        now = metrics.get("knn")
        if now is None:
            return None
        best, at = max((values["knn"], step) for step, values in self.history if "knn" in values)
        if best - now <= max(3.0, 0.4 * best):
            return self._clear("worse features")
        return Alarm(
            "worse features",
            f"k-NN is {now:.1f} after {best:.1f} at step {at:,}: what was learned is being lost",
            "Raise matching.momentum, lower --lr or lengthen optimizer.warmup: the teacher changes too fast to be "
            "followed",
        )

    def _clear(self, name: str) -> None:
        self.counts[name] = 0

    def _persistent(self, alarm: Alarm) -> bool:
        """A sign must be seen several times in a row; then it is said once."""
        self.counts[alarm.name] = self.counts.get(alarm.name, 0) + 1
        if self.counts[alarm.name] < self.patience or alarm.name in self.raised:
            return False
        self.raised[alarm.name] = alarm
        return True


def _swing(losses: list[float]) -> float:
    """How far the loss went up and down, smoothed over a third of its values, relative to its size."""
    width, sums = len(losses) // 3, [0.0, *itertools.accumulate(losses)]
    means = [(sums[at + width] - sums[at]) / width for at in range(len(losses) - width + 1)]
    return (max(means) - min(means)) / max(abs(means[0]), 1e-9)


class FeatureMonitor:
    """Embeds a sample of the images with the teacher. With labels, votes of the 20 nearest: is it getting better?"""

    def __init__(self, bank: EvalSet, queries: EvalSet | None, classes: int, fabric: Fabric) -> None:
        self.bank, self.queries, self.classes, self.fabric = bank, queries, classes, fabric

    def look(self, backbone: Backbone) -> dict[str, float]:
        features, labels = self._embed(backbone, self.bank)
        seen = {"effective_rank": effective_rank(features), "feature_deviation": feature_deviation(features)}
        if labels is None or self.classes < 2 or not bool(torch.isfinite(features).all()):
            return seen  # broken features are the health's to report
        # The probes stand above training in the order of rooms; this one function of theirs is plain torch.
        from frugalvit.probing.knn import knn_accuracy

        if self.queries is None:
            accuracy = knn_accuracy(features, labels, None, None, ks=(20,), classes=self.classes)
        else:
            asked, answers = self._embed(backbone, self.queries)
            accuracy = knn_accuracy(features, labels, asked, answers, ks=(20,), classes=self.classes)
        return seen | {"knn": _top1(accuracy)}

    @torch.inference_mode()
    def _embed(self, backbone: Backbone, images: EvalSet) -> tuple[Tensor, Tensor | None]:
        features, labels = [], []
        with self.fabric.autocast():
            for batch, target, _ in eval_batches(images.store, images.transform, images.batch):
                features.append(backbone(batch).pooled.float())
                labels.append(target)
        return torch.cat(features), torch.cat(labels) if labels[0] is not None else None


def _top1(accuracy: Any) -> float:
    return float(next(iter(accuracy.values()))["top1"])


def health_table(verdict: str, signs: Mapping[str, float | None], alarms: Iterable[Alarm]) -> Table:
    """The last value of every sign that was watched, then each alarm with the knob to turn."""
    rows: list[list[object]] = [["verdict", verdict, None]]
    rows += [[name, f"{value:.4g}", None] for name, value in signs.items() if value is not None]
    for alarm in alarms:
        rows.append([f"alarm: {alarm.name}", alarm.sign, alarm.knob])
    return Table(["sign", "seen", "what to turn"], rows, "Health")
