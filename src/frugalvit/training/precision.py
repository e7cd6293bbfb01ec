"""In which precision a run computes: autocast around the network, nothing else rounded."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins import MixedPrecision, Precision


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
