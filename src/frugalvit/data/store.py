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
from frugalvit.data.standins import rows_for


class Fetched(NamedTuple):
    """Raw images of a batch: uint8 (B, 3, S, S') on the device, original sizes (B, 2) and positions (B,) on the CPU.

    The positions are those of the images that came, which for an unreadable one is that of its stand-in.
    """

    images: Tensor
    sizes: Tensor
    index: Tensor


class Fetcher:
    """Images of step after step. ``order(step)`` names the positions a step needs."""

    def __init__(self, store: ImageStore, order: Callable[[int], Tensor]) -> None:
        self.store, self.order = store, order

    def at(self, step: int) -> Fetched:
        rows = self.store.rows[self.order(step)]
        return Fetched(self.store.fetch(rows), self.store.sizes[rows], self.store.kept[rows])


class AheadFetcher(Fetcher):
    """Gathers the next step's images from RAM or disk in a thread while the device works on this one."""

    def __init__(self, store: ImageStore, order: Callable[[int], Tensor]) -> None:
        super().__init__(store, order)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self.waiting: dict[int, Future[Tensor]] = {}

    def at(self, step: int) -> Fetched:
        rows = self.store.rows[self.order(step)]
        ahead = self.waiting.pop(step, None)
        host = ahead.result() if ahead is not None else self.store.gather(rows)
        self.waiting = {step + 1: self.pool.submit(self._gather_step, step + 1)}
        images = host.to(self.store.device, non_blocking=True)
        return Fetched(images, self.store.sizes[rows], self.store.kept[rows])

    def _gather_step(self, step: int) -> Tensor:
        return self.store.gather(self.store.rows[self.order(step)])


@dataclass
class ImageStore:
    """All images of a split that can be read, as one uint8 tensor (M, 3, S, S').

    Every image is squeezed to the same rectangle; ``sizes`` (M, 2) remembers the height and width it was decoded at,
    in which crops are drawn. ``labels`` and ``names`` are those of all N images of the split, in whose positions a
    fetcher is asked; ``kept`` (M,) are the positions of the images, ``rows`` (N,) says which of them each position
    gets. Unreadable images are listed in ``bad``, and others stand in for them (``standins.py``).
    """

    images: Tensor
    sizes: Tensor
    labels: Tensor | None
    names: list[str]
    kept: Tensor
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    where: str = "ram"
    bad: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        labels = None if self.labels is None else self.labels.numpy(force=True)
        self.rows = torch.from_numpy(rows_for(self.kept.numpy(), len(self.names), labels))

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
        return cls(tensor.to(device), sizes, numbers, names, torch.arange(len(tensor)), device)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def readable(self) -> int:
        return len(self.kept)

    def fetch(self, rows: Tensor) -> Tensor:
        """These of the images (B,), on the device."""
        if self.images.device.type == self.device.type:
            return self.images.index_select(0, ship([rows], self.images.device)[0])
        return self.gather(rows).to(self.device, non_blocking=True)

    def gather(self, rows: Tensor) -> Tensor:
        """These of the images in (pinned) host memory."""
        pinned = self.device.type == "cuda"
        batch = torch.empty((len(rows), *self.images.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        return torch.index_select(self.images, 0, rows, out=batch)

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
