"""EsViT's losses: view matching, region matching, their heads, teachers and centers. No labels are needed.

Li et al., "Efficient Self-supervised Vision Transformers for Representation Learning" (2022), section 2.2 and
Algorithm 1, after DINO (Caron et al., 2021). A student learns to predict the distribution over prototypes that a
teacher, its EMA, has for another crop of the same image. P holds the pairs (s, t) of different crops: s any crop of the
student, t a crop of the teacher.

    views:    L_V = 1/|P| Σ_{(s,t) in P} M_V(s, t),   M_V(s, t) = -p_t · log p_s                                   (1)
    regions:  L_R = 1/|P| Σ_{(s,t) in P} M_R(s, t),   M_R(s, t) = -1/T Σ_i p_{j*} · log p_i                         (2)
              j* = argmax_j cos(z_i, z_j)   over the teacher's regions z_j, for each region z_i of the student

    p_t = softmax((logits_t - center) / τt),   p_s = softmax(logits_s / τs),   averaged over the batch

The center (a running mean of the teacher's logits) and the small temperature τt prevent collapse. Views and regions
have separate heads and centers. Regions are matched on backbone features, before the head and without gradient.
``centering="sinkhorn"`` takes a center from the step's own teacher rows instead (SwAV, DINOv2; see chunked.py).

The print of Eq. 1 has p_s and p_t exchanged. Algorithm 1 matches by plain dot products; Eq. 2, the released code and
this module use the cosine. Since -p_t · log p_s = lse(s) - p_t · s, a student row needs one logsumexp for all its
teachers, and the mean over teachers needs only the mean of their distributions.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives.checks import check_center, check_crops, check_momentum, check_temperature
from frugalvit.objectives.chunked import assigned_cross_entropy, should_chunk, sinkhorn_center

# Limit of rows × prototypes for health metrics: a sample is enough and cheap.
_HEALTH_ELEMENTS = 2**26

Crops = Sequence[Features]  # one entry per crop


class Prototypes(nn.Module):
    """A linear layer without bias whose K rows are g_k · v_k / |v_k|: (…, P) -> (…, K).

    The parameters have the names of weight normalization in released checkpoints, ``weight_g`` and ``weight_v``. Unlike
    torch's hook, this module can be deep-copied at any time.
    """

    def __init__(self, bottleneck: int, prototypes: int, norm_last: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(bottleneck)
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1), requires_grad=not norm_last)
        self.weight_v = nn.Parameter(torch.empty(prototypes, bottleneck).uniform_(-bound, bound))

    def weight(self) -> Tensor:
        """Return the prototypes (K, P), at least in fp32."""
        weight = F.normalize(self.weight_v, dim=1) * self.weight_g
        return weight.to(torch.promote_types(weight.dtype, torch.float32))

    def forward(self, bottleneck: Tensor) -> Tensor:
        return F.linear(bottleneck, self.weight())


class ProjectionHead(nn.Module):
    """dim -> hidden -> … -> bottleneck (GELU between), L2-normalized, then prototypes: (…, D) -> (…, K).

    layers:    linear layers up to and including the bottleneck
    norm_last: prototypes keep length 1 (more stable); otherwise their lengths are learned

    Released EsViT and DINO heads load unchanged: ``mlp.{0,2,4}.*``, ``last_layer.weight_g``, ``last_layer.weight_v``.
    """

    def __init__(
        self,
        dim: int,
        prototypes: int = 65536,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        norm_last: bool = True,
    ) -> None:
        super().__init__()
        if min(dim, prototypes, hidden, bottleneck, layers) < 1:
            raise UserError("a projection head needs dim, prototypes, hidden, bottleneck and layers of at least 1.")
        widths = [dim, *[hidden] * (layers - 1), bottleneck]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            linear = nn.Linear(before, after)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            parts += [linear, nn.GELU()]
        self.mlp = nn.Sequential(*parts[:-1])
        self.last_layer = Prototypes(bottleneck, prototypes, norm_last)

    @property
    def prototypes(self) -> int:
        """K, the number of outputs."""
        return self.last_layer.weight_v.shape[0]

    def project(self, features: Tensor) -> Tensor:
        """(…, D) -> (…, P): the bottleneck, of length 1, at least in fp32."""
        dtype = self.last_layer.weight_v.dtype
        if features.dtype != dtype and not torch.is_autocast_enabled(features.device.type):
            features = features.to(dtype)  # the caller's autocast covered only the network
        bottleneck = self.mlp(features)
        return F.normalize(bottleneck.to(torch.promote_types(bottleneck.dtype, torch.float32)), dim=-1)

    def weight(self) -> Tensor:
        """Return the prototypes (K, P); ``forward`` returns ``project(x) @ weight().T``."""
        return self.last_layer.weight()

    def forward(self, features: Tensor) -> Tensor:
        return self.last_layer(self.project(features))


def update_average(teacher: nn.Module, student: nn.Module, momentum: float, skipped: Tensor | None = None) -> None:
    """Update the EMA: θ_t <- m θ_t + (1 - m) θ_s over all parameters at once (buffers are not averaged).

    skipped: a boolean tensor. If True, the student skipped its step and the teacher stays unchanged. On a GPU the
        value is not read, because the host would have to wait
    """
    check_momentum("momentum", momentum)
    move_towards(list(teacher.parameters()), list(student.parameters()), momentum, skipped)


@torch.no_grad()
def move_towards(
    averages: Sequence[Tensor], sources: Sequence[Tensor], momentum: float, skipped: Tensor | None = None
) -> None:
    """θ <- m θ + (1 - m) θ_source for all tensors at once, unless ``skipped``."""
    if skipped is not None and skipped.device.type == "cuda":
        # θ <- θ + s (θ_source - θ) with s = 0 after a skipped step; all tensors are finite.
        step: Any = torch._foreach_sub(sources, averages)  # pyright: ignore
        torch._foreach_mul_(step, (1.0 - momentum) * ~skipped)  # pyright: ignore
        torch._foreach_add_(averages, step)  # pyright: ignore
    elif skipped is None or not bool(skipped):
        torch._foreach_lerp_(averages, sources, 1.0 - momentum)  # pyright: ignore


def count_pairs(students: int, teachers: int) -> int:
    """Return |P|, the number of pairs (s, t) with s ≠ t."""
    pairs = students * teachers - min(students, teachers)
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
    centering:        ``"mean"`` uses this center; ``"sinkhorn"`` one that makes the teacher rows of a call (in training
                      of all processes) use all prototypes equally. Both update ``center``: ``health`` uses it
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
        centering: Literal["mean", "sinkhorn"] = "mean",
        chunked: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        check_temperature("student_temp", student_temp)
        check_momentum("center_momentum", center_momentum)
        if centering not in ("mean", "sinkhorn"):
            raise UserError(f"centering={centering!r}: use 'mean' or 'sinkhorn'.")
        if chunked not in (True, False, "auto"):
            raise UserError(f"chunked={chunked!r}: use True, False or 'auto'.")
        self.student = ProjectionHead(dim, prototypes, hidden, bottleneck, layers, norm_last)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.dim = dim
        self.student_temp = student_temp
        self.center_momentum = center_momentum
        self.centering = centering
        self.chunked = chunked
        self.center = nn.Buffer(torch.zeros(1, prototypes))
        self._teacher_sum: Tensor | None = None  # sum and number of teacher bottlenecks since the last update

    def forward(
        self,
        student_features: Crops,
        teacher_features: Crops,
        teacher_temp: float | Tensor = 0.04,
        *,
        hold_center: bool = False,
    ) -> Tensor:
        """Return the loss over crops, global ones first. ``teacher_features`` belong to the first student crops."""
        self._check(student_features, teacher_features)
        count_pairs(len(student_features), len(teacher_features))
        student = self._bottlenecks(self.student, student_features)
        with torch.no_grad():
            teacher = self._bottlenecks(self.teacher, teacher_features)
            teacher_weight = self.teacher.weight()
        center = self.center
        if self.centering == "sinkhorn":
            center = sinkhorn_center(teacher, teacher_weight, teacher_temp, all_processes=self.training)
        assignment = self.assignment(student_features, teacher_features)
        settings: Any = {"center": center, "student_temp": self.student_temp, "teacher_temp": teacher_temp}
        rows = student.shape[:2].numel() + teacher.shape[:2].numel()
        if should_chunk(rows, self.student.prototypes) if self.chunked == "auto" else self.chunked:
            weight = self.student.weight()
            loss = assigned_cross_entropy(student, weight, teacher, teacher_weight, assignment, **settings)
        else:
            logits = self.student.last_layer(student), F.linear(teacher, teacher_weight)
            loss = _assigned_loss(*logits, assignment, **settings)
        if self.training:
            self.accumulate_center(teacher)
            if not hold_center:
                self.move_center()
        return loss

    def accumulate_center(self, teacher_bottlenecks: Tensor) -> None:
        """Add teacher outputs (…, P) to the next update of the center.

        The mean logit is the mean bottleneck times the prototypes, so P numbers (not K) are stored and reduced.
        """
        vectors = teacher_bottlenecks.flatten(0, -2)
        total = torch.cat((vectors.sum(0), vectors.new_full((1,), len(vectors))))
        self._teacher_sum = total if self._teacher_sum is None else self._teacher_sum + total

    @torch.no_grad()
    def move_center(self) -> None:
        """Update the center with the teacher outputs of all processes since the last update."""
        if self._teacher_sum is None:
            raise RuntimeError("move_center needs a loss before it")
        with torch.autocast(self.center.device.type, enabled=False):
            bottleneck = _mean_over_processes(self._teacher_sum).to(self.center)
            mean = F.linear(bottleneck, self.teacher.weight().to(self.center))
        self.center.lerp_(mean.view_as(self.center), 1.0 - self.center_momentum)
        self._teacher_sum = None

    def forget_teacher(self) -> None:
        """Drop the teacher outputs since the last update of the center."""
        self._teacher_sum = None

    def update_teacher(self, momentum: float, skipped: Tensor | None = None) -> None:
        """Update the teacher's head: θ_t <- m θ_t + (1 - m) θ_s, unless the step was skipped."""
        update_average(self.teacher, self.student, momentum, skipped)

    def drop_head_grads(self) -> None:
        """Set the head's gradients to None: with zero gradients, weight decay would still change it."""
        self.student.zero_grad()

    def drop_last_layer_grads(self) -> None:
        """Set the prototypes' gradients to None: call between backward and step while they are frozen."""
        self.student.last_layer.zero_grad()

    @abstractmethod
    def assignment(self, student_features: Crops, teacher_features: Crops) -> Tensor:
        """C (B, S, J): the weight of every pair of a student and a teacher row of an image; sums to 1."""

    @torch.no_grad()
    def health(
        self, student_features: Crops, teacher_features: Crops, teacher_temp: float | Tensor = 0.04
    ) -> dict[str, Tensor]:
        """Return the health metrics of a sample of the batch, as scalars on the device.

        The teacher's distributions are those of the moving center: Sinkhorn's use all prototypes in any case.

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

    def _extra_health(self, assignment: Tensor, student_features: Crops, teacher_features: Crops) -> dict[str, Tensor]:
        return {}

    def _check(self, student_features: Crops, teacher_features: Crops) -> None:
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

    def _bottlenecks(self, head: ProjectionHead, crops: Crops) -> Tensor:
        """Project all crops at once: (B, ΣT, P)."""
        return head.project(torch.cat([self._rows(crop) for crop in crops], dim=1))


def koleo_loss(features: Tensor, *, all_processes: bool = True) -> Tensor:
    """Return KoLeo: -mean log of the distance from each image to its nearest neighbour, (B, D) -> scalar.

    Sablayrolles et al. (2019), DINOv2 §4. Features are L2-normalized, in fp32. Neighbours come from all processes, so
    that their number does not change the loss; DINOv2 takes those of one process. The gradient counts once for every
    process, because data-parallel training averages over them.
    """
    world = dist.get_world_size() if all_processes and dist.is_available() and dist.is_initialized() else 1
    if len(features) * world < 2:
        raise UserError("KoLeo needs a nearest neighbour: use a batch of at least two images (--batch, --accumulate).")
    with torch.autocast(features.device.type, enabled=False):
        unit = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=1)
        if world > 1:
            parts = [torch.empty_like(unit) for _ in range(world)]
            dist.all_gather(parts, unit.detach())
            parts[dist.get_rank()] = unit
            unit = torch.cat(parts)
        with torch.no_grad():
            nearest = (unit @ unit.mT).fill_diagonal_(-2).argmax(1)
        # Unlike a gather, the gradients of an embedding are added in a fixed order.
        distance = (unit - F.embedding(nearest, unit)).norm(dim=1)
        loss = -(distance + 1e-8).log().mean()
        return loss.detach() + world * (loss - loss.detach())


def _at_least_fp32(like: Tensor) -> dict[str, Any]:
    return {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1)


def _mean_over_processes(sum_and_count: Tensor) -> Tensor:
    """(…sum, count) of this process -> the mean over the rows of all processes."""
    if dist.is_available() and dist.is_initialized():
        sum_and_count = sum_and_count.clone()
        dist.all_reduce(sum_and_count)
    return sum_and_count[:-1] / sum_and_count[-1]


def _assigned_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    assignment: Tensor,
    center: Tensor,
    student_temp: float,
    teacher_temp: float | Tensor,
    mixing: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return Σ C -p_t · log p_s for logits (B, S, K) and (B, J, K), C (B, S, J); mixing as in :func:`view_loss`."""
    with torch.autocast(student_logits.device.type, enabled=False), torch.no_grad():
        probs = teacher_probs(teacher_logits, center, teacher_temp)
        target = assignment.to(probs) @ probs
        if mixing is not None:
            target = torch.stack([mix.to(target).mT @ target[:, crop] for crop, mix in enumerate(mixing)], dim=1)
    return cross_entropy(student_logits, target, student_temp).sum()


