"""How large images are, and which input size that asks for: one rule for training and for packing ahead of it."""

from __future__ import annotations

import statistics

from frugalvit.data.decode import BadImage
from frugalvit.data.examples import Examples


def median_side(examples: Examples, sample: int = 64) -> int:
    """The median short side of up to ``sample`` images, from their headers."""
    sides = []
    for index in range(0, len(examples), max(1, len(examples) // sample)):
        try:
            header = examples.header(index)
        except BadImage:  # a bad file is named once, by whoever decodes it; here it just does not vote
            continue
        sides.append(min(header.width, header.height))
    return int(statistics.median(sides)) if sides else 224


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
