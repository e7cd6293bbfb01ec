"""Settings of PyTorch that the hardware wants."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from frugalvit import console, onednn


def tune_for_gpu() -> None:
    """TF32 where a product is not in bf16 anyway; one CPU thread for the small tensors that plan a batch.

    The host only queues work. Sixteen threads that wait for each other over tensors of a few hundred numbers doubled
    the time to queue a step, and processes that share a machine made it five times as long.
    """
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)


def tune_for_cpu() -> None:
    """Leave oneDNN out where the processor's own library of products is faster."""
    if torch.backends.mkldnn.is_available() and _onednn_is_slow():
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
    """Whether this is an ARM processor without SVE, the vectors that oneDNN's own kernels are written for.

    There oneDNN multiplies a batch of matrices one by one, and brings each into another order before: attention's q kᵀ
    took five to forty times as long, and a step of training was slower with each of the networks tried. This is looked
    up, never measured: products differ in their last bits with and without oneDNN, so a run that is resumed on a busy
    machine must decide as it did when it began.
    """
    slow = platform.machine() in ("aarch64", "arm64") and bool(found := _arm_features()) and "sve" not in found
    if slow:
        console.say("oneDNN is left out: this processor has no SVE, without which attention is slower with it")
    return slow


def _arm_features(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What Linux says an ARM processor can do; nothing on other systems."""
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {word for line in lines if line.startswith("Features") for word in line.partition(":")[2].split()}


@contextmanager
def as_pytorch_comes() -> Iterator[None]:
    """oneDNN as PyTorch has it by default, to compare with."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was
