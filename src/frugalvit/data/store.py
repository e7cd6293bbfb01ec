"""Decoded images, ready to be fetched in batches: kept on the device, in RAM or mapped from a file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.randomness import ship


class Fetched(NamedTuple):
    """Raw images of a batch: uint8 (B, 3, S, S') on the device, original sizes (B, 2) and positions (B,) on the CPU."""

    images: Tensor
    sizes: Tensor
    index: Tensor


class Fetcher:
    """Images of step after step. ``order(step)`` names the positions a step needs."""

    def __init__(self, store: ImageStore, order: Callable[[int], Tensor]) -> None:
        self.store, self.order = store, order

    def at(self, step: int) -> Fetched:
        index = self.order(step)
        return Fetched(self.store.fetch(index), self.store.sizes[index], index)


class AheadFetcher(Fetcher):
    """Gathers the next step's images from RAM or disk in a thread while the device works on this one."""

    def __init__(self, store: ImageStore, order: Callable[[int], Tensor]) -> None:
        super().__init__(store, order)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self.waiting: dict[int, Future[Tensor]] = {}

    def at(self, step: int) -> Fetched:
        index = self.order(step)
        ahead = self.waiting.pop(step, None)
        host = ahead.result() if ahead is not None else self.store.gather(index)
        self.waiting = {step + 1: self.pool.submit(self._gather_step, step + 1)}
        return Fetched(host.to(self.store.device, non_blocking=True), self.store.sizes[index], index)

    def _gather_step(self, step: int) -> Tensor:
        return self.store.gather(self.order(step))


@dataclass
class ImageStore:
    """All images of a split as one uint8 tensor (N, 3, S, S').

    Every image is squeezed to the same rectangle; ``sizes`` (N, 2) remembers the height and width it was decoded at,
    in which crops are drawn. ``kept`` are the positions in the examples the store was made from; unreadable images
    are left out and listed in ``bad``.
    """

    images: Tensor
    sizes: Tensor
    labels: Tensor | None
    names: list[str]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    where: str = "ram"
    bad: list[tuple[str, str]] = field(default_factory=list)
    kept: Tensor | None = None

    @classmethod
    def from_arrays(
        cls, images: np.ndarray | Tensor, labels: np.ndarray | Tensor | None = None, device: torch.device | str = "cpu"
    ) -> ImageStore:
        """Images of one size that are already decoded: uint8 (N, 3, H, W), or (N, H, W, 3)."""
        tensor = torch.as_tensor(images)
        if tensor.shape[1] != 3 and tensor.shape[-1] == 3:
            tensor = tensor.permute(0, 3, 1, 2).contiguous()
        sizes = torch.tensor([tensor.shape[-2:]]).expand(len(tensor), 2).contiguous()
        names = [str(i) for i in range(len(tensor))]
        numbers = None if labels is None else torch.as_tensor(labels).long()
        device = torch.device(device)
        return cls(tensor.to(device), sizes, numbers, names, device, kept=torch.arange(len(tensor)))

    def __len__(self) -> int:
        return len(self.names)

    def fetch(self, index: Tensor) -> Tensor:
        """The images at these positions (B,), on the device."""
        if self.images.device.type == self.device.type:
            return self.images.index_select(0, ship([index], self.images.device)[0])
        return self.gather(index).to(self.device, non_blocking=True)

    def gather(self, index: Tensor) -> Tensor:
        """The images at these positions in (pinned) host memory."""
        pinned = self.device.type == "cuda"
        batch = torch.empty((len(index), *self.images.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        return torch.index_select(self.images, 0, index, out=batch)

    def fetcher(self, order: Callable[[int], Tensor]) -> Fetcher:
        """Whatever brings batches to the device without making it wait."""
        away = self.images.device.type == "cpu" and self.device.type == "cuda"
        return AheadFetcher(self, order) if away else Fetcher(self, order)

    def close(self) -> None:
        """Let the images go, whoever still holds the store: a task and its network are not collected at once."""
        on_gpu = self.images.is_cuda
        self.images = self.images.new_empty(0)
        if on_gpu:
            torch.cuda.empty_cache()  # what PyTorch keeps to itself would not count as free for the next run
