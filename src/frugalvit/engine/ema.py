"""Moving averages of whole networks: parameters are averaged, buffers (BatchNorm's statistics) are copied if wished."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from frugalvit.objectives.projection_head import move_towards


class EMA:
    """A network that follows another one: θ <- m θ + (1 - m) θ_other, all parameters at once.

    Both are looked through once, at the first step, when they are where they stay: to find 170 tensors among modules
    takes the host longer than a GPU takes to average them.

    buffers: whether buffers are copied from the other network; those of a teacher are its own
    """

    def __init__(self, follower: nn.Module, followed: nn.Module, *, buffers: bool) -> None:
        self.follower, self.followed, self.buffers = follower, followed, buffers

    @torch.no_grad()
    def update(self, momentum: float, skipped: Tensor | None = None) -> None:
        """Move every parameter by (1 - momentum) towards the followed one, unless its step was skipped.

        Buffers need no such care: those of a skipped step have been put back.
        """
        move_towards(*self._averaged, momentum, skipped)
        for mine, others in self._copied:
            torch._foreach_copy_(mine, others)  # pyright: ignore

    @cached_property
    def _averaged(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.follower.parameters()), list(self.followed.parameters())

    @cached_property
    def _copied(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Buffers, those of one kind together: BatchNorm's counters are of another than its statistics."""
        pairs = zip(self.follower.buffers(), self.followed.buffers(), strict=True) if self.buffers else ()
        kept = [(mine, other) for mine, other in pairs if mine.numel()]
        kinds = ([pair for pair in kept if pair[0].is_floating_point() == floating] for floating in (True, False))
        return [([mine for mine, _ in kind], [other for _, other in kind]) for kind in kinds if kind]
