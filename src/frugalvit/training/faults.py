"""When a step goes wrong: keep what is needed to look at it again, then speak."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.files import write_atomically


def keep_evidence(folder: Path, task: nn.Module, batch: Any, step: int) -> tuple[Path, str]:
    """Save the batch and the state of a non-finite step; where they lie, and which parameter was bad first."""
    target = folder / "fault"
    target.mkdir(exist_ok=True)
    write_atomically(target / f"state_{step}.pt", lambda handle: torch.save(task.state_dict(), handle))
    tensors = dict(_named_tensors(batch))
    write_atomically(target / f"batch_{step}.pt", lambda handle: torch.save(tensors, handle))
    bad = [name for name, value in task.named_parameters() if not torch.isfinite(value).all()]
    inputs = [name for name, value in tensors.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    culprit = f" (first bad input: {inputs[0]})" if inputs else f" (first bad parameter: {bad[0]})" if bad else ""
    return target, culprit


def _named_tensors(value: Any, name: str = "batch") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value.detach().cpu())]
    if isinstance(value, dict):
        return [pair for key, part in value.items() for pair in _named_tensors(part, f"{name}.{key}")]
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", range(len(value)))
        return [pair for key, part in zip(fields, value, strict=True) for pair in _named_tensors(part, f"{name}.{key}")]
    if hasattr(value, "__dataclass_fields__"):
        return _named_tensors({key: getattr(value, key) for key in value.__dataclass_fields__}, name)
    return []


def explain_out_of_memory(error: BaseException, images: int, folder: Path) -> str:
    """What the device ran out of, and the setting that halves it."""
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    size = f" (it wanted {wanted.group(1)} more)" if wanted else ""
    half = max(1, images // 2)
    return (
        f"The device ran out of memory{size} with {images} images a step. --batch {half} halves what activations take; "
        f"--accumulate 2 keeps the batch and halves its memory; --checkpoint-activations trades time for memory. "
        f"What {folder} holds is intact."
    )
