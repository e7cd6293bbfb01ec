"""Pseudo-labels: which predictions on unlabelled images to learn from, and how much each counts.

A teacher sees a weakly augmented view of each of N images and predicts q (N, C). Its class q̂ = argmax q is the label of
the strongly augmented view, for which the student predicts Q:

    L_u = 1/N Σ_n w_n · H(q̂_n, Q_n)

The methods differ in the weights w. FixMatch and FlexMatch have thresholds, so w is 0 or 1; the weights of SoftMatch
are in between. Thresholds follow the predictions of all processes, and are buffers, so that a checkpoint holds them.
Nothing here waits for the device.
"""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.errors import UserError

_TINY = 1e-12


def pseudo_label_loss(logits: Tensor, probs: Tensor, weights: Tensor, temperature: float = 0.0) -> Tensor:
    """Return L_u of the student's logits (N, C) for the teacher's probabilities (N, C) and weights (N,).

    temperature: 0 learns the class q̂; above 0, the distribution q^(1/T) / Σ_c q_c^(1/T)
    """
    target = probs.argmax(1) if temperature == 0 else (probs.clamp(min=_TINY).log() / temperature).softmax(1)
    return (weights * F.cross_entropy(logits.float(), target, reduction="none")).mean()


class PseudoLabels(nn.Module, ABC):
    """Base of the methods. In training mode each call moves the thresholds."""

    @abstractmethod
    def forward(self, probs: Tensor, index: Tensor) -> Tensor:
        """Return the weights (N,) of the teacher's probabilities (N, C) of the images with the numbers ``index``."""


class FixMatch(PseudoLabels):
    """One threshold (Sohn et al., NeurIPS 2020): w_n = 1 if max q_n > τ, else 0."""

    def __init__(self, threshold: float = 0.95) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, probs: Tensor, index: Tensor) -> Tensor:
        return (probs.max(1).values > self.threshold).to(probs)


class FlexMatch(PseudoLabels):
    """Curriculum pseudo-labelling (Zhang et al., NeurIPS 2021): a class that is learned less has a lower threshold.

        σ(c) = number of images whose last prediction above τ was class c                            (Eq. 5)
        β(c) = σ(c) / max{max_c σ(c), images without such a prediction}                              (Eq. 6, 11)
        T(c) = τ · β(c) / (2 - β(c)),    w_n = 1 if max q_n > T(q̂_n), else 0                         (Eq. 7, 8, 12)

    The second maximum of β is the warm-up. A step uses the thresholds before its own predictions.
    """

    def __init__(self, classes: int, images: int, threshold: float = 0.95) -> None:
        super().__init__()
        if images < 1:
            raise UserError("FlexMatch remembers every unlabelled image: it needs their number. A stream has none.")
        self.classes, self.threshold = classes, threshold
        self.confident_class = nn.Buffer(torch.full((images,), -1))

    def thresholds(self) -> Tensor:
        """Return T (C,)."""
        counts = torch.zeros(self.classes + 1, device=self.confident_class.device)  # first: never confident
        counts.scatter_add_(0, self.confident_class + 1, torch.ones_like(self.confident_class, dtype=counts.dtype))
        beta = counts[1:] / counts.max()
        return self.threshold * beta / (2 - beta)

    @torch.no_grad()
    def forward(self, probs: Tensor, index: Tensor) -> Tensor:
        confidence, label = probs.max(1)
        weights = (confidence > self.thresholds()[label]).to(probs)
        if self.training:
            remembered = torch.where(confidence > self.threshold, label, self.confident_class[index])
            rows, classes = _gather(torch.stack((index, remembered)))
            self.confident_class[rows] = classes
        return weights


class SoftMatch(PseudoLabels):
    """Truncated Gaussian weights and uniform alignment (Chen et al., ICLR 2023, §3.1 and §3.2).

    EMA: x ← m x + (1 - m) mean over the images.

        UA(q) = Normalize(q · u / p̃),    p̃ ← EMA of q (starts at u),    u = 1/C
        μ ← EMA of the mean of max UA(q),    σ² ← EMA of its unbiased variance;    they start at 1/C and 1
        w_n = exp(-(max UA(q_n) - μ)² / (2 (σ/2)²)) if max UA(q_n) < μ, else 1

    The paper's text has σ; its code, and this class, have σ/2. The alignment changes the weights, not the labels. A
    step uses p̃, μ and σ after its own predictions.
    """

    def __init__(self, classes: int, momentum: float = 0.999) -> None:
        super().__init__()
        self.momentum = momentum
        self.confidence_mean = nn.Buffer(torch.full((), 1 / classes))
        self.confidence_variance = nn.Buffer(torch.ones(()))
        self.mean_probs = nn.Buffer(torch.full((classes,), 1 / classes))

    @torch.no_grad()
    def forward(self, probs: Tensor, index: Tensor) -> Tensor:
        if self.training:
            self.mean_probs.lerp_(_mean_over_processes(probs), 1 - self.momentum)
        aligned = probs / self.mean_probs
        confidence = (aligned / aligned.sum(1, keepdim=True)).max(1).values
        if self.training:
            mean = _mean_over_processes(confidence[:, None])
            count = len(probs) * _processes()
            variance = _mean_over_processes((confidence[:, None] - mean) ** 2) * (count / max(1, count - 1))
            self.confidence_mean.lerp_(mean[0], 1 - self.momentum)
            self.confidence_variance.lerp_(variance[0], 1 - self.momentum)
        below = (confidence - self.confidence_mean).clamp(max=0)
        return (-2 * below**2 / self.confidence_variance.clamp(min=_TINY)).exp()


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    if _processes() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def _mean_over_processes(rows: Tensor) -> Tensor:
    """(N, K) on each process -> (K,), the mean over the rows of all; every process has N rows."""
    return sum_over_processes(rows.mean(0)) / _processes()


def _gather(values: Tensor) -> Tensor:
    """(2, N) on each process -> (2, N · processes), in the order of the ranks."""
    if _processes() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(_processes())]
    dist.all_gather(parts, values)
    return torch.cat(parts, 1)
