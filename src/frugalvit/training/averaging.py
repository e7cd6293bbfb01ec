"""Moving averages of whole networks: parameters are averaged, buffers (BatchNorm's statistics) are copied."""

from __future__ import annotations

import torch
from torch import nn

from frugalvit.objectives.heads import update_average


@torch.no_grad()
def average_into(target: nn.Module, source: nn.Module, momentum: float) -> None:
    """Move every parameter of ``target`` towards ``source`` by (1 - momentum); buffers are copied."""
    update_average(target, source, momentum)
    kept = [(mine, other) for mine, other in zip(target.buffers(), source.buffers(), strict=True) if mine.numel()]
    for counted in (False, True):  # tensors of one kind are copied at once; BatchNorm's counters are of another
        pairs = [(mine, other) for mine, other in kept if mine.is_floating_point() != counted]
        if pairs:
            torch._foreach_copy_([mine for mine, _ in pairs], [other for _, other in pairs])  # pyright: ignore
