"""Schedules as functions of the step."""

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """A value for every step."""

    def at(self, step: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    value: float

    def at(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up from ``warmup_from`` to ``start``, then half a cosine to ``end``.

    The last step of the warm-up has ``start``. Then value = end + (start - end)/2 · (1 + cos(π·i/n)) for the i-th of n
    steps, as EsViT and DINO do for the learning rate, the weight decay and the teacher's momentum.

    from_zero: i and n count from step 0, so that the warm-up replaces the start of the cosine, as in Drloc's code
    """

    start: float
    end: float
    steps: int
    warmup: int = 0
    warmup_from: float = 0.0
    from_zero: bool = False

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.warmup_from + (self.start - self.warmup_from) * step / max(1, self.warmup - 1)
        begin = 0 if self.from_zero else self.warmup
        done = min(1.0, (step - begin) / max(1, self.steps - begin))
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Gentler:
    """``base`` times ``scale`` after ``start``, reached by a line over ``warmup`` steps: for a rescued run."""

    base: Schedule
    scale: float
    start: int
    warmup: int

    def at(self, step: int) -> float:
        return self.base.at(step) * self.scale * min(1.0, (step - self.start + 1) / self.warmup)


@dataclass(frozen=True)
class Linear:
    """A line from ``start`` to ``end`` over ``steps`` points, both ends included; constant afterwards."""

    start: float
    end: float
    steps: int

    def at(self, step: int) -> float:
        if self.steps <= 1:
            return self.end
        return self.start + (self.end - self.start) * min(1.0, step / (self.steps - 1))


@dataclass(frozen=True)
class Delayed:
    """0 before ``start``, then ``base`` counted from there."""

    base: Schedule
    start: int

    def at(self, step: int) -> float:
        return 0.0 if step < self.start else self.base.at(step - self.start)


@dataclass(frozen=True)
class Steps:
    """Linear warm-up, then ``start`` times ``factor`` for each milestone passed: detection's schedule."""

    start: float
    milestones: tuple[int, ...]
    factor: float = 0.1
    warmup: int = 0
    warmup_from: float = 0.0

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.warmup_from + (self.start - self.warmup_from) * step / max(1, self.warmup)
        return self.start * self.factor ** sum(step >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Polynomial:
    """Linear warm-up, then (1 - progress)^power to ``end``: segmentation's schedule.

    With power 1 it is a line: λ in the released Drloc code, which starts at its peak without a warm-up.
    """

    start: float
    steps: int
    power: float = 1.0
    end: float = 0.0
    warmup: int = 0
    warmup_from: float = 0.0

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.warmup_from + (self.start - self.warmup_from) * step / max(1, self.warmup)
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.end + (self.start - self.end) * (1 - done) ** self.power


def warmup_steps(epochs: float, steps_per_epoch: int, total: int, share: float = 0.2) -> int:
    """Convert warm-up epochs to steps, at most ``share`` of the run."""
    return min(round(epochs * steps_per_epoch), round(share * total))
