"""Settings of PyTorch that the hardware wants: known, or measured once a process."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from frugalvit import console, onednn

_MUCH = 3.0


def tune_for_gpu() -> None:
    """TF32 where a product is not in bf16 anyway; one CPU thread for the small tensors that plan a batch.

    The host only queues work. Sixteen threads that wait for each other over tensors of a few hundred numbers doubled
    the time to queue a step, and processes that share a machine made it five times as long.
    """
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)


def tune_for_cpu() -> None:
    """Leave oneDNN out where it is much slower at attention's products than the processor's own library."""
    if platform.machine() in ("aarch64", "arm64") and torch.backends.mkldnn.is_available() and _onednn_is_slow():
        torch.backends.mkldnn.enabled = False


@contextmanager
def tuned_for(device: torch.device) -> Iterator[None]:
    """What a processor wants, inside alone: for models that work within somebody else's program.

    Nothing where the work is recorded: a compiled or exported program has no switches in it.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        yield
        return
    with onednn.given_back():
        tune_for_cpu()
        yield


@functools.lru_cache(maxsize=1)
def _onednn_is_slow() -> bool:
    """Whether attention's products take many times as long with oneDNN.

    Some builds of PyTorch for ARM carry a oneDNN without kernels for a batched product with a transposed factor, q kᵀ,
    and fall back to a loop that takes forty times as long: half of a small transformer's training. The two differ so
    much that the measurement decides the same way every time, as exact resuming needs.
    """
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    with_it = _seconds()
    torch.backends.mkldnn.enabled = False
    slow = with_it >= _MUCH * _seconds()
    torch.backends.mkldnn.enabled = was
    if slow:
        console.say("oneDNN is left out: on this processor attention takes many times as long with it")
    return slow


@contextmanager
def as_pytorch_comes() -> Iterator[None]:
    """oneDNN as PyTorch has it by default, to compare with."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was


def _seconds() -> float:
    """The quickest of a few products q kᵀ on one thread: several would measure how busy the machine is."""
    query, key = torch.ones(32, 64, 32), torch.ones(32, 64, 32)
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(5):
        began = time.perf_counter()
        torch.bmm(query, key.transpose(1, 2))
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return min(times)
