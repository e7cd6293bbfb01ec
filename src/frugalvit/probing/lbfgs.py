"""L-BFGS for a linear classifier with the regularization strength λ.

Minimizes

    f(W, b) = sum over n of loss(x_n W + b, y_n)  +  λ / 2 * |W|²

with the softmax cross-entropy or, for targets of several labels, the sum of binary cross-entropies.
Shapes: x (N, D), W (D, C), b (C,), logits and targets (N, C).

Why it is fast:
- along a direction the logits are Z + t Z_d, so a line search costs no matrix product, and an iteration costs two;
- f is convex along a line, so the search needs the derivative's sign alone: a bracket and the secant;
- the curvature starts from h * spectrum + λ in the basis of the features' principal axes (``Axes``), where it is
  diagonal: the bound of Böhning (1992) with the mean h of p(1 - p) measured at the current point.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

HISTORY = 10
# Curvature condition of the line search: |f'(t)| <= 0.1 |f'(0)|; trials are cheap, so it is tighter than 0.9.
CURVATURE = 0.1
TRIALS = 40  # 40 halvings leave 1e-12 of a bracket: enough even if the first step is far too long
# Units of rounding in a gradient whose terms cancel; a smaller gradient is noise.
PRECISION = 16


@dataclass
class Axes:
    """The features in their principal axes: centred, rotated and without the directions they do not span.

    This does not change the problem: the bias has no penalty and absorbs the mean, and a rotation preserves |W|².
    """

    rows: Tensor  # (N, K), K <= min(N, D)
    spectrum: Tensor  # (K,), the sum of squares of every column
    mean: Tensor  # (D,)
    basis: Tensor  # (D, K), orthonormal columns

    def back(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Convert weights (K, C) and biases (C,) to the original features: (D, C), (C,)."""
        weight = self.basis @ weight
        return weight, bias - torch.einsum("d,dc->c", self.mean, weight)

    def into(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of ``back``, for a warm start."""
        return self.basis.T @ weight, bias + torch.einsum("d,dc->c", self.mean, weight)


@torch.no_grad()
def principal_axes(features: Tensor) -> Axes:
    """Return the principal axes of (N, D) features, without directions that are rounding noise."""
    mean = features.mean(dim=0)
    rows = features - mean
    reduce = None
    if len(rows) < rows.shape[1]:  # N rows span at most N dimensions: work there
        reduce, triangle = torch.linalg.qr(rows.T)
        rows = triangle.T.contiguous()
    _, basis = torch.linalg.eigh(rows.T @ rows)
    rows = rows @ basis
    spectrum = rows.square().sum(dim=0)
    spanned = spectrum > spectrum.max() * torch.finfo(rows.dtype).eps ** 2
    basis = basis if reduce is None else reduce @ basis
    return Axes(rows[:, spanned], spectrum[spanned], mean, basis[:, spanned])


@dataclass
class Minimum:
    """The result of the search: weight (K, C) and bias (C,) in the axes.

    converged: False at the limit of iterations, or if the line search failed
    """

    weight: Tensor
    bias: Tensor
    iterations: int
    converged: bool


@torch.no_grad()
def minimize(
    axes: Axes,
    targets: Tensor,
    strength: float,
    *,
    several_labels: bool,
    row_weights: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-4,
) -> Minimum:
    """Minimize f, until |gradient| <= tolerance * λ|W|. It starts at ``weight``, ``bias`` or 0.

    targets: (N, C), 0/1 or one-hot; -1 marks a label to ignore
    row_weights: (N,), factors of the losses of the rows

    At the minimum the gradients of loss and penalty cancel; the criterion is the share that remains. f is λ-strongly
    convex in W, so f - min f <= tolerance² * λ/2 |W|². This says little about the bias if λ is strong and W small, so
    the bias has its own criterion (``is_balanced``).
    """
    classes = targets.shape[1]
    weight = axes.rows.new_zeros(axes.rows.shape[1], classes) if weight is None else weight
    bias = axes.rows.new_zeros(classes) if bias is None else bias
    search = _Search(axes, targets, several_labels, strength, row_weights, torch.cat([weight, bias[None]]))
    iteration, converged = 0, search.has_converged(tolerance)
    while not converged and not search.lost and iteration < max_iterations:
        search.step()
        iteration, converged = iteration + 1, search.has_converged(tolerance)
    return Minimum(search.parameters[:-1], search.parameters[-1], iteration, converged)


class _Search:
    """The state of the search: parameters (K + 1, C), bias last, logits (N, C), pairs."""

    def __init__(
        self,
        axes: Axes,
        targets: Tensor,
        several_labels: bool,
        strength: float,
        row_weights: Tensor | None,
        start: Tensor,
    ) -> None:
        self.rows, self.spectrum, self.several_labels = axes.rows, axes.spectrum, several_labels
        self.weights = None if row_weights is None else row_weights[:, None].to(axes.rows)
        if bool((targets < 0).any()):
            self.weights = (targets >= 0).to(axes.rows) * (1 if self.weights is None else self.weights)
        self.targets = targets.clamp_min(0).to(axes.rows)
        self.others = 1 - self.targets
        self.steepest = self.spectrum.sum().clamp_min(torch.finfo(start.dtype).tiny)
        self.penalty, self.parameters = start.new_tensor(strength), start
        self.stalled = False  # no descent step is left at this precision
        self.lost = False  # the line search failed
        self.logits = self.forward(start)
        self.residual = self.compute_residual(self.logits)
        self.gradient = self.compute_gradient()
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # step, change of gradient, 1 / (step . change)

    def has_converged(self, tolerance: float) -> bool:
        """True if the gradient is small beside the penalty's, or noise, and the bias is balanced."""
        limit = torch.maximum(tolerance * self.penalty * self.parameters[:-1].norm(), self.noise())
        # checking the bias costs as much as a trial of the line search
        return self.stalled or (bool(self.gradient.norm() <= limit) and self.is_balanced(tolerance))

    def noise(self) -> Tensor:
        """Estimate the rounding error of a zero gradient: a few units of the sum |x||residual|."""
        unit = PRECISION * torch.finfo(self.rows.dtype).eps
        return unit * (self.spectrum.sum() + len(self.rows)).sqrt() * self.residual.norm()

    def is_balanced(self, tolerance: float) -> bool:
        """True if the remaining change of the bias is small beside the spread of the logits, or is noise."""
        logit_spread = (self.logits - self.parameters[-1]).norm() / len(self.rows) ** 0.5
        limit = torch.maximum(tolerance * self.curvature()[-1] * logit_spread, self.noise())
        return bool(self.gradient[-1].norm() <= limit)

    def curvature(self) -> Tensor:
        """h * spectrum + λ, and h * N for the bias: (K + 1,)."""
        missed = self.residual.abs()
        # If every p is 0 or 1, h is 0; the bias has no λ that would keep its curvature above 0.
        min_h = (self.penalty / self.steepest).clamp_max(torch.finfo(missed.dtype).eps)
        h = (missed - missed.square()).mean().maximum(min_h)
        curvature = h * torch.cat([self.spectrum, self.spectrum.new_tensor([len(self.rows)])])
        curvature[:-1] += self.penalty
        return curvature

    def step(self) -> None:
        """One iteration: a direction, the length along it, and the gradient there."""
        direction = self.direction()
        logit_direction = self.forward(direction)
        length = self.search(direction, logit_direction)
        step = length * direction
        before = self.gradient
        self.parameters = self.parameters + step
        self.logits = self.logits + length * logit_direction
        self.gradient = self.compute_gradient()
        change = self.gradient - before
        curvature = _dot(step, change)
        usable = curvature > torch.finfo(curvature.dtype).eps * _dot(change, change)
        self.pairs.append((step, change, torch.where(usable, 1 / curvature, 0)))
        self.pairs = self.pairs[-HISTORY:]

    def forward(self, parameters: Tensor) -> Tensor:
        return (self.rows @ parameters[:-1]).add_(parameters[-1])

    def compute_residual(self, logits: Tensor) -> Tensor:
        """Return probabilities minus targets, times the weights, with a small relative error.

        For a well classified image 1 - p loses all digits below 1e-7, and the gradient of a weakly regularized
        classifier consists of them. The sum of the other classes' p keeps these digits.
        """
        if self.several_labels:
            residual = torch.sigmoid(torch.where(self.targets > 0, -logits, logits))
            residual = torch.where(self.targets > 0, -residual, residual)
        else:
            residual = logits.softmax(dim=1).mul_(self.others)
            residual.addcmul_(self.targets, residual.sum(dim=1, keepdim=True), value=-1)
        return residual if self.weights is None else residual.mul_(self.weights)

    def compute_gradient(self) -> Tensor:
        """Return the gradient, from the residual at the current parameters."""
        slope = self.rows.T @ self.residual + self.penalty * self.parameters[:-1]
        return torch.cat([slope, self.residual.sum(dim=0, keepdim=True)])

    def direction(self) -> Tensor:
        """Return -H gradient by the two loops of L-BFGS; H_0 is the inverse of ``curvature``."""
        inverse = (1 / self.curvature())[:, None]
        result, shares = self.gradient, []
        for step, change, reciprocal in reversed(self.pairs):
            share = reciprocal * _dot(step, result)
            shares.append(share)
            result = result - share * change
        result = inverse * result
        for (step, change, reciprocal), share in zip(self.pairs, reversed(shares), strict=True):
            result = result + (share - reciprocal * _dot(change, result)) * step
        # rounding can make H indefinite: then restart from H_0
        uphill = _dot(result, self.gradient) <= 0
        return -torch.where(uphill, inverse * self.gradient, result)

    def search(self, direction: Tensor, logit_direction: Tensor) -> Tensor:
        """Return a length t with |f'(t)| <= CURVATURE |f'(0)|, using only the derivative.

        f'(t) = sum (p(Z + t Z_d) - y) Z_d + λ (W + t D) . D rises with t, so a bracket always closes.
        The residual of the last trial is stored: the next gradient needs it.
        """
        moved = direction[:-1]
        linear = self.penalty * _dot(self.parameters[:-1], moved)
        quadratic = self.penalty * _dot(moved, moved)
        start = _dot(self.gradient, direction)
        self.stalled = bool(start >= 0)
        low, high = torch.zeros_like(start), torch.full_like(start, torch.inf)
        slope_low, slope_high = start, torch.full_like(start, torch.inf)
        length = torch.ones_like(start)
        for _ in range(TRIALS):
            self.residual = self.compute_residual(self.logits + length * logit_direction)
            slope = _dot(self.residual, logit_direction) + linear + length * quadratic
            if self.stalled or bool(slope.abs() <= CURVATURE * start.abs()):
                return length
            if bool(slope < 0):
                low, slope_low = length, slope
            else:
                high, slope_high = length, slope
            # f still falls: extrapolate the derivative linearly, to at most ten times the length
            if bool(high.isinf()):
                beyond = length * (start / (start - slope)).clamp(2, 10)
                length = torch.where(slope <= start, 10 * length, beyond)
            else:
                secant = low - slope_low * (high - low) / (slope_high - slope_low)
                length = torch.minimum(torch.maximum(secant, low + 0.1 * (high - low)), high - 0.1 * (high - low))
        # The bracket is still wide: f is known to fall only up to its lower end.
        self.residual = self.compute_residual(self.logits + low * logit_direction)
        if bool(low == 0):  # restart from H_0; if the direction came from H_0, the search has failed
            self.lost = not any(bool(inverse) for _, _, inverse in self.pairs)
            self.pairs = []
        return low


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()
