"""Random numbers for the input, and their transfer to the device.

Parameters are drawn on the CPU from a generator that is a pure function of (seed, purpose, number), for the
global batch; a process takes its rows. So a resumed run sees the same crops, and N processes share one batch.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def generator_for(seed: int, purpose: str, number: int = 0) -> torch.Generator:
    """Return a CPU generator for one purpose ("order", "augment", ...) and one epoch or step."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def device_generator(seed: int, purpose: str, number: int, device: torch.device) -> torch.Generator:
    """Return the same generator on a device."""
    return torch.Generator(device).manual_seed(generator_for(seed, purpose, number).initial_seed())


def uniform(count: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw (count, columns) uniform numbers in [0, 1). In float64, areas and angles round as in Python."""
    return torch.rand((count, columns), generator=generator, dtype=torch.float64)


def to_device_packed(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy small CPU tensors to the device in one pinned, asynchronous transfer.

    Augmenting a batch needs dozens of index and parameter tensors. A copy of each would cost more than the work.
    With one packed copy the host never waits for the device.
    """
    if device.type == "cpu":
        return list(tensors)
    if device.type == "mps":  # MPS has no doubles
        tensors = [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in tensors]
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    sources = [tensor.contiguous() for tensor in tensors]
    lengths = [source.numel() * source.element_size() for source in sources]
    *offsets, end = accumulate(((length + 15) // 16 * 16 for length in lengths), initial=0)
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for source, offset, length in zip(sources, offsets, lengths, strict=True):
        packed[offset : offset + length] = source.view(-1).view(torch.uint8)
    arrived = packed.to(device, non_blocking=True)
    return [
        arrived[offset : offset + length].view(source.dtype).view(source.shape)
        for source, offset, length in zip(sources, offsets, lengths, strict=True)
    ]
