"""L-BFGS for linear classifiers, one per regularization strength; several share one matrix product.

Minimizes, for every strength λ_r of a batch,

    f_r(W, b) = sum over n of loss(x_n W + b, y_n)  +  λ_r / 2 * |W|²

with the softmax cross-entropy or, for targets of several labels, the sum of binary cross-entropies.
Shapes: x (N, D), W (R, D, C), b (R, C), logits and targets (R, N, C) and (N, C).

Why it is fast:
- the logits are linear in the parameters, so along a direction they are Z + t Z_d. A line search therefore costs
  no matrix product, only elementwise work; an iteration costs two products however many steps are tried;
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
        """Convert weights (R, K, C) and biases (R, C) to the original features: (R, D, C), (R, C)."""
        weight = self.basis @ weight
        return weight, bias - torch.einsum("d,rdc->rc", self.mean, weight)

    def into(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of ``back``, for a warm start."""
        return self.basis.T @ weight, bias + torch.einsum("d,rdc->rc", self.mean, weight)


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
    """The result of the search: weight (R, K, C) and bias (R, C) in the axes, and facts per strength."""

    weight: Tensor
    bias: Tensor
    iterations: Tensor  # (R,)
    gradient: Tensor  # (R,), |gradient|
    converged: Tensor  # (R,), False at the limit of iterations, or if the line search failed


@torch.no_grad()
def minimize(
    axes: Axes,
    targets: Tensor,
    strengths: Tensor,
    *,
    several_labels: bool,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-4,
) -> Minimum:
    """Minimize f for every strength, until |gradient| <= tolerance * λ|W|. It starts at ``weight``, ``bias`` or 0.

    targets: (N, C), 0/1 or one-hot; -1 marks a label to ignore. At the minimum the gradients of loss and penalty
    cancel; the criterion is the share that remains. f is λ-strongly convex in W, so f - min f <= tolerance² * λ/2 |W|².
    This says little about the bias if λ is strong and W small, so the bias has its own criterion (``balanced``).
    """
    count, classes = len(strengths), targets.shape[1]
    weight = axes.rows.new_zeros(count, axes.rows.shape[1], classes) if weight is None else weight
    bias = axes.rows.new_zeros(count, classes) if bias is None else bias
    active = _Active(axes, targets, several_labels, strengths, torch.cat([weight, bias[:, None]], dim=1))
    result = Minimum(
        weight.clone(),
        bias.clone(),
        torch.zeros(count, dtype=torch.long),
        axes.rows.new_zeros(count),
        torch.ones(count, dtype=torch.bool),
    )
    for iteration in range(max_iterations + 1):
        norm = active.gradient.flatten(1).norm(dim=1)
        penalty_norm = active.penalty * active.parameters[:, :-1].flatten(1).norm(dim=1)
        near = norm <= torch.maximum(tolerance * penalty_norm, active.noise())
        if bool(near.any()):  # checking the bias costs as much as a trial of the line search
            near = near & active.balanced(tolerance)
        converged = near | active.stalled
        ended = torch.ones_like(converged) if iteration == max_iterations else converged | active.lost
        if bool(ended.any()):
            index = active.strength[ended]
            result.weight[index] = active.parameters[ended, :-1]
            result.bias[index] = active.parameters[ended, -1]
            result.gradient[index] = norm[ended]
            result.iterations[index.cpu()] = iteration
            result.converged[index.cpu()] = converged[ended].cpu()
            if bool(ended.all()):
                break
            active.keep(~ended)
        active.step()
    return result