def view_loss(
    student_logits: Sequence[Tensor],
    teacher_logits: Sequence[Tensor],
    *,
    center: Tensor,
    student_temp: float = 0.1,
    teacher_temp: float | Tensor = 0.04,
    mixing: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return L_V over lists of logits (B, K), one per crop. The teacher's crops are the student's first, in order.

    center: (K) or (1, K)
    mixing: (B, B) per student crop, for crops mixed from several images. Row b weighs the student images that the
            teacher's image b should match; the identity gives the plain loss
    """
    assignment = _view_assignment(student_logits[0], len(student_logits), len(teacher_logits))
    for name, crops in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        check_crops(name, crops, 2, len(student_logits[0]), student_logits[0].shape[-1], axis=-1)
    student, teacher = (torch.stack(list(logits), dim=1) for logits in (student_logits, teacher_logits))
    return _assigned_loss(student, teacher, assignment, center, student_temp, teacher_temp, mixing)


def _view_assignment(rows: Tensor, students: int, teachers: int) -> Tensor:
    """Return C (B, S, J) for rows (B, …): equal weights for all pairs of different crops."""
    different = 1 - torch.eye(students, teachers, **_at_least_fp32(rows))
    return (different / (len(rows) * count_pairs(students, teachers))).expand(len(rows), -1, -1)


class ViewMatching(Matching):
    """L_V on ``Features.pooled``; ``dim`` is ``backbone.pooled_dim``. See :class:`Matching` for the options."""

    level = "pooled"

    def _rows(self, features: Features) -> Tensor:
        return features.pooled[:, None]

    def assignment(self, student_features: Crops, teacher_features: Crops) -> Tensor:
        return _view_assignment(student_features[0].pooled, len(student_features), len(teacher_features))


@torch.no_grad()
def match_regions(student_grid: Tensor, teacher_grid: Tensor) -> Tensor:
    """Match student to teacher regions: (B, D, h, w), (B, D, h', w') -> flat indices (B, h·w)."""
    return _match_all([student_grid], [teacher_grid])[0]


def region_loss(
    student_logits: Sequence[Tensor],
    teacher_logits: Sequence[Tensor],
    student_grids: Sequence[Tensor],
    teacher_grids: Sequence[Tensor],
    *,
    center: Tensor,
    student_temp: float = 0.1,
    teacher_temp: float | Tensor = 0.04,
) -> Tensor:
    """Return L_R over lists with one entry per crop: logits (B, T, K) and grids (B, D, h, w).

    T = h·w, row by row. The teacher's crops are the student's first, in order. Sizes and number of crops are free.
    """
    for name, logits, grids in (
        ("student_logits", student_logits, student_grids),
        ("teacher_logits", teacher_logits, teacher_grids),
    ):
        check_crops(name, logits, 3, len(student_logits[0]), student_logits[0].shape[-1], axis=-1)
        if [crop.shape[1] for crop in logits] != [grid.shape[2:].numel() for grid in grids]:
            raise UserError(f"{name} and grids do not fit: use one grid per crop, with one cell per region.")
    assignment = _region_assignment(student_grids, teacher_grids)
    student, teacher = (torch.cat(list(logits), dim=1) for logits in (student_logits, teacher_logits))
    return _assigned_loss(student, teacher, assignment, center, student_temp, teacher_temp)


@torch.no_grad()
def _region_assignment(student_grids: Sequence[Tensor], teacher_grids: Sequence[Tensor]) -> Tensor:
    """Return C (B, ΣT, ΣT'): equal weights for the best match of every region in every other crop."""
    batch, pairs = len(student_grids[0]), count_pairs(len(student_grids), len(teacher_grids))
    precise = _at_least_fp32(student_grids[0])
    blocks = []
    for t, match in enumerate(_match_all(student_grids, teacher_grids)):
        weights = []
        for crop, grid in enumerate(student_grids):
            regions = grid.shape[2:].numel()
            weights.append(torch.full((regions,), 0.0 if crop == t else 1 / (batch * pairs * regions), **precise))
        weight = torch.cat(weights)[None, :, None].expand(batch, -1, 1)
        block = torch.zeros(*match.shape, teacher_grids[t].shape[2:].numel(), **precise)
        blocks.append(block.scatter_(2, match[..., None], weight))
    return torch.cat(blocks, dim=2)


class RegionMatching(Matching):
    """L_R on ``Features.grid``; see :class:`Matching` for the options."""

    level = "grid"

    def _rows(self, features: Features) -> Tensor:
        return features.grid.flatten(2).transpose(1, 2)

    def assignment(self, student_features: Crops, teacher_features: Crops) -> Tensor:
        return _region_assignment([crop.grid for crop in student_features], [crop.grid for crop in teacher_features])

    def _extra_health(self, assignment: Tensor, student_features: Crops, teacher_features: Crops) -> dict[str, Tensor]:
        """Return match_entropy: how evenly matches spread over the teacher's regions, 0 (one region) to 1."""
        student_sizes = [crop.grid.shape[2:].numel() for crop in student_features]
        teacher_sizes = [crop.grid.shape[2:].numel() for crop in teacher_features]
        entropies = []
        for t, block in enumerate(assignment.split(teacher_sizes, dim=2)):
            for crop, pair in enumerate(block.split(student_sizes, dim=1)):
                max_regions = min(student_sizes[crop], teacher_sizes[t])
                if crop != t and max_regions > 1:
                    shares = pair.sum(1) / pair.sum((1, 2))[:, None]
                    entropies.append(torch.special.entr(shares).sum(1).mean() / math.log(max_regions))
        return {"match_entropy": torch.stack(entropies).mean()} if entropies else {}


def _match_all(student_grids: Sequence[Tensor], teacher_grids: Sequence[Tensor]) -> list[Tensor]:
    """Return the best region of each teacher crop for every student region, (B, ΣT), by one product."""
    batch, width = student_grids[0].shape[:2]
    for name, grids in (("student grids", student_grids), ("teacher grids", teacher_grids)):
        check_crops(name, grids, 4, batch, width)
    dtype = torch.float32
    for grid in (*student_grids, *teacher_grids):
        dtype = torch.promote_types(dtype, grid.dtype)
    with torch.autocast(student_grids[0].device.type, enabled=False):
        student, teacher = (
            torch.cat([grid.flatten(2) for grid in grids], dim=2).to(dtype) for grids in (student_grids, teacher_grids)
        )
        similarity = F.normalize(student, dim=1).mT @ F.normalize(teacher, dim=1)  # (B, ΣT, ΣT')
        sizes = [grid.shape[2:].numel() for grid in teacher_grids]
        return [block.argmax(2) for block in similarity.split(sizes, dim=2)]
