"""Row-wise softmax with its log-normalizer in one Triton kernel: the logits are read twice and written once.

Plain torch needs a kernel and a pass over memory for every subtraction, maximum, exponential, sum and division.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton's type stubs describe only scalars, not tiles.

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def softmax_kernel(logits, shift, probabilities, normalizer, length, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # Every lane has its own maximum and sum; they are combined once, at the end.
    top, total = tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + lane < length
        value = tl.load(logits + row * length + start + lane, mask=inside, other=-1e30)
        if SHIFTED:
            value -= tl.load(shift + start + lane, mask=inside, other=0.0)
        higher = tl.maximum(top, value)
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    peak = tl.max(top, 0)
    denominator = tl.sum(total * tl.exp(top - peak), 0)
    tl.store(normalizer + row, peak + tl.log(denominator))
    for start in range(0, length, BLOCK):
        inside = start + lane < length
        value = tl.load(logits + row * length + start + lane, mask=inside, other=-1e30)
        if SHIFTED:
            value -= tl.load(shift + start + lane, mask=inside, other=0.0)
        share = tl.exp(value - peak) * (1.0 / denominator)
        tl.store(probabilities + row * length + start + lane, share.to(probabilities.dtype.element_ty), mask=inside)


def fused_softmax(logits: Tensor, shift: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log-normalizers (R) and probabilities (R, K) in ``dtype`` of softmax(logits - shift), logits (R, K)."""
    rows, length = logits.shape
    probabilities = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    normalizer = torch.empty(rows, dtype=logits.dtype, device=logits.device)
    softmax_kernel[(rows,)](
        logits, logits if shift is None else shift, probabilities, normalizer, length,
        SHIFTED=shift is not None, BLOCK=min(_BLOCK, triton.next_power_of_2(length)), num_warps=8,
    )  # fmt: skip
    return normalizer, probabilities
