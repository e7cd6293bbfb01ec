"""When a step goes wrong: keep what is needed to look at it again, then speak."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import write_atomically

REPLAYED = ("ClassificationTask", "PretrainingTask")
"""The kinds of tasks that ``frugalvit replay`` can build again."""


def dump_failed_step(
    folder: Path, task: nn.Module, parts: Iterable[Any], process: int, facts: dict[str, Any]
) -> tuple[str, str]:
    """Save the batch, part by part, and the state of a non-finite step; what became of that, what was bad first."""
    tensors = [dict(named_tensors(part)) for part in parts]
    target = folder / "fault" / f"step_{facts['step']}_process_{process}.pt"
    classes = getattr(getattr(task, "backbone", None), "num_classes", 0)
    evidence = {**facts, "classes": classes, "process": process, "parts": tensors, "task": task.state_dict()}
    kept = f"The batch and the state are in {target}"
    if facts["kind"] in REPLAYED:
        kept += f" ('frugalvit replay {shell_quote(target)}' runs that step again and names the first bad tensor)"
    try:
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, lambda handle: torch.save(evidence, handle))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its writer
        kept = f"The batch could not be kept ({' '.join(str(error).split())[:100]})"
    inputs = [name for part in tensors for name in bad_names(part.items())]
    weights = bad_names(task.named_parameters())
    if inputs:
        return kept, f" (first bad input: {inputs[0]})"
    return kept, f" (first bad parameter: {weights[0]})" if weights else ""


def bad_names(named: Any) -> list[str]:
    """The names of those tensors that hold an infinity or an undefined number."""
    return [name for name, value in named if value.is_floating_point() and not bool(torch.isfinite(value).all())]


def named_tensors(value: Any, name: str = "batch") -> list[tuple[str, Tensor]]:
    """Every tensor inside a batch, with the path to it."""
    if isinstance(value, Tensor):
        return [(name, value.detach().cpu())]
    if isinstance(value, dict):
        return [pair for key, part in value.items() for pair in named_tensors(part, f"{name}.{key}")]
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", range(len(value)))
        return [pair for key, part in zip(fields, value, strict=True) for pair in named_tensors(part, f"{name}.{key}")]
    if hasattr(value, "__dataclass_fields__"):
        return named_tensors({key: getattr(value, key) for key in value.__dataclass_fields__}, name)
    return []


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine itself, had no room left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the CPU's two, MPS's and CUDA's, cuBLAS's and cuDNN's
    words = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def out_of_memory_message(error: BaseException, images: int, folder: Path) -> str:
    """What the device ran out of, and the setting that halves it."""
    wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    size = f" (it wanted {wanted.group(1)} more)" if wanted else ""
    half = max(1, images // 2)
    return (
        f"The device ran out of memory{size} with {images} images a step. --batch {half} halves what activations take; "
        f"--accumulate 2 keeps the batch and halves its memory; --auto-batch finds such a number by itself; "
        f"--checkpoint-activations trades time for memory, --compile true leaves CUDA graphs out. "
        f"What {folder} holds is intact."
    )
