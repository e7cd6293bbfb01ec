"""What the view and the region level share: pairs of crops, sharpened targets, heads, teacher and centre.

EsViT (Li et al., 2022) section 2.2, after DINO (Caron et al., 2021): a student is trained to give the distribution
over prototypes that a teacher, its own moving average, gives for another crop of the same image. Subtracting a
running mean from the teacher's logits (the centre) and dividing by a small temperature keep it from collapsing.
"""

from __future__ import annotations

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

# Rows × prototypes the health numbers may look at: a sample says enough and costs little.
_HEALTH_ELEMENTS = 2**26


def teachers_of(crop: int, teachers: int) -> list[int]:
    """The teacher crops a student crop is compared with: all but itself."""
    return [t for t in range(teachers) if t != crop]


def count_pairs(students: int, teachers: int) -> int:
    """|P|, the number of pairs (s, t) with s ≠ t."""
    pairs = sum(len(teachers_of(crop, teachers)) for crop in range(students))
    if pairs == 0 or teachers > students:
        raise UserError(
            f"{students} student and {teachers} teacher crops make no pairs of different crops of one image; "
            "give at least two crops, the teacher's first."
        )
    return pairs


def teacher_probs(logits: Tensor, center: Tensor, temperature: float | Tensor) -> Tensor:
    """The teacher's distribution: softmax((logits - centre) / τt) over the last axis, at least in fp32."""
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
    """The centre after a step: momentum · centre + (1 - momentum) · mean of all teacher logits of all processes.

    Call it after the loss: a step is judged with the centre from before it.
    """
    flat = torch.cat([logits.flatten(0, -2) for logits in teacher_logits]).to(center.dtype)
    mean = _mean_over_processes(torch.cat((flat.sum(0), flat.new_full((1,), len(flat)))))
    return center.lerp(mean.view_as(center), 1.0 - momentum)


