"""Capture the gradients of a step as a CUDA graph and replay it.

With small images the CPU is the limit: it queues hundreds of kernels per step. A graph is one call, and reserves
memory. Inputs are copied into fixed tensors; dropout and stochastic depth read the generator's seed at each replay.
Clipping, the optimiser and the EMA stay outside the graph. The first steps run normally on a side stream: they compile
and load kernels, which must not happen during capture.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from frugalvit.engine.failure_dump import is_out_of_memory
from frugalvit.errors import UserError

WARM_UP = 3
"""Normal steps before a kind of input is captured."""

Inputs = Sequence[Tensor | bool | None]
Values = dict[str, Tensor]


class CapturedGraph(NamedTuple):
    """A captured step: how to replay it, its input tensors, its losses and gradients."""

    replay: Callable[[], None]
    inputs: Inputs
    values: Values
    gradients: list[Tensor | None]


class GraphedStep:
    """Runs a step as CUDA graphs: one graph for each combination of shapes, flags and missing tensors."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.stream = _stream(device) if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.warmed_up: Counter[object] = Counter()
        self.captured: dict[object, CapturedGraph] = {}

    def run(self, action: Callable[..., Values], inputs: Inputs) -> Values:
        """Run one step and return its losses (the next step overwrites them); gradients go to the parameters."""
        kind = tuple((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in inputs)
        if kind not in self.captured:
            self.warmed_up[kind] += 1
            if self.warmed_up[kind] <= WARM_UP:
                return on_side_stream(lambda: action(*inputs), self.stream)
            self.captured[kind] = self._capture(action, inputs)
        graph = self.captured[kind]
        for fixed, value in zip(graph.inputs, inputs, strict=True):
            if isinstance(fixed, Tensor) and isinstance(value, Tensor):
                fixed.copy_(value)
        graph.replay()
        for parameter, gradient in zip(self.parameters, graph.gradients, strict=True):
            parameter.grad = gradient
        return graph.values

    def _capture(self, action: Callable[..., Values], inputs: Inputs) -> CapturedGraph:
        fixed = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
        try:
            replay, values = capture(lambda: action(*fixed), self.stream, self.pool)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"This step cannot be captured as a CUDA graph ({reason}…). Use --compile true.") from error
        return CapturedGraph(replay, fixed, values, [parameter.grad for parameter in self.parameters])


@functools.cache
def _stream(device: torch.device) -> Any:
    """Return one stream for all graphs: cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)


def on_side_stream(action: Callable[[], Values], stream: Any) -> Values:
    """Run on another stream: autograd accumulates gradients on the forward pass's stream."""
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        values = action()
    here.wait_stream(stream)
    return values


def capture(action: Callable[[], Values], stream: Any, pool: Any) -> tuple[Callable[[], None], Values]:
    """Capture an action as a graph; return its replay function and its output tensors.

    Graphs of one ``pool`` share temporary memory, since no two run at once.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: threads that decode and prefetch images may allocate during the capture.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        values = action()
    return graph.replay, values
