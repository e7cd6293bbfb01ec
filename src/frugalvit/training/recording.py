"""A training step recorded once as a CUDA graph, and replayed.

A step of small images keeps the host busier than the GPU: hundreds of kernels to queue, the gradients of a hundred
parameters to hand around, an optimiser to walk through. Recorded, forward, backward, clipping and optimiser are one
call. What differs from step to step comes in through tensors that stay where they are: the step's inputs and the
learning rates. Dropout and stochastic depth follow the generator's seed, which a replay reads anew.

The first steps are taken as they come, on a stream of their own as the recording needs it: they compile, allocate the
optimiser's moments and load kernels, none of which may happen while a graph is recorded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.training.faults import is_out_of_memory

WARM_UP = 3
"""Steps with inputs of one kind that are taken before they are recorded."""

Inputs = Sequence[Tensor | None]
Values = dict[str, Tensor]


class Recorded(NamedTuple):
    """What replays a step, the tensors it reads, and those it leaves its values in."""

    replay: Callable[[], None]
    held: Inputs
    values: Values


class Recording:
    """Takes steps: ``advance`` turns a step's inputs into its values and moves the weights.

    Inputs of every shape have a recording of their own: a last batch that is smaller, a step without Drloc.
    """

    def __init__(self, advance: Callable[..., Values], optimizer: Any, device: torch.device) -> None:
        self.advance, self.optimizer = advance, optimizer
        self.rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.stream = _stream(device) if device.type == "cuda" else None
        self.taken: Counter[object] = Counter()
        self.recorded: dict[object, Recorded] = {}

    def take(self, inputs: Inputs) -> Values:
        """One step; its values are overwritten by the next."""
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        kind = tuple(None if given is None else (given.shape, given.dtype) for given in inputs)
        if kind not in self.recorded:
            self.taken[kind] += 1
            if self.taken[kind] <= WARM_UP:
                with self._rates_in_tensors():
                    return aside(lambda: self.advance(*inputs), self.stream)
            self.recorded[kind] = self._record(inputs)
        recorded = self.recorded[kind]
        for held, given in zip(recorded.held, inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        recorded.replay()
        return recorded.values

    def _record(self, inputs: Inputs) -> Recorded:
        held = [None if given is None else given.clone() for given in inputs]
        try:
            with self._rates_in_tensors(capturable=True):
                replay, values = record(lambda: self.advance(*held), self.stream)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"This step cannot be recorded as a CUDA graph ({reason}…). Use --compile true, without graphs."
            ) from error
        return Recorded(replay, held, values)

    @contextmanager
    def _rates_in_tensors(self, **more: Any) -> Iterator[None]:
        """Inside, the optimiser reads its rates from tensors; a checkpoint holds plain numbers as ever."""
        groups = self.optimizer.param_groups
        before = [{name: group[name] for name in ("lr", *more)} for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group.update(lr=rate, **more)
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


@functools.cache
def _stream(device: torch.device) -> Any:
    """One for all the recordings of a process: cuBLAS keeps a workspace for every stream that it has worked on."""
    return torch.cuda.Stream(device)


def aside(action: Callable[[], Values], stream: Any) -> Values:
    """Do it on another stream: gradients are added up on the stream that the forward pass was on."""
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        values = action()
    here.wait_stream(stream)
    return values


def record(action: Callable[[], Values], stream: Any) -> tuple[Callable[[], None], Values]:
    """Queue an action into a graph instead of doing it; what replays it, and where it leaves its values."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on allocating meanwhile: those that decode and read ahead have nothing to do with it.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        values = action()
    return graph.replay, values