class Matching(nn.Module, ABC):
    """What the view and the region level share: two heads, the teacher's an average of the student's, and a centre.

    student, teacher: :class:`ProjectionHead`; ``update_teacher`` moves the teacher's towards the student's
    center:           (1, K), starts at zero, moved after every loss while training, over all processes
    chunked:          never hold the logits (see chunked.py); ``"auto"`` does so where it pays

    Under gradient accumulation pass ``hold_center=True`` to every call and call ``move_center`` once per step.
    Released checkpoints: their ``head.*`` (``head_dense.*``) fits ``student`` and ``teacher``, their
    ``dino_loss.center`` (``center_grid``) fits ``center``.
    """

    level: Literal["grid", "pooled"]
    """Which of the Features are matched."""

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
            raise UserError(f"chunked={chunked!r}: give True, False or 'auto'.")
        self.student = ProjectionHead(dim, prototypes, hidden, bottleneck, layers, norm_last)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.dim = dim
        self.student_temp = student_temp
        self.center_momentum = center_momentum
        self.chunked = chunked
        self.center: Tensor
        self.register_buffer("center", torch.zeros(1, prototypes))
        self._seen: Tensor | None = None  # sum and number of teacher bottlenecks since the centre last moved

    def forward(
        self,
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor = 0.04,
        *,
        hold_center: bool = False,
    ) -> Tensor:
        """The loss over crops, global ones first; ``teacher_features`` are those of the first student crops."""
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
        """Count teacher outputs (…, P) in for the next move of the centre.

        The mean logit is the mean bottleneck times the prototypes, so P numbers (not K) are kept and reduced.
        """
        vectors = teacher_bottlenecks.flatten(0, -2)
        seen = torch.cat((vectors.sum(0), vectors.new_full((1,), len(vectors))))
        self._seen = seen if self._seen is None else self._seen + seen

    def move_center(self) -> None:
        """Move the centre by the teacher outputs seen since it last moved, those of all processes."""
        self._move_center(self.teacher.weight())

    @torch.no_grad()
    def _move_center(self, teacher_weight: Tensor) -> None:
        if self._seen is None:
            raise RuntimeError("move_center without a loss before it: there is nothing to move the centre by")
        with torch.autocast(self.center.device.type, enabled=False):
            mean = F.linear(_mean_over_processes(self._seen).to(self.center), teacher_weight.to(self.center))
        self.center.lerp_(mean.view_as(self.center), 1.0 - self.center_momentum)
        self._seen = None

    def update_teacher(self, momentum: float, skipped: Tensor | None = None) -> None:
        """Move the teacher's head towards the student's: θ_t <- m θ_t + (1 - m) θ_s, unless the step was skipped."""
        update_average(self.teacher, self.student, momentum, skipped)

    def drop_head_grads(self) -> None:
        """Drop the head's gradients: with gradients of zero, weight decay would still wear it away."""
        for parameter in self.student.parameters():
            parameter.grad = None

    def drop_last_layer_grads(self) -> None:
        """Drop the prototypes' gradients: call between backward and step for as long as they shall rest."""
        for parameter in self.student.last_layer.parameters():
            parameter.grad = None

    @abstractmethod
    def assignment(self, student_features: Sequence[Features], teacher_features: Sequence[Features]) -> Tensor:
        """C (B, S, J): what every student row against every teacher row of its image weighs in the loss; sums to 1."""

    @torch.no_grad()
    def health(
        self,
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor = 0.04,
    ) -> dict[str, Tensor]:
        """Signs of life over a sample of the batch, as scalars on the device.

        teacher_entropy   mean entropy of the teacher's distributions in nats; ln K means uniform
        teacher_kl        its distance to uniform, ln K - teacher_entropy; towards 0 is the uniform collapse
        prototypes_used   exp(entropy of the mean distribution): how many prototypes are in use, 1 to K
        dominant          share of rows whose top prototype is the commonest one; 1 is the one-prototype collapse
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
        return numbers | self._more_health(assignment, student_features, teacher_features)

    def _more_health(
        self, assignment: Tensor, student_features: Sequence[Features], teacher_features: Sequence[Features]
    ) -> dict[str, Tensor]:
        return {}

    def _check(self, student_features: Sequence[Features], teacher_features: Sequence[Features]) -> None:
        """Crops that do not fit each other or the heads."""
        sides = {"student_features": student_features, "teacher_features": teacher_features}
        for what, crops in sides.items():
            if isinstance(crops, Features | Tensor) or not all(isinstance(crop, Features) for crop in crops):
                raise UserError(f"{what}: give a list of what a backbone gives, Features, one for each crop.")
        if student_features:
            batch = len(student_features[0].pooled)
            for what, crops in sides.items():
                tensors = [getattr(crop, self.level) for crop in crops]
                check_crops(f"{what}, {self.level}", tensors, {"grid": 4, "pooled": 2}[self.level], batch, self.dim)

    @abstractmethod
    def _rows(self, features: Features) -> Tensor:
        """A crop's vectors that go through the head: (B, T, D)."""

    @abstractmethod
    def _plain_loss(
        self,
        student_logits: Sequence[Tensor],
        teacher_logits: Sequence[Tensor],
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor,
    ) -> Tensor:
        """The loss from the logits of every crop, (B, T, K)."""

    def _bottlenecks(self, head: ProjectionHead, crops: Sequence[Features]) -> tuple[Tensor, list[int]]:
        """All crops through the head at once: (B, ΣT, P) and the T of every crop."""
        parts = [self._rows(crop) for crop in crops]
        return head.project(torch.cat(parts, dim=1)), [part.shape[1] for part in parts]


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1)


def _mean_over_processes(sum_and_count: Tensor) -> Tensor:
    """(…sum, count) of this process -> the mean over all processes' rows."""
    if dist.is_available() and dist.is_initialized():
        sum_and_count = sum_and_count.clone()
        dist.all_reduce(sum_and_count)
    return sum_and_count[:-1] / sum_and_count[-1]
