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
    if kept:
        mine, others = map(list, zip(*kept, strict=True))
        torch._foreach_copy_(mine, others)  # pyright: ignore
