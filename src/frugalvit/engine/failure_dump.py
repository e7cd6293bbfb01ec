"""Dump the batch and state of a failed step; explain out-of-memory errors."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.runs import layout
from frugalvit.utils.files import write_atomically
from frugalvit.utils.text import short_message


def dump_failed_step(
    folder: Path, task: nn.Module, parts: Iterable[Any], process: int, facts: dict[str, Any]
) -> tuple[str, str]:
    """Write the micro-batches and the state of a non-finite step.

    Returns two texts: where the dump is, and the first non-finite tensor.
    """
    tensors = [dict(named_tensors(part)) for part in parts]
    target = folder / layout.FAULT / f"step_{facts['step']}_process_{process}.pt"
    evidence = {**facts, "process": process, "parts": tensors, "task": task.state_dict()}
    dumped = f"The batch and the state are in {target} (read it with torch.load)"
    try:
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, lambda handle: torch.save(evidence, handle))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        dumped = f"The batch could not be written ({short_message(error)})"
    inputs = [name for part in tensors for name in nonfinite_names(part.items())]
    weights = nonfinite_names(task.named_parameters())
    if inputs:
        return dumped, f" (first non-finite input: {inputs[0]})"
    return dumped, f" (first non-finite parameter: {weights[0]})" if weights else ""


def nonfinite_names(named: Any) -> list[str]:
    return [name for name, value in named if value.is_floating_point() and not bool(torch.isfinite(value).all())]


def named_tensors(value: Any, name: str = "batch") -> list[tuple[str, Tensor]]:
    """Return every tensor inside a batch with its path."""
    if isinstance(value, Tensor):
        return [(name, value.detach().cpu())]
    if isinstance(value, dict):
        return [pair for key, part in value.items() for pair in named_tensors(part, f"{name}.{key}")]
    if isinstance(value, list | tuple):
        return named_tensors(dict(enumerate(value)), name)
    if hasattr(value, "__dataclass_fields__"):
        return named_tensors({key: getattr(value, key) for key in value.__dataclass_fields__}, name)
    return []


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device or the machine ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # messages of the CPU allocator (two), MPS and CUDA, cuBLAS and cuDNN
    messages = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def out_of_memory_message(error: BaseException, images: int, folder: Path) -> str:
    """Explain an out-of-memory error and name the options that reduce memory."""
    needed = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    size = f" (it needed {needed.group(1)} more)" if needed else ""
    half = max(1, images // 2)
    return (
        f"The device ran out of memory{size} with {images} images per step. Use --batch {half}; or --accumulate 2, "
        "which keeps the batch and halves its memory; or --auto-batch, which chooses --accumulate; or "
        "--checkpoint-activations, which trades time for memory; or --compile true, which avoids CUDA graphs. "
        f"{folder} is intact."
    )
