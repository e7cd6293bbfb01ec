"""Settings of PyTorch that the hardware wants."""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import MixedPrecision, Precision

from frugalvit.data.image_size import best_device
from frugalvit.errors import UserError
from frugalvit.utils import console


def configure_cuda() -> None:
    """TF32 where a product is not in bf16 anyway; one CPU thread for the small tensors that plan a batch.

    The host only queues work. Sixteen threads that wait for each other over tensors of a few hundred numbers doubled
    the time to queue a step, and processes that share a machine made it five times as long.
    """
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)


def configure_cpu() -> None:
    """Leave oneDNN out where the processor's own library of products is faster."""
    if torch.backends.mkldnn.is_available() and _onednn_is_slow():
        torch.backends.mkldnn.enabled = False


@contextmanager
def cpu_settings(device: torch.device) -> Iterator[None]:
    """What a processor wants, inside alone: for models that work within somebody else's program.

    Nothing where the work is recorded: a compiled or exported program has no switches in it.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        yield
        return
    with preserve_onednn():
        configure_cpu()
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
        console.info("oneDNN is left out: this processor has no SVE, without which attention is slower with it")
    return slow


def _arm_features(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What Linux says an ARM processor can do; nothing on other systems."""
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {word for line in lines if line.startswith("Features") for word in line.partition(":")[2].split()}


@contextmanager
def default_onednn() -> Iterator[None]:
    """oneDNN as PyTorch has it by default, to compare with."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was


class Autocast(MixedPrecision):
    """Mixed precision that leaves inputs as they are.

    Fabric's own rounds every number that goes into a network to half precision: boxes would be off by pixels, and the
    soft labels of mixup would no longer add up to one. Autocast rounds what goes into a product, and only there.
    """

    def convert_input(self, data: Any) -> Any:
        return data

    def unscale_gradients(self, optimizer: Any) -> None:
        """Fabric's own refuses fused optimisers, which unscale as they step; they do not where it is done already."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)


def precision_name(wanted: str, device: str) -> str:
    """Lightning's name for a wanted precision; "auto" is the half precision that the hardware has, on a CPU none."""
    if wanted == "auto":
        # Older GPUs emulate bf16, slower than single precision.
        has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = ("bf16" if has_bf16 else "fp16") if device == "cuda" else "32"
    return {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[wanted]


def make_precision(wanted: str, device: str) -> Precision:
    """What Fabric is given as its plugin, for "cpu", "cuda" or "mps"."""
    name = precision_name(wanted, device)
    return Precision() if name == "32-true" else Autocast(name, device)  # type: ignore[arg-type]


def pick_device(wanted: str) -> str:
    """The device asked for, or the best there is; a CPU is made ready for our products."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = best_device() if wanted == "auto" else wanted
    if device not in present:
        raise UserError(f"There is no kind of device '{wanted}': auto, cpu, cuda or mps.")
    if not present[device]:
        raise UserError(f"There is no {wanted} device here. Use --device auto or --device cpu.")
    if device == "cpu":
        configure_cpu()
    return device


def numbered_device(wanted: str | torch.device) -> tuple[str, int]:
    """The kind of device and its number: of "auto", "cuda", "cuda:1", ``torch.device("cpu")``."""
    kind, _, number = str(wanted).partition(":")
    device = pick_device(kind)
    count = torch.cuda.device_count() if device == "cuda" else 1
    if number and not (kind != "auto" and number.isdigit() and int(number) < count):
        raise UserError(f"There is no device '{wanted}': {count} of kind '{device}' here, counted from 0.")
    return device, int(number or 0)


_lock = threading.Lock()
_inside = 0
_callers = True


@contextmanager
def preserve_onednn() -> Iterator[None]:
    """oneDNN is after this as it was before. Counted: of several threads inside, the last to leave turns it back."""
    global _inside, _callers
    with _lock:
        if _inside == 0:
            _callers = torch.backends.mkldnn.enabled
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.backends.mkldnn.enabled = _callers
