"""The logistic-regression probe of EsViT B.3 (after CLIP): L-BFGS to convergence and a search over λ.

The objective is that of scikit-learn's ``LogisticRegression(C=1 / λ)``: the **sum** of the losses over the images
plus λ/2 |W|², the bias not penalised. Three and more classes: softmax cross-entropy. Two classes: one logistic output,
as scikit-learn does. Several labels per image (VOC2007): one logistic output per class, all under the same λ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.config.probe import MAX_ITERATIONS
from frugalvit.errors import UserError
from frugalvit.probing.lbfgs import Axes, minimise, principal_axes
from frugalvit.probing.metrics import Metric, require_finite, require_metric, score
from frugalvit.probing.validation import as_labels, as_targets, as_tensors, require_features

# |gradient| <= 1 % of λ|W|: then f lies above its minimum by at most 1e-4 of the penalty λ/2 |W|², by strong convexity.
TOLERANCE = 1e-2
STEPS_PER_DECADE = 8
DECADES = 6  # λ from 1e-6 to 1e6
STRIDE = 100.0  # from one λ to the next on the way to a weak one


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

    def extrapolate(self, strength: float) -> tuple[Tensor, Tensor]:
        """Weight (1, D, K) and bias (1, K) for another strength, on the line through the two nearest over log λ.

        Images that are told apart without a mistake have weights that grow with log 1/λ in one direction (Soudry et
        al. 2018): the line leads on to the next. It is followed as far again as those two lie apart, no further.
        """
        away = [abs(math.log(other / strength)) for other in self.strengths]
        near, *others = sorted(range(len(away)), key=away.__getitem__)
        weight, bias = self.weight[near : near + 1], self.bias[near : near + 1]
        apart = [i for i in others if self.strengths[i] != self.strengths[near]]
        if not apart or away[near] == 0:
            return weight, bias
        next_to_it = apart[0]
        gap = math.log(self.strengths[next_to_it] / self.strengths[near])
        share = max(-1.0, min(1.0, math.log(strength / self.strengths[near]) / gap))
        return weight + share * (self.weight[next_to_it] - weight), bias + share * (self.bias[next_to_it] - bias)


class LogisticRegression:
    """The problem for one set of training images: its principal axes are found once and serve every strength."""

    def __init__(
        self, features: Tensor, targets: Tensor, classes: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """features (N, D); targets (N,) classes, or (N, C) of 0, 1 and -1 = unknown for several labels an image."""
        features, targets = as_tensors(features, targets)
        require_features("logistic regression", features)
        self.several_labels = targets.ndim == 2
        what = "training features"
        require_finite(features, what)
        targets = (
            as_targets(targets, features, what)
            if self.several_labels
            else as_labels(targets, features, what, classes or None)
        )
        device = features.device if device is None else torch.device(device)
        features = features.to(device, torch.float64 if features.dtype == torch.float64 else torch.float32)
        targets = targets.to(device)
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
        """Fit every strength, from strong to weak, each from where the ones before it and those of ``start`` lead to.

        Few images can be told apart without a mistake. From zero the first step to a weak λ then overshoots to where no
        curvature is left to go by, and the way back is long; the line through two stronger ones ends near the minimum.
        """
        if start is not None and not torch.equal(start.present, self.present):
            start = None  # other classes: nothing to start from
        found: dict[float, LogisticFit] = {}
        known = start
        for strength in sorted(set(strengths), reverse=True):
            for between in self._path_to(known, strength):
                loose = max(tolerance, TOLERANCE)
                known = _after(known, self._fit_one(between, known, max_iterations, loose))
            found[strength] = self._fit_one(strength, known, max_iterations, tolerance)
            known = _after(known, found[strength])
        return _joined([found[strength] for strength in strengths])

    def _path_to(self, known: LogisticFit | None, strength: float) -> Iterator[float]:
        """Strengths to fit first, where the next stronger one known is far; from the loss's own curvature on, if none.

        The curvature of the softmax at zero is at most 1/4 of the spectrum: a stronger λ has its minimum next to zero.
        """
        stronger = [other for other in known.strengths if other >= strength] if known is not None else []
        last = min(stronger, default=float(self.axes.spectrum.max()) / 4 if len(self.axes.spectrum) else 0.0)
        while last > 1.01 * STRIDE * strength:
            last /= STRIDE
            yield last

    def _fit_one(
        self, strength: float, known: LogisticFit | None, max_iterations: int, tolerance: float
    ) -> LogisticFit:
        weight, bias = (None, None) if known is None else self.axes.into(*known.extrapolate(strength))
        outputs = self.targets.shape[1]
        found = minimise(
            self.axes,
            self.targets,
            self.axes.rows.new_tensor([strength]),
            several_labels=self.several_labels or outputs == 1,
            weight=weight,
            bias=bias,
            max_iterations=max_iterations,
            tolerance=tolerance,
        )
        weight, bias = self.axes.back(found.weight, found.bias)
        if outputs > 1 and not self.several_labels:
            bias = bias - bias.mean(dim=1, keepdim=True)  # softmax ignores a common shift: zero mean, as is usual
        converged = found.converged.tolist()
        shared = (self.present, self.classes, self.several_labels)
        return LogisticFit(weight, bias, [strength], *shared, found.iterations.tolist(), converged)


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
    """Choose λ on the validation images, fit again on training + validation images, and score the test images once.

    train_targets, val_targets: whole numbers from 0 on, (N,) or a column (N, 1), of any type; or, with
        ``metric="map11"``, several labels an image: (N, C) of 1 = present, 0 = absent and -1 = unknown.
    """
    train, val, test = as_tensors(train, val, test)
    require_metric(metric)
    if len(val) == 0:
        raise UserError("the search over λ needs validation images; give a val split or more training images.")
    require_features("logistic regression", train, val, test)
    require_finite(val, "validation features")
    require_finite(test, "test features")
    if metric == "map11":
        train_targets = as_targets(train_targets, train, "training features")
        val_targets = as_targets(val_targets, val, "validation features")
        if train_targets.shape[1] != val_targets.shape[1]:
            widths = f"{train_targets.shape[1]} classes, but validation targets {val_targets.shape[1]}"
            raise UserError(f"training targets have {widths}: both need a column for every class.")
    else:
        train_targets = as_labels(train_targets, train, "training features", classes or None)
        val_targets = as_labels(val_targets, val, "validation features", classes or None)
        classes = classes or 1 + max(int(train_targets.max()), int(val_targets.max()))
    device = train.device if device is None else torch.device(device)
    problem = LogisticRegression(train, train_targets, classes, device)
    val = val.to(device)
    fits: list[LogisticFit] = []

    def evaluate(strengths: list[float]) -> list[float]:
        fits.append(problem.fit(strengths, _joined(fits) if fits else None, max_iterations, tolerance))
        return [score(metric, scores, val_targets.to(device)) for scores in fits[-1].scores(val)]

    strength, tried = search_strength(evaluate)
    both = LogisticRegression(torch.cat([train.to(device), val]), _cat(train_targets, val_targets), classes, device)
    # Not from the fit without the validation images: a weak λ is so sure of its answers that mistakes mend slowly.
    final = both.fit([strength], None, max_iterations, tolerance)
    return LogisticResult(
        final.scores(test.to(device))[0],
        strength,
        tried[strength],
        tried,
        final.iterations[0],
        final.converged[0],
        final,
    )


def _joined(fits: Sequence[LogisticFit]) -> LogisticFit:
    """The strengths of all as one."""
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


def _after(known: LogisticFit | None, fit: LogisticFit) -> LogisticFit:
    return fit if known is None else _joined([known, fit])


def _cat(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second.to(first.device)])


def _strength(step: int) -> float:
    return 10.0 ** (step / STEPS_PER_DECADE)
