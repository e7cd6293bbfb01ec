"""Moving averages of weights: θ_t ← m θ_t + (1 - m) θ_s, all tensors at once."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def average_into(target: nn.Module, source: nn.Module, momentum: float) -> None:
    """Move every parameter of ``target`` towards ``source`` by (1 - momentum); buffers are copied."""
    ours, theirs = list(target.parameters()), [parameter.detach() for parameter in source.parameters()]
    torch._foreach_lerp_(ours, theirs, 1.0 - momentum)
    kept = [(mine, other) for mine, other in zip(target.buffers(), source.buffers(), strict=True) if mine.numel()]
    for mine, other in kept:
        mine.copy_(other)
