"""View and region losses over many prototypes that never store all logits.

Both losses are one sum over pairs of a student row n and a teacher row j of the same image b,

    L = Σ_{b,n,j} C[b,n,j] (lse(s_n) - q_j · s_n),   s_n = W u_n / τs,   q_j = softmax((W' z_j - c) / τt),

with bottleneck vectors u, z (length P), prototypes W, W' (K × P) and fixed weights C that pair students with teachers
(views: every other global crop; regions: the best match in it). Because s_n is linear in u_n,

    q_j · s_n = u_n · e_j / τs             with  e_j = Wᵀ q_j, the prototype the teacher row expects
    ∂L/∂u_n = (r_n Wᵀ p_n - Σ_j C[n,j] e_j) / τs        with  p_n = softmax(s_n),  r_n = Σ_j C[n,j]
    ∂L/∂W   = (Σ_n p_n (r_n u_n)ᵀ - Σ_j q_j (Σ_n C[n,j] u_n)ᵀ) / τs

so no product needs students and teachers in K-space together. Each side is processed in chunks of rows. A chunk's
K-wide softmax exists only during three matrix products (logits, times W, transposed times a (rows × P) matrix). Both
gradients are complete together with the loss; the backward pass recomputes nothing.

The cost is 6 (N + M) P K FLOPs for N student and M teacher rows; benchmarks/losses.py measures the time.

Sinkhorn-Knopp (SwAV, DINOv2) scales exp(W' z / τt) in turns: every prototype gets the same total, then every row gets
the sum 1. It ends with the rows, so its result is a softmax whose logits are shifted by one vector v (K),

    v <- log Σ_n exp(W' z_n / τt),   then   v <- v + log Σ_n q_n   with  q_n = softmax(W' z_n / τt - v),

and c = τt v is a center like any other: the loss and the softmax kernel stay the same. Each turn computes the logits
again, chunk by chunk, and keeps only v: 6 M P K FLOPs more for three turns. No sum over all rows is below 1 / (M K), so
that fp32 is enough.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from frugalvit.objectives.checks import check_center, check_temperature
from frugalvit.utils.triton import TRITON_AVAILABLE

# K-wide elements per chunk: 1,024 rows of 65,536 on a GPU (256 MiB of fp32 logits), enough for full-rate products.
_CHUNK_ELEMENTS = {"cuda": 2**26, "cpu": 2**23}
# Below this number of logits the plain loss fits easily and needs fewer products for the teacher.
_MIN_LOGITS = 2**25

# Without Triton the softmax on a GPU takes several kernels instead of one.
if TRITON_AVAILABLE:
    from frugalvit.objectives.softmax_kernel import fused_softmax


def should_chunk(rows: int, prototypes: int) -> bool:
    """True if the chunked loss is better for this total of student and teacher rows."""
    return rows * prototypes >= _MIN_LOGITS


# A compiled step has a graph break here; tracing would unroll the loop over chunks.
@torch.compiler.disable()
def assigned_cross_entropy(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    assignment: Tensor,
    *,
    center: Tensor,
    student_temp: float,
    teacher_temp: float | Tensor,
    rows: int | None = None,
) -> Tensor:
    """Return the loss L of this module, with gradients for ``student`` and ``student_weight``.

    student:        (B, S, P) bottleneck vectors of all student rows of an image, and prototypes (K, P)
    teacher:        (B, J, P) of all teacher rows, and prototypes (K, P)
    assignment:     (B, S, J), C above; center: (K) or (1, K)
    rows:           rows per chunk; None chooses it from K

    Under autocast on a GPU with bf16 the products run in bf16 with fp32 accumulation, everything else in fp32.
    """
    check_temperature("student_temp", student_temp)
    check_temperature("teacher_temp", teacher_temp)
    check_center(center, len(teacher_weight))
    return _AssignedCrossEntropy.apply(  # type: ignore[return-value]
        student, student_weight, teacher, teacher_weight, assignment, center, student_temp, teacher_temp, rows
    )


@torch.compiler.disable()
@torch.no_grad()
def sinkhorn_center(
    teacher: Tensor,
    teacher_weight: Tensor,
    teacher_temp: float | Tensor,
    *,
    iterations: int = 3,
    all_processes: bool = True,
    rows: int | None = None,
) -> Tensor:
    """Return the center (K) with which the teacher rows, of all processes or this one, use all prototypes equally.

    softmax((W' z - center) / τt) is Sinkhorn-Knopp's result after ``iterations`` turns.

    teacher:        (…, P) bottleneck vectors of the rows of this process, and prototypes (K, P)
    rows:           rows per chunk; None chooses it from K

    Products have the precision of :func:`assigned_cross_entropy`, everything else fp32.
    """
    check_temperature("teacher_temp", teacher_temp)
    low = _product_dtype(teacher)
    with torch.autocast(teacher.device.type, enabled=False):
        query, keys = teacher.flatten(0, -2) / teacher_temp, teacher_weight.to(low)
        shift: Tensor | None = None
        for _ in range(iterations):
            total = query.new_full((len(keys),), -math.inf)  # log Σ_n over the chunks
            for chunk in query.split(rows or _rows_per_chunk(keys)):
                logits = _product(chunk.to(low), keys.T, query.dtype)
                if shift is None:
                    part = logits.logsumexp(0)
                else:
                    part = shift + _choose_softmax(query)(logits, shift, query.dtype)[1].sum(0).log()
                total = torch.logaddexp(total, part)
            shift = _logsumexp_over_processes(total) if all_processes else total
        assert shift is not None
        return shift * teacher_temp


def _logsumexp_over_processes(values: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()):
        return values
    peak = values.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    total = (values - peak).exp()
    dist.all_reduce(total)
    return peak + total.log()


class _AssignedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_weight: Tensor,
        teacher: Tensor,
        teacher_weight: Tensor,
        assignment: Tensor,
        center: Tensor,
        student_temp: float,
        teacher_temp: float | Tensor,
        rows: int | None,
    ) -> Tensor:
        product_dtype = _product_dtype(student)
        need_student, need_weight = ctx.needs_input_grad[:2]
        with torch.autocast(student.device.type, enabled=False):
            student, teacher = student.detach(), teacher.detach().to(student.dtype)
            assignment = assignment.to(student.dtype)
            prototypes = student_weight.detach().to(product_dtype)
            share = assignment.sum(2, keepdim=True)  # r_n: (B, S, 1)
            received = assignment.mT @ student  # Σ_n C[n,j] u_n: (B, J, P)
            weight_grad = torch.zeros_like(student_weight, dtype=student.dtype) if need_weight else None

            normalizer, predicted = _softmax_moments(
                student.flatten(0, 1) / student_temp,
                prototypes,
                None,
                prototypes if need_student else None,
                (share * student).flatten(0, 1) / student_temp,
                weight_grad,
                rows,
            )
            _, expected = _softmax_moments(
                teacher.flatten(0, 1) / teacher_temp,
                teacher_weight.detach().to(product_dtype),
                center.detach().flatten().to(student.dtype) / teacher_temp,
                prototypes,
                received.flatten(0, 1) / -student_temp,
                weight_grad,
                rows,
            )
            assert expected is not None
            expected = expected.view_as(received)
            loss = (share.flatten() * normalizer).sum() - (received * expected).sum() / student_temp
            student_grad = None
            if predicted is not None:
                student_grad = (share * predicted.view_as(student) - assignment @ expected) / student_temp
        ctx.save_for_backward(student_grad, weight_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        student_grad, weight_grad = ctx.saved_tensors  # type: ignore[attr-defined]
        (outer,) = grad_outputs
        grads = [None if grad is None else grad * outer for grad in (student_grad, weight_grad)]
        return (*grads, *[None] * 7)


def _softmax_moments(
    query: Tensor,
    keys: Tensor,
    shift: Tensor | None,
    values: Tensor | None,
    factor: Tensor,
    total: Tensor | None,
    rows: int | None,
) -> tuple[Tensor, Tensor | None]:
    """For p = softmax(query keysᵀ - shift) return its log-normalizer (N) and p @ values (N, P).

    Also adds pᵀ @ factor to ``total``. query (N, P), keys and values (K, P) in the products' precision, shift (K),
    factor (N, P), total (K, P).
    """
    per_chunk = rows or _rows_per_chunk(keys)
    low, precise = keys.dtype, query.dtype
    probabilities_of = _choose_softmax(query)
    normalizers, means = [], []
    for start in range(0, len(query), per_chunk):
        chunk = slice(start, start + per_chunk)
        logits = _product(query[chunk].to(low), keys.T, precise)
        normalizer, probabilities = probabilities_of(logits, shift, low)
        del logits
        normalizers.append(normalizer)
        if values is not None:
            means.append(_product(probabilities, values, precise))
        if total is not None:
            _add_product(total, probabilities.T, factor[chunk].to(low))
    return torch.cat(normalizers), torch.cat(means) if values is not None else None


def _rows_per_chunk(keys: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS.get(keys.device.type, 2**23) // len(keys))


def _choose_softmax(query: Tensor) -> Callable[[Tensor, Tensor | None, torch.dtype], tuple[Tensor, Tensor]]:
    """Return the softmax kernel for fp32 on a GPU, else plain torch."""
    return fused_softmax if query.is_cuda and query.dtype == torch.float32 and TRITON_AVAILABLE else _softmax


def _softmax(logits: Tensor, shift: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log-normalizers (R) and probabilities (R, K) in ``dtype``; overwrite the logits."""
    if shift is not None:
        logits.sub_(shift)
    top, index = logits.max(-1, keepdim=True)
    probabilities = logits.softmax(-1)
    return (top - probabilities.gather(-1, index).log()).squeeze(-1), probabilities.to(dtype)


def _product_dtype(student: Tensor) -> torch.dtype:
    """Return bf16 under autocast if the hardware has it. fp16 would lose probabilities of 1/K and gradients of 1/N."""
    device = student.device.type
    if device == "cuda" and torch.is_autocast_enabled(device) and torch.cuda.is_bf16_supported(False):
        return torch.bfloat16
    return student.dtype


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right, accumulated in ``dtype``."""
    return torch.mm(left, right) if left.dtype == dtype else torch.mm(left, right, out_dtype=dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in the total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
