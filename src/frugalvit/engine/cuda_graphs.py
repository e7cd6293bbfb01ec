"""The gradients of a step recorded once as a CUDA graph, and replayed.

A step of small images keeps the host busier than the GPU: hundreds of kernels to queue, forward and backward. Recorded,
they are one call. What differs from step to step comes in through tensors that stay where they are; dropout and
stochastic depth follow the generator's seed, which a replay reads anew. What is little work stays outside, as it is
without graphs: clipping, the optimiser, moving averages.

The first steps are taken as they come, on a stream of their own as the recording needs it: they compile and load
kernels, neither of which may happen while a graph is recorded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from frugalvit.engine.failure_dump import is_out_of_memory
from frugalvit.errors import UserError

WARM_UP = 3
"""Steps with inputs of one kind that are taken before they are recorded."""

Inputs = Sequence[Tensor | bool | None]
Values = dict[str, Tensor]


class CapturedGraph(NamedTuple):
    """What replays a step, the tensors it reads, and those it leaves its values and gradients in."""

    replay: Callable[[], None]
    held: Inputs
    values: Values
    gradients: list[Tensor | None]


class GraphedStep:
    """The recordings of one action, which turns a step's inputs into its values and leaves gradients of ``parameters``.

    Inputs of every kind have a recording of their own: of every shape (a last batch that is smaller), with a tensor or
    without (a step without Drloc), with a flag or without.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.stream = _stream(device) if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.taken: Counter[object] = Counter()
        self.captured: dict[object, CapturedGraph] = {}

    def take(self, action: Callable[..., Values], inputs: Inputs) -> Values:
        """One step's values, overwritten by the next; its gradients lie with the parameters."""
        kind = tuple((given.shape, given.dtype) if isinstance(given, Tensor) else given for given in inputs)
        if kind not in self.captured:
            self.taken[kind] += 1
            if self.taken[kind] <= WARM_UP:
                return on_side_stream(lambda: action(*inputs), self.stream)
            self.captured[kind] = self._record(action, inputs)
        recorded = self.captured[kind]
        for held, given in zip(recorded.held, inputs, strict=True):
            if isinstance(held, Tensor) and isinstance(given, Tensor):
                held.copy_(given)
        recorded.replay()
        for parameter, gradient in zip(self.parameters, recorded.gradients, strict=True):
            parameter.grad = gradient
        return recorded.values

    def _record(self, action: Callable[..., Values], inputs: Inputs) -> CapturedGraph:
        held = [given.clone() if isinstance(given, Tensor) else given for given in inputs]
        try:
            replay, values = record(lambda: action(*held), self.stream, self.pool)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"This step cannot be recorded as a CUDA graph ({reason}…). Use --compile true, without graphs."
            ) from error
        return CapturedGraph(replay, held, values, [parameter.grad for parameter in self.parameters])


@functools.cache
def _stream(device: torch.device) -> Any:
    """One for all the recordings of a process: cuBLAS keeps a workspace for every stream that it has worked on."""
    return torch.cuda.Stream(device)


def on_side_stream(action: Callable[[], Values], stream: Any) -> Values:
    """Do it on another stream: gradients are added up on the stream that the forward pass was on."""
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        values = action()
    here.wait_stream(stream)
    return values


def record(action: Callable[[], Values], stream: Any, pool: Any) -> tuple[Callable[[], None], Values]:
    """Queue an action into a graph instead of doing it; what replays it, and where it leaves its values.

    Graphs of one ``pool`` take each other's memory for what they need only while they run: no two run at once.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on allocating meanwhile: those that decode and read ahead have nothing to do with it.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        values = action()
    return graph.replay, values
