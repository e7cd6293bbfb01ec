"""What happens to gradients between backward and the optimiser: clipping, and skipping steps that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_foreach: Any = torch  # the functions over many tensors at once have private names


def clip_each(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale every gradient tensor to a norm of at most ``limit`` (released EsViT does so); the joint norm before it."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = _foreach._foreach_norm(gradients)
    joint = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    if limit > 0:
        scales = _foreach._foreach_add(norms, 1e-6)
        _foreach._foreach_reciprocal_(scales)
        _foreach._foreach_mul_(scales, limit)
        _foreach._foreach_clamp_max_(scales, 1.0)
        _foreach._foreach_mul_(gradients, scales)
    return joint


def guard_of(device: torch.device) -> Tensor:
    """Two counters on the device: non-finite steps in a row, and non-finite steps in all."""
    return torch.zeros(2, device=device)


def unwrapped(optimizer: Any) -> Any:
    """The optimiser itself, without Fabric's wrapper: what a gradient scaler knows it by."""
    return getattr(optimizer, "optimizer", optimizer)


def gate(optimizer: Any, norm: Tensor, guard: Tensor, *, scaled: bool = False) -> Tensor:
    """Take the optimiser's step only if the gradients are finite, and count it if not; whether they were not.

    On a GPU the decision stays there: fused AdamW reads ``found_inf`` and leaves weights and moments alone, so that
    nothing waits for the device. With fp16 (``scaled``) the gradient scaler does the same on its own, and halves its
    scale, wherever the run computes.
    """
    bad = ~torch.isfinite(norm)
    guard[0] = torch.where(bad, guard[0] + 1, torch.zeros_like(guard[0]))
    guard[1] += bad
    inner = unwrapped(optimizer)
    if norm.device.type == "cuda":
        inner.grad_scale, inner.found_inf = None, bad.float()
        optimizer.step()
    elif scaled or not bool(bad):
        optimizer.step()
    return bad
