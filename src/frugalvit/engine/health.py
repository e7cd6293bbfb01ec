"""Health of a run: alarms that name the option to change, effective rank and spread of features.

A task has one ``RunHealth``. It reads only logged metrics, so all ranks decide alike, and a resumed run that reads the
metrics again knows what the interrupted one knew.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frugalvit.utils import console

DEAD_RANK = 1.5
"""An effective rank below which all images have nearly the same features. Random weights have 5 and more."""


@dataclass(frozen=True)
class Alarm:
    """A failed check: its name, what was measured, and the option to change."""

    name: str
    sign: str
    knob: str

    def __str__(self) -> str:
        return f"{self.name}: {self.sign}. {self.knob}"


@dataclass
class RunHealth:
    """Checks the metrics of a run and raises each alarm once, after ``patience`` failed checks in a row."""

    patience: int = field(default=3, kw_only=True)
    raised: dict[str, Alarm] = field(default_factory=dict, kw_only=True)
    counts: dict[str, int] = field(default_factory=dict, kw_only=True)
    collapsed = False  # True if the weights are worthless, so that the run may go back to earlier ones
    is_good = False  # True if the weights are worth going back to

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take one line of metrics; return the new alarms."""
        raise NotImplementedError

    def warn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one line of metrics; print the new alarms."""
        for alarm in self.check(step, metrics):
            console.warning(str(alarm))

    def verdict(self) -> str:
        return ", ".join(self.raised) if self.raised else "healthy"

    def _is_new(self, alarm: Alarm) -> bool:
        """True once, when a check has failed ``patience`` times in a row."""
        self.counts[alarm.name] = self.counts.get(alarm.name, 0) + 1
        if self.counts[alarm.name] < self.patience or alarm.name in self.raised:
            return False
        self.raised[alarm.name] = alarm
        return True


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """Compute RankMe (Garrido et al., 2023) of (N, D) features.

    It is exp of the entropy of the normalized singular values: 1 for a constant embedding and at most min(N, D).
    """
    # The Gram matrix: some LAPACK builds return NaN for the singular values of a constant matrix.
    rows = (features.cpu() if features.device.type == "mps" else features).double()  # MPS has no float64
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
    """Compute the deviation of L2-normalized (N, D) features over N, times √D. Spread: about 1; collapsed: 0."""
    unit = torch.nn.functional.normalize(features.float(), dim=1)
    return (unit.std(0, correction=0).mean() * math.sqrt(features.shape[1])).item()
