"""EMA: exponential moving average of a network's weights."""

from functools import cached_property

import torch
from torch import Tensor, nn

from frugalvit.objectives.esvit import move_towards


class EMA:
    """Moves the weights of ``average`` towards those of ``source``: θ <- m θ + (1 - m) θ_source.

    The tensors are collected once, at the first update: on a GPU, collecting takes longer than averaging.

    buffers: copy the source's buffers (BatchNorm statistics); a teacher keeps its own
    """

    def __init__(self, average: nn.Module, source: nn.Module, *, buffers: bool) -> None:
        self.average, self.source, self.buffers = average, source, buffers

    @torch.no_grad()
    def update(self, momentum: float, skipped: Tensor | None = None) -> None:
        """Average the parameters unless the step was skipped; copy the buffers, which a skip restored."""
        move_towards(*self._averaged, momentum, skipped)
        for mine, others in self._copied:
            torch._foreach_copy_(mine, others)  # pyright: ignore

    @cached_property
    def _averaged(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.average.parameters()), list(self.source.parameters())

    @cached_property
    def _copied(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the buffers to copy, floating-point and integer ones separately."""
        pairs = zip(self.average.buffers(), self.source.buffers(), strict=True) if self.buffers else ()
        nonempty = [(mine, other) for mine, other in pairs if mine.numel()]
        kinds = ([pair for pair in nonempty if pair[0].is_floating_point() == floating] for floating in (True, False))
        return [([mine for mine, _ in kind], [other for _, other in kind]) for kind in kinds if kind]
