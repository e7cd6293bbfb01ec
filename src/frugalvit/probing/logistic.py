"""The logistic-regression probe of EsViT B.3 (after CLIP): L-BFGS to convergence and a search over λ.

The objective is that of scikit-learn's ``LogisticRegression(C=1 / λ)``: the **sum** of the losses over the images
plus λ/2 |W|², the bias not penalised. Three and more classes: softmax cross-entropy. Two classes: one logistic output,
as scikit-learn does. Several labels per image (VOC2007): one logistic output per class, all under the same λ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.config.probe import MAX_ITERATIONS
from frugalvit.errors import UserError
from frugalvit.probing.arrays import as_tensors
from frugalvit.probing.lbfgs import Axes, minimise, principal_axes
from frugalvit.probing.metrics import Metric, require_finite, score

# |gradient| <= 1 % of λ|W|: then f lies above its minimum by at most 1e-4 of the penalty λ/2 |W|², by strong convexity.
TOLERANCE = 1e-2
STEPS_PER_DECADE = 8
DECADES = 6  # λ from 1e-6 to 1e6
# Logits of all strengths held at a time (five such tensors live at once); more strengths are fitted in turns.
CELLS = {"cuda": 1 << 30, "cpu": 1 << 28}


@dataclass
class LogisticFit:
    """Classifiers for R strengths: weight (R, D, K), bias (R, K); K = 1 for two classes."""

    weight: Tensor
    bias: Tensor
    strengths: list[float]
    present: Tensor  # the classes that occurred in training, (P,)
    classes: int
    several_labels: bool
    iterations: list[int]
    converged: list[bool]

    def scores(self, features: Tensor) -> Tensor:
        """Class scores (R, N, classes); a class without a training image is never chosen (-inf)."""
        logits = features.to(self.weight) @ self.weight + self.bias[:, None]
        if self.several_labels:
            return logits
        if len(self.present) == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=2)
        full = logits.new_full((*logits.shape[:2], self.classes), -torch.inf)
        full[:, :, self.present] = logits
        return full

    def one(self, strength: float) -> LogisticFit:
        """The classifier of one strength."""
        i = self.strengths.index(strength)
        keep = slice(i, i + 1)
        return LogisticFit(
            self.weight[keep],
            self.bias[keep],
            [strength],
            self.present,
            self.classes,
            self.several_labels,
            self.iterations[keep],
            self.converged[keep],
        )


class LogisticRegression:
    """The problem for one set of training images: its principal axes are found once and serve every strength."""

    def __init__(
        self, features: Tensor, targets: Tensor, classes: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """features (N, D); targets (N,) classes, or (N, C) of 0, 1 and -1 = unknown for several labels an image."""
        features, targets = as_tensors(features, targets)
        if len(features) != len(targets) or len(features) == 0:
            raise UserError(f"{len(features)} training features but {len(targets)} labels.")
        require_finite(features, "training features")
        device = features.device if device is None else torch.device(device)
        features = features.to(device, torch.float64 if features.dtype == torch.float64 else torch.float32)
        targets = targets.to(device)
        self.several_labels = targets.ndim == 2
        if self.several_labels:
            self.classes = targets.shape[1]
            self.present = torch.arange(self.classes, device=device)
            self.targets = targets
        else:
            self.present, compact = targets.unique(return_inverse=True)
            self.classes = classes or int(targets.max()) + 1
            if len(self.present) < 2:
                raise UserError("logistic regression needs training images of at least two classes; there is one.")
            self.targets = compact[:, None] if len(self.present) == 2 else F.one_hot(compact, len(self.present))
        self.axes: Axes = principal_axes(features)

    @torch.no_grad()
    def fit(
        self,
        strengths: list[float],
        start: LogisticFit | None = None,
        max_iterations: int = MAX_ITERATIONS,
        tolerance: float = TOLERANCE,
    ) -> LogisticFit:
        """Fit every strength, as many at once as memory allows; each starts from the nearest strength of ``start``."""
        if start is not None and not torch.equal(start.present, self.present):
            start = None  # other classes: nothing to start from
        rows, outputs = self.axes.rows, self.targets.shape[1]
        together = max(1, CELLS.get(rows.device.type, CELLS["cpu"]) // (len(rows) * outputs))
        weights, biases, iterations, converged = [], [], [], []
        for first in range(0, len(strengths), together):
            some = strengths[first : first + together]
            weight = bias = None
            if start is not None:
                near = [_nearest(start.strengths, strength) for strength in some]
                weight, bias = self.axes.into(start.weight[near], start.bias[near])
            found = minimise(
                self.axes,
                self.targets,
                rows.new_tensor(some),
                several_labels=self.several_labels or outputs == 1,
                weight=weight,
                bias=bias,
                max_iterations=max_iterations,
                tolerance=tolerance,
            )
            weight, bias = self.axes.back(found.weight, found.bias)
            if outputs > 1 and not self.several_labels:
                bias = bias - bias.mean(dim=1, keepdim=True)  # softmax ignores a common shift: zero mean, as is usual
            weights.append(weight)
            biases.append(bias)
            iterations += found.iterations.tolist()
            converged += found.converged.tolist()
        return LogisticFit(
            torch.cat(weights),
            torch.cat(biases),
            list(strengths),
            self.present,
            self.classes,
            self.several_labels,
            iterations,
            converged,
        )


def search_strength(evaluate: Callable[[list[float]], list[float]]) -> tuple[float, dict[float, float]]:
    """CLIP's parametric binary search: the best λ on a grid of 8 steps a decade, and the score of every λ tried.

    Starts from {1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6} and halves the interval around the peak until it is one step wide:
    15 evaluations instead of 97. Of several equally good λ the middle one counts as the peak: the edges of a plateau,
    found on a few validation images, are where it may end.
    """
    end = DECADES * STEPS_PER_DECADE
    spacing = 2 * STEPS_PER_DECADE
    tried: dict[int, float] = {}
    new = list(range(-end, end + 1, spacing))
    while True:
        tried |= dict(zip(new, evaluate([_strength(step) for step in new]), strict=True))
        highest = max(tried.values())
        plateau = sorted(step for step in tried if tried[step] == highest)
        peak = plateau[len(plateau) // 2]
        if spacing == 1:
            return _strength(peak), {_strength(step): tried[step] for step in sorted(tried)}
        spacing //= 2
        new = [step for step in (peak - spacing, peak + spacing) if -end <= step <= end]


@dataclass
class LogisticResult:
    """What the probe found: ``scores`` (N_test, classes) of the test images and how λ was chosen."""

    scores: Tensor
    strength: float
    validation: float
    tried: dict[float, float] = field(default_factory=dict)
    iterations: int = 0
    converged: bool = True
    fit: LogisticFit | None = None


def logistic_probe(
    train: Tensor,
    train_targets: Tensor,
    val: Tensor,
    val_targets: Tensor,
    test: Tensor,
    *,
    metric: Metric = "accuracy",
    classes: int | None = None,
    device: torch.device | str | None = None,
    max_iterations: int = MAX_ITERATIONS,
    tolerance: float = TOLERANCE,
) -> LogisticResult:
    """Choose λ on the validation images, fit again on training + validation images, and score the test images once."""
    train, train_targets, val, val_targets, test = as_tensors(train, train_targets, val, val_targets, test)
    if len(val) == 0:
        raise UserError("the search over λ needs validation images; give a val split or more training images.")
    require_finite(val, "validation features")
    require_finite(test, "test features")
    if classes is None and train_targets.ndim == 1:
        classes = int(torch.cat([train_targets, val_targets]).max()) + 1
    device = train.device if device is None else torch.device(device)
    problem = LogisticRegression(train, train_targets, classes, device)
    val = val.to(device)
    fits: list[LogisticFit] = []

    def evaluate(strengths: list[float]) -> list[float]:
        fits.append(problem.fit(strengths, _join(fits), max_iterations, tolerance))
        return [score(metric, scores, val_targets.to(device)) for scores in fits[-1].scores(val)]

    strength, tried = search_strength(evaluate)
    best = _join(fits)
    assert best is not None
    both = LogisticRegression(torch.cat([train.to(device), val]), _cat(train_targets, val_targets), classes, device)
    final = both.fit([strength], best.one(strength), max_iterations, tolerance)
    return LogisticResult(
        final.scores(test.to(device))[0],
        strength,
        tried[strength],
        tried,
        final.iterations[0],
        final.converged[0],
        final,
    )


def _join(fits: list[LogisticFit]) -> LogisticFit | None:
    """All strengths fitted so far as one, to start from."""
    if not fits:
        return None
    return LogisticFit(
        torch.cat([fit.weight for fit in fits]),
        torch.cat([fit.bias for fit in fits]),
        [strength for fit in fits for strength in fit.strengths],
        fits[0].present,
        fits[0].classes,
        fits[0].several_labels,
        [count for fit in fits for count in fit.iterations],
        [flag for fit in fits for flag in fit.converged],
    )


def _cat(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second.to(first.device)])


def _strength(step: int) -> float:
    return 10.0 ** (step / STEPS_PER_DECADE)


def _nearest(strengths: list[float], wanted: float) -> int:
    """The index of the strength closest on a logarithmic scale."""
    return min(range(len(strengths)), key=lambda i: max(strengths[i] / wanted, wanted / strengths[i]))