class _Active:
    """The strengths that have not converged: parameters (A, K + 1, C), bias last, logits (A, N, C), pairs."""

    def __init__(self, axes: Axes, targets: Tensor, several_labels: bool, strengths: Tensor, start: Tensor) -> None:
        self.rows, self.spectrum, self.several_labels = axes.rows, axes.spectrum, several_labels
        self.known = (targets >= 0).to(axes.rows) if bool((targets < 0).any()) else None
        self.targets = targets.clamp_min(0).to(axes.rows)
        self.others = 1 - self.targets
        self.steepest = self.spectrum.sum().clamp_min(torch.finfo(start.dtype).tiny)
        self.penalty, self.parameters = strengths, start
        self.strength = torch.arange(len(strengths), device=start.device)
        self.stalled = torch.zeros_like(self.strength, dtype=torch.bool)  # no descent step is left at this precision
        self.lost = self.stalled  # the line search failed
        self.logits = self.forward(start)
        self.residual = self.compute_residual(self.logits)
        self.gradient = self.compute_gradient()
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # step, change of gradient, 1 / (step . change)

    def noise(self) -> Tensor:
        """Estimate the rounding error of a zero gradient: a few units of the sum |x||residual|."""
        unit = PRECISION * torch.finfo(self.rows.dtype).eps
        return unit * (self.spectrum.sum() + len(self.rows)).sqrt() * self.residual.flatten(1).norm(dim=1)

    def balanced(self, tolerance: float) -> Tensor:
        """True if the remaining change of the bias is small beside the spread of the logits, or is noise."""
        slope = self.gradient[:, -1].norm(dim=1)
        logit_spread = (self.logits - self.parameters[:, -1:]).flatten(1).norm(dim=1) / len(self.rows) ** 0.5
        return slope <= torch.maximum(tolerance * self.curvature()[:, -1] * logit_spread, self.noise())

    def curvature(self) -> Tensor:
        """h * spectrum + λ, and h * N for the bias: (A, K + 1)."""
        missed = self.residual.abs()
        # If every p is 0 or 1, h is 0; the bias has no λ that would keep its curvature above 0.
        min_h = (self.penalty / self.steepest).clamp_max(torch.finfo(missed.dtype).eps)
        h = (missed - missed.square()).mean(dim=(1, 2)).maximum(min_h)
        curvature = h[:, None] * torch.cat([self.spectrum, self.spectrum.new_tensor([len(self.rows)])])
        curvature[:, :-1] += self.penalty[:, None]
        return curvature

    def keep(self, rows: Tensor) -> None:
        """Keep these rows; the other strengths have ended."""
        for name in ("penalty", "parameters", "strength", "stalled", "lost", "logits", "residual", "gradient"):
            setattr(self, name, getattr(self, name)[rows])
        self.pairs = [(step[rows], change[rows], inverse[rows]) for step, change, inverse in self.pairs]

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
        count, width, classes = parameters.shape
        flat = parameters[:, :-1].movedim(1, 0).reshape(width - 1, count * classes)
        logits = (self.rows @ flat).view(-1, count, classes).movedim(1, 0).contiguous()
        return logits.add_(parameters[:, -1:])

    def compute_residual(self, logits: Tensor) -> Tensor:
        """Return probabilities minus targets, with a small relative error.

        For a well classified image 1 - p loses all digits below 1e-7, and the gradient of a weakly regularized
        classifier consists of them. The sum of the other classes' p keeps these digits.
        """
        if self.several_labels:
            residual = torch.sigmoid(torch.where(self.targets > 0, -logits, logits))
            residual = torch.where(self.targets > 0, -residual, residual)
            return residual if self.known is None else residual.mul_(self.known)
        wrong = logits.softmax(dim=2).mul_(self.others)
        return wrong.addcmul_(self.targets, wrong.sum(dim=2, keepdim=True), value=-1)

    def compute_gradient(self) -> Tensor:
        """Return the gradient, from the residual at the current parameters."""
        residual = self.residual
        count, images, classes = residual.shape
        flat = residual.movedim(1, 0).reshape(images, count * classes)
        slope = (self.rows.T @ flat).view(-1, count, classes).movedim(1, 0)
        slope = slope + self.penalty[:, None, None] * self.parameters[:, :-1]
        return torch.cat([slope, residual.sum(dim=1, keepdim=True)], dim=1)

    def direction(self) -> Tensor:
        """Return -H gradient by the two loops of L-BFGS; H_0 is the inverse of ``curvature``."""
        inverse = (1 / self.curvature())[:, :, None]
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
        """Return a length t (A, 1, 1) with |f'(t)| <= CURVATURE |f'(0)|, using only the derivative.

        f'(t) = sum (p(Z + t Z_d) - y) Z_d + λ (W + t D) . D rises with t, so a bracket always closes.
        The residual of the last trial is stored: the next gradient needs it.
        """
        moved = direction[:, :-1]
        linear = self.penalty[:, None, None] * _dot(self.parameters[:, :-1], moved)
        quadratic = self.penalty[:, None, None] * _dot(moved, moved)
        start = _dot(self.gradient, direction)
        low, high = torch.zeros_like(start), torch.full_like(start, torch.inf)
        slope_low, slope_high = start, torch.full_like(start, torch.inf)
        length, done = torch.ones_like(start), start >= 0
        for _ in range(TRIALS):
            self.residual = self.compute_residual(self.logits + length * logit_direction)
            slope = _dot(self.residual, logit_direction) + linear + length * quadratic
            done = (slope.abs() <= CURVATURE * start.abs()) | (start >= 0)
            if bool(done.all()):
                break
            short = slope < 0
            low, slope_low = torch.where(short, length, low), torch.where(short, slope, slope_low)
            high, slope_high = torch.where(short, high, length), torch.where(short, slope_high, slope)
            secant = low - slope_low * (high - low) / (slope_high - slope_low)
            inside = torch.minimum(torch.maximum(secant, low + 0.1 * (high - low)), high - 0.1 * (high - low))
            # f still falls at this length: extrapolate the derivative linearly, to at most ten times the length
            beyond = length * (start / (start - slope)).clamp(2, 10)
            beyond = torch.where(slope <= start, 10 * length, beyond)
            length = torch.where(done, length, torch.where(high.isinf(), beyond, inside))
        else:  # the bracket is still wide: f is known to fall only up to its lower end
            length = torch.where(done, length, low)
            self.residual = self.compute_residual(self.logits + length * logit_direction)
            no_step = ~done & (low == 0)  # restart from H_0; if the direction came from H_0, the search has failed
            self.lost = self.lost | (no_step & (sum(pair[2] for pair in self.pairs) == 0)).flatten()
            self.pairs = [(step, change, inverse * ~no_step) for step, change, inverse in self.pairs]
        self.stalled = self.stalled | (start >= 0).flatten()
        return length


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(1, 2), keepdim=True)
