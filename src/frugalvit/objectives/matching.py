"""Shared parts of view and region matching: pairs of crops, targets, heads, teacher and center.

EsViT (Li et al., 2022) section 2.2, after DINO (Caron et al., 2021): a student learns to predict the distribution over
prototypes that a teacher, its EMA, has for another crop of the same image. Subtracting a running mean (the center) from
the teacher's logits and dividing by a small temperature prevent collapse.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives.checks import check_center, check_crops, check_temperature
from frugalvit.objectives.chunked import assigned_cross_entropy, should_chunk
from frugalvit.objectives.projection_head import ProjectionHead, update_average

# Limit of rows × prototypes for health metrics: a sample is enough and cheap.
_HEALTH_ELEMENTS = 2**26


def teachers_of(crop: int, teachers: int) -> list[int]:
    """Return the teacher crops that a student crop is compared with: all except itself."""
    return [t for t in range(teachers) if t != crop]


def count_pairs(students: int, teachers: int) -> int:
    """Return |P|, the number of pairs (s, t) with s ≠ t."""
    pairs = sum(len(teachers_of(crop, teachers)) for crop in range(students))
    if pairs == 0 or teachers > students:
        raise UserError(
            f"{students} student and {teachers} teacher crops make no pairs of different crops of one image; "
            "use at least two crops, the teacher's first."
        )
    return pairs


def teacher_probs(logits: Tensor, center: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the teacher's softmax((logits - center) / τt) over the last axis, at least in fp32."""
    check_temperature("teacher_temp", temperature)
    check_center(center, logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ((logits - center.flatten().to(logits)) / temperature).softmax(-1)


def cross_entropy(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Σ_t -p_t · log softmax(logits / τs) for target = Σ_t p_t: (…, K), (…, K) -> (…)."""
    check_temperature("student_temp", temperature)
    with torch.autocast(logits.device.type, enabled=False):
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return target.sum(-1) * scaled.logsumexp(-1) - (target * scaled).sum(-1)


@torch.no_grad()
def update_center(center: Tensor, teacher_logits: Sequence[Tensor], momentum: float = 0.9) -> Tensor:
    """Return momentum · center + (1 - momentum) · mean of the teacher logits of all processes.

    Call it after the loss: the loss of a step uses the previous center.
    """
    flat = torch.cat([logits.flatten(0, -2) for logits in teacher_logits]).to(center.dtype)
    mean = _mean_over_processes(torch.cat((flat.sum(0), flat.new_full((1,), len(flat)))))
    return center.lerp(mean.view_as(center), 1.0 - momentum)


class Matching(nn.Module, ABC):
    """Base of the view and the region level: a student's head, a teacher's head (its EMA) and a center.

    student, teacher: :class:`ProjectionHead`; ``update_teacher`` updates the EMA
    center:           (1, K), starts at zero; in training it is updated after every loss, over all processes
    chunked:          never store all logits (see chunked.py); ``"auto"`` chooses by the number of logits

    For gradient accumulation pass ``hold_center=True`` to every call and call ``move_center`` once per step. Released
    checkpoints: ``head.*`` (``head_dense.*``) fits ``student`` and ``teacher``, and ``dino_loss.center``
    (``center_grid``) fits ``center``.
    """

    level: Literal["grid", "pooled"]
    """The part of ``Features`` that is matched."""

    def __init__(
        self,
        dim: int,
        prototypes: int = 65536,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        norm_last: bool = True,
        *,
        student_temp: float = 0.1,
        center_momentum: float = 0.9,
        chunked: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        if student_temp <= 0 or not 0 <= center_momentum <= 1:
            raise UserError("student_temp must be above 0 and center_momentum between 0 and 1.")
        if chunked not in (True, False, "auto"):
            raise UserError(f"chunked={chunked!r}: use True, False or 'auto'.")
        self.student = ProjectionHead(dim, prototypes, hidden, bottleneck, layers, norm_last)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.dim = dim
        self.student_temp = student_temp
        self.center_momentum = center_momentum
        self.chunked = chunked
        self.center: Tensor
        self.register_buffer("center", torch.zeros(1, prototypes))
        self._teacher_sum: Tensor | None = None  # sum and number of teacher bottlenecks since the last update

    def forward(
        self,
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor = 0.04,
        *,
        hold_center: bool = False,
    ) -> Tensor:
        """Return the loss over crops, global ones first. ``teacher_features`` belong to the first student crops."""
        self._check(student_features, teacher_features)
        count_pairs(len(student_features), len(teacher_features))
        student, student_sizes = self._bottlenecks(self.student, student_features)
        with torch.no_grad():
            teacher, teacher_sizes = self._bottlenecks(self.teacher, teacher_features)
            teacher_weight = self.teacher.weight()
        rows = student.shape[:2].numel() + teacher.shape[:2].numel()
        if should_chunk(rows, self.student.prototypes) if self.chunked == "auto" else self.chunked:
            loss = assigned_cross_entropy(
                student,
                self.student.weight(),
                teacher,
                teacher_weight,
                self.assignment(student_features, teacher_features),
                center=self.center,
                student_temp=self.student_temp,
                teacher_temp=teacher_temp,
            )
        else:
            student_logits = F.linear(student, self.student.weight()).split(student_sizes, dim=1)
            with torch.no_grad():
                teacher_logits = F.linear(teacher, teacher_weight).split(teacher_sizes, dim=1)
            loss = self._plain_loss(student_logits, teacher_logits, student_features, teacher_features, teacher_temp)
        if self.training:
            self.accumulate_center(teacher)
            if not hold_center:
                self._move_center(teacher_weight)
        return loss

    def accumulate_center(self, teacher_bottlenecks: Tensor) -> None:
        """Add teacher outputs (…, P) to the next update of the center.

        The mean logit is the mean bottleneck times the prototypes, so P numbers (not K) are stored and reduced.
        """
        vectors = teacher_bottlenecks.flatten(0, -2)
        total = torch.cat((vectors.sum(0), vectors.new_full((1,), len(vectors))))
        self._teacher_sum = total if self._teacher_sum is None else self._teacher_sum + total

    def move_center(self) -> None:
        """Update the center with the teacher outputs of all processes since the last update."""
        self._move_center(self.teacher.weight())

    @torch.no_grad()
    def _move_center(self, teacher_weight: Tensor) -> None:
        if self._teacher_sum is None:
            raise RuntimeError("move_center needs a loss before it")
        with torch.autocast(self.center.device.type, enabled=False):
            mean = F.linear(_mean_over_processes(self._teacher_sum).to(self.center), teacher_weight.to(self.center))
        self.center.lerp_(mean.view_as(self.center), 1.0 - self.center_momentum)
        self._teacher_sum = None

    def update_teacher(self, momentum: float, skipped: Tensor | None = None) -> None:
        """Update the teacher's head: θ_t <- m θ_t + (1 - m) θ_s, unless the step was skipped."""
        update_average(self.teacher, self.student, momentum, skipped)

    def drop_head_grads(self) -> None:
        """Set the head's gradients to None: with zero gradients, weight decay would still change it."""
        for parameter in self.student.parameters():
            parameter.grad = None

    def drop_last_layer_grads(self) -> None:
        """Set the prototypes' gradients to None: call between backward and step while they are frozen."""
        for parameter in self.student.last_layer.parameters():
            parameter.grad = None

    @abstractmethod
    def assignment(self, student_features: Sequence[Features], teacher_features: Sequence[Features]) -> Tensor:
        """C (B, S, J): the weight of every pair of a student and a teacher row of an image; sums to 1."""

    @torch.no_grad()
    def health(
        self,
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor = 0.04,
    ) -> dict[str, Tensor]:
        """Return the health metrics of a sample of the batch, as scalars on the device.

        teacher_entropy   mean entropy of the teacher's distributions in nats; ln K means uniform
        teacher_kl        its distance to uniform, ln K - teacher_entropy; near 0 means uniform collapse
        prototypes_used   exp(entropy of the mean distribution): the number of prototypes in use, 1 to K
        dominant          share of rows whose top prototype is the most common one; 1 means collapse to one prototype
        agreement         share of student rows whose top prototype is their teacher's
        """
        self._check(student_features, teacher_features)
        rows = sum(part.shape[1] for part in map(self._rows, [*student_features, *teacher_features]))
        images = max(1, _HEALTH_ELEMENTS // (rows * self.student.prototypes))
        student_features, teacher_features = (
            [Features(crop.grid[:images], crop.pooled[:images]) for crop in crops]
            for crops in (student_features, teacher_features)
        )
        student = self.student(torch.cat([self._rows(crop) for crop in student_features], dim=1))
        teacher = self.teacher(torch.cat([self._rows(crop) for crop in teacher_features], dim=1)).float()
        with torch.autocast(teacher.device.type, enabled=False):
            target = teacher_probs(teacher, self.center, teacher_temp)
            entropy = _entropy(target).mean()
            student_top, teacher_top = student.argmax(-1), target.argmax(-1)
            counts = torch.zeros(target.shape[-1], device=target.device)
            counts.scatter_add_(0, teacher_top.flatten(), counts.new_ones(teacher_top.numel()))
            agreed = (student_top[:, :, None] == teacher_top[:, None]).float()
            assignment = self.assignment(student_features, teacher_features).float()
            numbers = {
                "teacher_entropy": entropy,
                "teacher_kl": math.log(target.shape[-1]) - entropy,
                "prototypes_used": _entropy(target.flatten(0, 1).mean(0)).exp(),
                "dominant": counts.max() / teacher_top.numel(),
                "agreement": (agreed * assignment).sum() / assignment.sum(),
            }
        return numbers | self._extra_health(assignment, student_features, teacher_features)

    def _extra_health(
        self, assignment: Tensor, student_features: Sequence[Features], teacher_features: Sequence[Features]
    ) -> dict[str, Tensor]:
        return {}

    def _check(self, student_features: Sequence[Features], teacher_features: Sequence[Features]) -> None:
        """Check that the crops fit each other and the heads."""
        sides = {"student_features": student_features, "teacher_features": teacher_features}
        for name, crops in sides.items():
            if isinstance(crops, Features | Tensor) or not all(isinstance(crop, Features) for crop in crops):
                raise UserError(f"{name}: use a list of Features of a backbone, one per crop.")
        if student_features:
            batch = len(student_features[0].pooled)
            for name, crops in sides.items():
                tensors = [getattr(crop, self.level) for crop in crops]
                check_crops(f"{name}, {self.level}", tensors, {"grid": 4, "pooled": 2}[self.level], batch, self.dim)

    @abstractmethod
    def _rows(self, features: Features) -> Tensor:
        """Return the vectors of a crop that pass through the head: (B, T, D)."""

    @abstractmethod
    def _plain_loss(
        self,
        student_logits: Sequence[Tensor],
        teacher_logits: Sequence[Tensor],
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor,
    ) -> Tensor:
        """Return the loss of the logits of every crop, (B, T, K)."""

    def _bottlenecks(self, head: ProjectionHead, crops: Sequence[Features]) -> tuple[Tensor, list[int]]:
        """Project all crops at once: (B, ΣT, P), and T of every crop."""
        parts = [self._rows(crop) for crop in crops]
        return head.project(torch.cat(parts, dim=1)), [part.shape[1] for part in parts]


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1)


def _mean_over_processes(sum_and_count: Tensor) -> Tensor:
    """(…sum, count) of this process -> the mean over the rows of all processes."""
    if dist.is_available() and dist.is_initialized():
        sum_and_count = sum_and_count.clone()
        dist.all_reduce(sum_and_count)
    return sum_and_count[:-1] / sum_and_count[-1]
