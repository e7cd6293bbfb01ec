"""How large images are, and which input size that asks for: one rule for training and for packing ahead of it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence

from frugalvit.data.decode import BadImage
from frugalvit.data.examples import Examples
from frugalvit.errors import UserError

_MANY = 1000


def median_side(examples: Examples, sample: int = 64) -> int:
    """The median short side of up to ``sample`` images, from their headers; of more where all of these are bad."""
    sides: list[int] = []
    looked: list[int] = []
    for most in (sample, _MANY):
        looked = list(range(0, len(examples), max(1, len(examples) // most)))
        for index in looked:
            # A bad file is named once, by whoever decodes it; here it just does not vote.
            with contextlib.suppress(BadImage):
                header = examples.header(index)
                sides.append(min(header.width, header.height))
        if sides:
            return int(statistics.median(sides))
    raise none_readable(examples, looked)


def none_readable(examples: Examples, looked: Sequence[int]) -> UserError:
    """The error for images none of which could be read; the first is named with its reason."""
    reason = examples.names[looked[0]]
    try:
        examples.read(looked[0])
    except BadImage as fault:
        reason = str(fault)
    return UserError(
        f"None of the {len(looked):,} images looked at can be read; the first: {reason}. Mend or replace them "
        "('frugalvit data' lists them all)."
    )


def largest_input(device: str) -> int:
    """The largest input that "auto" takes: the papers' on a GPU, one that a few cores can train on a CPU."""
    return 64 if device == "cpu" else 224


def input_size(side: int, device: str) -> int:
    """Small images as they are, others at the multiple of 32 below their short side, up to ``largest_input``."""
    size = side if side <= 64 else max(32, side // 32 * 32)
    return min(size, largest_input(device))


def best_device() -> str:
    """The device that "auto" takes: CUDA, else Apple's MPS, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
