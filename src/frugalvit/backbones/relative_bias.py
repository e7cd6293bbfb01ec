"""Swin's relative biases read from their table, with a gradient that adds up in one order.

Read by an index, a row's gradient is a sum over the pairs of tokens that share its offset; compiled, that sum is made
of atomic additions, whose order and so whose last bits change from run to run. Here every row gathers its pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frugalvit.backbones.windows import WindowPlan, offsets, pairs_of_rows


def relative_bias(table: Tensor, plan: WindowPlan) -> Tensor:
    """(rows, heads) -> (N, N, heads): the bias of every pair of tokens in a window."""
    # torch.jit.trace cannot record a function with a gradient of its own.
    if torch.is_grad_enabled() and table.requires_grad and not torch.jit.is_tracing():  # pyright: ignore
        return _Read.apply(table, plan)  # type: ignore[return-value]
    return table[offsets(plan, table)]


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, plan: WindowPlan) -> Tensor:
        ctx.plan = plan
        return table[offsets(plan, table)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pairs = pairs_of_rows(ctx.plan, gradient)
        flat = gradient.flatten(0, 1)
        read = pairs < len(flat)
        return torch.where(read[..., None], flat[pairs.clamp_max(len(flat) - 1)], 0.0).sum(1), None
