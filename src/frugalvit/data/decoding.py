"""All images of a split decoded, in threads, and how many threads that is worth."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from frugalvit import console
from frugalvit.data.decode import BadImage
from frugalvit.data.examples import ArrayExamples, Examples
from frugalvit.data.lazy import squeeze
from frugalvit.errors import UserError

QUICK = 0.001
"""Seconds of an image below which most of its decoding is Python, which runs one thread at a time."""


def threads_for(seconds: float, threads: int) -> tuple[int, float]:
    """Threads to decode images of so many seconds with, and how many of them get on at a time.

    Of small images (CIFAR's take 0.2 ms) two cores decoded 3,500 a second in one thread, 5,300 in four, 4,300 in
    sixteen; sixteen cores with as many threads no more than 2,000 and with four 2,400: threads that wait for each
    other get on like half of one.
    """
    return (min(4, threads), 0.5) if seconds < QUICK else (threads, threads)


def decode_all(
    examples: Examples, rectangle: tuple[int, int], images: Tensor, threads: int, limit: int
) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """Decode into ``images`` (N, 3, S, S'), good ones moved to the front; (sizes, kept positions, bad ones)."""
    if isinstance(examples, ArrayExamples) and examples.images.shape[1:3] == rectangle:
        pixels = torch.from_numpy(np.ascontiguousarray(examples.images))
        images.copy_(pixels.view(len(examples), *rectangle, -1).permute(0, 3, 1, 2))  # grey spreads over three channels
        return torch.tensor([rectangle]).repeat(len(examples), 1), torch.arange(len(examples)), []

    def one(i: int) -> tuple[int, int] | BadImage:
        try:
            pixels = examples.read(i, at_least=rectangle)
        except BadImage as error:
            return error
        images[i] = torch.from_numpy(squeeze(pixels, rectangle)).permute(2, 0, 1)
        return pixels.shape[0], pixels.shape[1]

    sizes, kept, bad = [], [], []
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        results = (result for block in _blocks(len(examples)) for result in pool.map(one, block))
        for i, result in enumerate(console.progress(results, total=len(examples), label="decoding")):
            if isinstance(result, BadImage):
                bad.append((result.name, result.reason))
                check_bad(bad, limit, len(examples))
                continue
            if len(kept) != i:
                images[len(kept)] = images[i]
            kept.append(i)
            sizes.append(result)
    if not kept:
        raise UserError(f"None of the {len(examples)} images can be read; the first: {bad[0][0]}: {bad[0][1]}.")
    return torch.tensor(sizes), torch.tensor(kept), bad


def _blocks(count: int, length: int = 1024) -> list[range]:
    return [range(start, min(start + length, count)) for start in range(0, count, length)]


def check_bad(bad: list[tuple[str, str]], limit: int, count: int) -> None:
    if len(bad) > limit:
        shown = "; ".join(f"{name}: {reason}" for name, reason in bad[:3])
        raise UserError(
            f"{len(bad)} of {count} images cannot be read, more than --cache.max-bad allows: {shown}. "
            "Mend or remove them ('frugalvit data' lists them all)."
        )
