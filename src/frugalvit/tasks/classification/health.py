"""Health of supervised training: is the network better than one that ignores the images?

Such a network answers the mean target q for every image, so its loss is the entropy H(q). With label smoothing ε and
class shares p, q = (1 - ε)·p + ε/K. Mixup and cutmix do not change the mean, so H(q) is chance for mixed images too.
Everything here is about the gap 1 - loss / H(q): 0 at chance, 1 for a perfect answer.

A false alarm costs a healthy run its progress. So the limits come from 195 runs in docs/results, of 10 to 345 classes.
Their lines are means over ten steps:

    A line varies by about 1 % of the loss. Runs that learned stayed above 2 % for good once they had reached 4 %.
    The slowest (345 classes, 2,800 steps) had a gap of 0.2 % in its warm-up and 0.6 % after a third of the run.
    One run collapsed. Its gap was 6 % before and between -0.8 % and 0.04 % after, without any trend.
    The gradient norm rose to 8 times that of the first lines, in one run to 29 times. Two runs with wrong gradients had
    100 and 400 times that, and a gap of 3 % without any trend.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import numpy as np

from frugalvit.engine.health import DEAD_RANK, Alarm, RunHealth

_LEARNED = 0.02  # a gap above which a network has learned something
_AT_CHANCE = 0.005
"""A gap below which a network that had learned is back at chance; it must also be an eighth of the best gap."""

_LOWEST = -0.01
"""Larger losses count as this gap, so that one spike, which a run often recovers from, does not decide a mean."""

_ERRATIC = 0.05
"""A deviation of the gap between lines that a constant answer never has. Mixed images and a fitted classifier do."""

_NEVER_LEARNED = 0.003  # a mean gap over a tenth of the run, below which a network has learned nothing
_FEW_STEPS = 200  # before this step a loss at chance is normal, however short the run
_DEAD = "all images have the same features, and the loss is not below chance"
_VANISHED = 1e-3  # a gradient norm, relative to that of the first lines, below which nothing is learned
_EXPLODED, _LITTLE = 50, 0.1
"""A gradient norm, relative to that of the first lines, above which a gap below ``_LITTLE`` will not grow any more."""


def chance_loss(counts: np.ndarray, smoothing: float = 0.0, *, balance: bool = False) -> tuple[float, float]:
    """Return H(q) for images ``counts`` per class (``balance``: drawn equally often), and its deviation."""
    shares = (counts > 0).astype(float) if balance else counts.astype(float)
    shares /= shares.sum()
    target = (1 - smoothing) * shares + smoothing / len(shares)
    losses = -np.log(np.where(target > 0, target, 1.0))
    deviation = (1 - smoothing) * math.sqrt(float(shares @ (losses - shares @ losses) ** 2))
    return float(target @ losses), deviation


@dataclass
class SupervisedHealth(RunHealth):
    """Compares a run with chance."""

    chance: float  # H(q)
    noise: float  # deviation of a constant answer's loss in one line; 0 if the classes have equally many images
    classes: int  # that have evaluation images; a constant answer has a mean per class of 100 / ``classes``
    eval_images: int  # their number, which says how much a score varies
    steps: int
    warmup: int  # steps of the warm-up
    log_every: int  # steps between two lines
    lr: float  # highest learning rate, for the advice
    loss: str = "cross_entropy"  # the metric to compare with ``chance``
    best: float = 0.0  # largest gap, a mean over ``recent``
    started: int = 0  # the step of the last restart from the initial weights
    first_norm: float = 0.0  # mean gradient norm of the first lines
    was_above: bool = False  # an evaluation was above chance
    evaluations_at_chance: int = 0  # in a row
    is_dead: bool = False  # features, at the last evaluation
    lr_scale: float = 1.0  # of the last rescue
    past: list[Alarm] = field(default_factory=list)  # alarms before the last rescue

    def __post_init__(self) -> None:
        # 1.5 % of the run, so that an alarm comes within 2 %; three lines at least, because one line varies too much.
        self.recent: deque[float] = deque(maxlen=max(3, int(0.015 * self.steps / self.log_every)))
        self.long: deque[float] = deque(maxlen=max(10, int(0.1 * self.steps / self.log_every)))
        self.norms: deque[float] = deque(maxlen=self.recent.maxlen)
        self.patience = 1  # means over several lines decide
        by_luck = self.noise / max(self.chance, 1e-9) / math.sqrt(self.recent.maxlen or 1)
        self.learned, self.started_to_learn = max(_LEARNED, 4 * by_luck), max(3 * _NEVER_LEARNED, 3 * by_luck)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take one line of metrics; return the new alarms. A line with ``lr_scale`` says that the run was rescued."""
        if "lr_scale" in metrics:
            self.lr_scale = metrics["lr_scale"]
            self._forget(step, from_start=metrics["from_step"] == 0)
            return []
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if "mean_per_class" in metrics:
            self._take_scores(metrics)
        if self.loss in metrics:
            self._take_losses(metrics)
        if len(self.recent) < (self.recent.maxlen or 0):
            return []
        signs = {
            "diverged": self._diverged(),
            "back at chance": self._fell_back(),
            "nothing learned": self._never_learned(step),
            "vanished gradients": self._vanished(step),
            "exploded gradients": self._exploded(),
            "dead features": _DEAD if self.is_dead and self._may_judge(step) else "",
        }
        rate = f"--lr (it is {self.lr * self.lr_scale:.2g})"
        changes = {"nothing learned": f"Try a higher or lower {rate}"}
        lower = f"Lower {rate}, or lengthen --optimizer.warmup"
        alarms = [Alarm(name, sign, changes.get(name, lower)) for name, sign in signs.items() if sign]
        return [alarm for alarm in alarms if self._is_new(alarm)]

    @property
    def collapsed(self) -> bool:
        return bool(self.raised)

    @property
    def is_good(self) -> bool:
        """True if the gap is at least half of the best one: a collapse may be under way."""
        return len(self.recent) == self.recent.maxlen and self.gap >= max(_AT_CHANCE, 0.5 * self.best)

    @property
    def gap(self) -> float:
        """The mean gap of the last lines."""
        return fmean(max(gap, _LOWEST) for gap in self.recent)

    @property
    def _loss(self) -> float:
        """The mean loss of the last lines."""
        return (1 - fmean(self.recent)) * self.chance

    @property
    def scores_above_chance(self) -> bool:
        return self.was_above and not self.evaluations_at_chance

    def all_alarms(self) -> list[Alarm]:
        return [*self.past, *self.raised.values()]

    # -- what a line says

    def _take_losses(self, metrics: Mapping[str, float]) -> None:
        gap = 1 - metrics[self.loss] / self.chance if self.chance > 0 else 1.0
        self.recent.append(gap)
        self.long.append(max(gap, _LOWEST))
        self.norms.append(metrics.get("gradient_norm", math.inf))
        if len(self.recent) == self.recent.maxlen:
            self.best = max(self.best, self.gap)
            self.first_norm = self.first_norm or fmean(self.norms)

    def _take_scores(self, metrics: Mapping[str, float]) -> None:
        chance = 1 / self.classes
        deviation = math.sqrt(chance * (1 - chance) / self.eval_images)
        score = metrics["mean_per_class"] / 100 - chance
        self.was_above |= score > 4 * deviation
        self.evaluations_at_chance = self.evaluations_at_chance + 1 if score <= deviation else 0
        self.is_dead = metrics.get("effective_rank", math.inf) <= DEAD_RANK

    def _forget(self, step: int, *, from_start: bool) -> None:
        """Judge the rescued run anew; weights that had learned must not be at chance again."""
        self.past += self.raised.values()
        for part in (self.raised, self.counts, self.recent, self.long, self.norms):
            part.clear()
        self.evaluations_at_chance, self.is_dead = 0, False
        if from_start:
            self.started, self.best, self.was_above = step, 0.0, False

    def learned_nothing(self, mean_per_class: float) -> bool:
        """True if the last losses are at chance and the score (in percent) nearly: random features beat it slightly."""
        nearly = mean_per_class / 100 - 1 / self.classes <= 0.1 * (1 - 1 / self.classes)
        return nearly and len(self.recent) > 0 and self.gap <= _NEVER_LEARNED

    # -- one check each: the sign of an alarm, or nothing

    def _diverged(self) -> str:
        """Tell if every line is above twice the loss of a constant answer, and not falling.

        A new network answers all classes alike: if they are rare, its loss is near ln(classes), far above chance.
        """
        new = 3 * math.log(max(2, self.classes))
        if self.scores_above_chance or max(self.recent) > -1 or self.recent[-1] > self.recent[0] or self._loss < new:
            return ""
        return f"the loss is {self._loss:,.1f}, and a constant answer has {self.chance:.1f}"

    def _fell_back(self) -> str:
        """Tell if a run that had learned is at chance: by its loss, or by two evaluations and a loss near it."""
        by_loss = self.best >= self.learned and self.gap <= min(_AT_CHANCE, self.best / 8)
        by_loss &= not (self.scores_above_chance and pstdev(self.recent) > _ERRATIC)
        by_score = self.was_above and self.evaluations_at_chance >= 2 and self.gap <= _LEARNED
        if not by_loss and not by_score:
            return ""
        best = (1 - self.best) * self.chance
        return f"the loss is {self._loss:.3f} after {best:.3f}, and a constant answer has {self.chance:.3f}"

    def _never_learned(self, step: int) -> str:
        waited = step - self.started
        needed = max(_FEW_STEPS, round(0.2 * self.steps), self.warmup + round(0.1 * self.steps))
        if waited < needed or len(self.long) < (self.long.maxlen or 0) or self.best > self.started_to_learn:
            return ""
        if fmean(self.long) > _NEVER_LEARNED or self.scores_above_chance:
            return ""
        return f"after {waited:,} steps the loss is {self._loss:.3f}, and a constant answer has {self.chance:.3f}"

    def _vanished(self, step: int) -> str:
        if not self._may_judge(step) or fmean(self.norms) > _VANISHED * self.first_norm:
            return ""
        return f"the gradient norm is {fmean(self.norms):.1g} after {self.first_norm:.1g}, at a loss not below chance"

    def _exploded(self) -> str:
        norm = min(self.norms)  # not one spike
        if math.isinf(norm) or norm < _EXPLODED * self.first_norm or self.gap > _LITTLE:
            return ""
        return f"the gradient norm is {norm:.3g} after {self.first_norm:.2g}, and the loss hardly falls"

    def _may_judge(self, step: int) -> bool:
        """True if the loss is at chance and the run is not in its first steps."""
        return self.gap <= _AT_CHANCE and step - self.started >= max(_FEW_STEPS // 2, round(0.05 * self.steps))
