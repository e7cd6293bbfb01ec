"""Gradients between backward and the optimiser: clip them, skip non-finite steps, restore buffers."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

_foreach: Any = torch  # the multi-tensor functions have private names


def clip_per_tensor(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Clip each gradient tensor to the norm ``limit``, as released EsViT does; return the global norm before."""
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


def unwrapped(optimizer: Any) -> Any:
    """Return the optimiser without Fabric's wrapper; gradient scalers identify it by this object."""
    return getattr(optimizer, "optimizer", optimizer)


def step_if_finite(optimizer: Any, norm: Tensor, guard: Tensor, *, scaled: bool = False) -> Tensor:
    """Step the optimiser if the gradients are finite, else count the step; return True if it was skipped.

    On a GPU the decision stays on the device: fused AdamW reads ``found_inf`` and keeps weights and moments. With fp16
    (``scaled``) the gradient scaler does the same and halves its scale.
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


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""BatchNorm buffers, which every forward pass changes."""

MOVED = (*STATISTICS, "center")
"""All buffers that a step changes."""


class BufferSnapshot:
    """A copy of the buffers with these names, to restore later."""

    def __init__(self, task: nn.Module, names: tuple[str, ...]) -> None:
        kinds: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, buffer in task.named_buffers():
            if name.rpartition(".")[2] in names:
                kinds[buffer.dtype].append(buffer)
        self.kinds = list(kinds.values())
        self.before: list[Tensor] = []

    def save(self) -> None:
        self.before = [_as_one(buffers) for buffers in self.kinds]

    def restore(self) -> None:
        for buffers, before in zip(self.kinds, self.before, strict=True):
            _fill(buffers, before)

    def restore_if(self, bad: Tensor) -> None:
        """Restore if ``bad``; on a GPU without synchronising."""
        if bad.device.type == "cpu" and not bool(bad):
            return
        for buffers, before in zip(self.kinds, self.before, strict=True):
            _fill(buffers, torch.where(bad, before, _as_one(buffers)))


def _as_one(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])


def _fill(buffers: list[Tensor], values: Tensor) -> None:
    parts = values.split([buffer.numel() for buffer in buffers])
    _foreach._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
