"""Which device computes: as asked for, or the best there is."""

from __future__ import annotations

import torch

from frugalvit.data.sizes import best_device
from frugalvit.errors import UserError
from frugalvit.training.processors import tune_for_cpu


def pick_device(wanted: str) -> str:
    """The device asked for, or the best there is; a CPU is made ready for our products."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = best_device() if wanted == "auto" else wanted
    if device not in present:
        raise UserError(f"There is no kind of device '{wanted}': auto, cpu, cuda or mps.")
    if not present[device]:
        raise UserError(f"There is no {wanted} device here. Use --device auto or --device cpu.")
    if device == "cpu":
        tune_for_cpu()
    return device


def numbered_device(wanted: str | torch.device) -> tuple[str, int]:
    """The kind of device and its number: of "auto", "cuda", "cuda:1", ``torch.device("cpu")``."""
    kind, _, number = str(wanted).partition(":")
    device = pick_device(kind)
    count = torch.cuda.device_count() if device == "cuda" else 1
    if number and not (kind != "auto" and number.isdigit() and int(number) < count):
        raise UserError(f"There is no device '{wanted}': {count} of kind '{device}' here, counted from 0.")
    return device, int(number or 0)
