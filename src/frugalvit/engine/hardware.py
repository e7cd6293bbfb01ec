"""Hardware: choose device and precision, configure PyTorch for CPU and GPU."""

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import MixedPrecision, Precision

from frugalvit.data.image_size import best_device
from frugalvit.errors import UserError


def configure_cuda() -> None:
    """Allow TF32, use one CPU thread, and of cuDNN only those convolutions that add in a fixed order.

    The CPU only queues work, and more threads make that slower. cuDNN's attention is off: with it, compiled hybrids
    fell back to chance (docs/FIRST_RUN.md).
    """
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_cudnn_sdp(False)


def use_deterministic_algorithms() -> None:
    """Compute everything in a fixed order (``--deterministic``); warn about operations that cannot.

    This adds attention's backward pass and indexed sums to what is always deterministic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the first matrix product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging; slow


def configure_cpu() -> None:
    """Turn oneDNN off on processors where it is slow."""
    if torch.backends.mkldnn.is_available() and is_onednn_slow():
        torch.backends.mkldnn.enabled = False


@contextmanager
def cpu_settings(device: torch.device) -> Iterator[None]:
    """Apply ``configure_cpu`` inside this context only, for models inside a user's program; not in exports."""
    if device.type != "cpu" or torch.compiler.is_compiling():
        yield
        return
    with preserve_onednn():
        configure_cpu()
        yield


@functools.lru_cache(maxsize=1)
def is_onednn_slow() -> bool:
    """True on an ARM processor without SVE, for which oneDNN has no fast kernels.

    Do not measure this at run time: results differ in the last bits, so a resumed run must make the same choice.
    """
    features = _arm_features() if platform.machine() in ("aarch64", "arm64") else set()
    return bool(features) and "sve" not in features


def _arm_features(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the features of an ARM processor on Linux; empty on other systems."""
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {word for line in lines if line.startswith("Features") for word in line.partition(":")[2].split()}


class Autocast(MixedPrecision):
    """Mixed precision that does not round inputs.

    Fabric's own rounds every input to half precision: boxes would move by pixels, and mixup's soft labels would not sum
    to one. Autocast rounds only inside matrix products.
    """

    def convert_input(self, data: Any) -> Any:
        return data

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale for fused optimizers too, which Fabric refuses."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)


def precision_name(wanted: str, device: str) -> str:
    """Return Lightning's name of a precision; "auto" is bf16 or fp16 on a GPU and fp32 on a CPU."""
    if wanted == "auto":
        # Older GPUs emulate bf16, which is slower than fp32.
        has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = ("bf16" if has_bf16 else "fp16") if device == "cuda" else "32"
    return {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[wanted]


def make_precision(wanted: str, device: str) -> Precision:
    """Make Fabric's precision plugin for "cpu", "cuda" or "mps"."""
    name = precision_name(wanted, device)
    return Precision() if name == "32-true" else Autocast(name, device)  # type: ignore[arg-type]


def pick_device(wanted: str) -> str:
    """Return the requested device, or the best one for "auto", and configure a CPU."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = best_device() if wanted == "auto" else wanted
    if device not in present:
        raise UserError(f"Unknown device '{wanted}'. Use auto, cpu, cuda or mps.")
    if not present[device]:
        raise UserError(f"This machine has no {wanted} device. Use --device auto or --device cpu.")
    if device == "cpu":
        configure_cpu()
    return device


def numbered_device(wanted: str | torch.device) -> tuple[str, int]:
    """Return kind and index of a device such as "auto", "cuda", "cuda:1" or ``torch.device("cpu")``."""
    kind, _, number = str(wanted).partition(":")
    device = pick_device(kind)
    count = torch.cuda.device_count() if device == "cuda" else 1
    if number and not (kind != "auto" and number in map(str, range(count))):
        raise UserError(f"This machine has no device '{wanted}'. It has {count} of kind '{device}', counted from 0.")
    return device, int(number or 0)


@contextmanager
def preserve_onednn() -> Iterator[None]:
    """Restore the oneDNN setting at the end."""
    before = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
