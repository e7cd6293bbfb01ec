"""What a step leaves in buffers (BatchNorm's statistics, centres), and how it is taken back.

A ResNet has a hundred of them, so they are remembered and put back as one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

_foreach: Any = torch  # the functions over many tensors at once have private names

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The names of what every pass through a BatchNorm moves."""

MOVED = (*STATISTICS, "center")
"""The names of what a step moves besides weights and moments."""


class Kept:
    """The buffers of these names as they were."""

    def __init__(self, task: nn.Module, names: tuple[str, ...]) -> None:
        kinds: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, buffer in task.named_buffers():
            if name.rpartition(".")[2] in names:
                kinds[buffer.dtype].append(buffer)
        self.kinds = list(kinds.values())
        self.before: list[Tensor] = []

    def remember(self) -> None:
        self.before = [_as_one(buffers) for buffers in self.kinds]

    def put_back(self) -> None:
        for buffers, before in zip(self.kinds, self.before, strict=True):
            _fill(buffers, before)

    def put_back_where(self, bad: Tensor) -> None:
        """Put them back if ``bad``; on a GPU without looking at it."""
        if bad.device.type == "cpu" and not bool(bad):
            return
        for buffers, before in zip(self.kinds, self.before, strict=True):
            _fill(buffers, torch.where(bad, before, _as_one(buffers)))


def _as_one(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])


def _fill(buffers: list[Tensor], values: Tensor) -> None:
    parts = values.split([buffer.numel() for buffer in buffers])
    _foreach._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
