"""Images too many to keep: worker processes decode and squeeze them, the device does the rest as for cached ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from frugalvit import console
from frugalvit.data.decode import BadImage
from frugalvit.data.examples import Examples
from frugalvit.data.store import Fetched
from frugalvit.errors import UserError


class LazyStore:
    """A store that decodes when asked. Same interface as ``ImageStore``, but for ``images``.

    An unreadable image is replaced by the next readable one, label and all, and listed in ``bad``.
    """

    where = "off"

    def __init__(
        self, examples: Examples, rectangle: tuple[int, int], device: torch.device, workers: int, limit: int
    ) -> None:
        self.examples, self.rectangle, self.device = examples, rectangle, device
        self.workers, self.limit = workers, limit
        self.names = examples.names
        self.labels = None if examples.labels is None else torch.from_numpy(examples.labels)
        self.sizes = torch.empty(0, 2)  # known once an image is decoded: they come with the images
        self.kept = torch.arange(len(examples))
        self.bad: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self.examples)

    def fetcher(self, order: Callable[[int], Tensor]) -> WorkerFetcher:
        return WorkerFetcher(self, order)

    def note_bad(self, found: list[tuple[str, str]]) -> None:
        known = {name for name, _ in self.bad}
        for name, reason in found:
            if name not in known:
                console.warn(f"left out: {name}: {reason}")
                self.bad.append((name, reason))
        if len(self.bad) > self.limit:
            shown = "; ".join(f"{name}: {reason}" for name, reason in self.bad[:3])
            raise UserError(f"{len(self.bad)} images cannot be read, more than --cache.max-bad allows: {shown}.")


class WorkerFetcher:
    """Runs ahead of the steps with worker processes; a jump to another step starts them anew there."""

    def __init__(self, store: LazyStore, order: Callable[[int], Tensor]) -> None:
        self.store, self.order = store, order
        self.next_step: int | None = None
        self.batches: Iterator[Any] = iter(())

    def at(self, step: int) -> Fetched:
        if step != self.next_step:
            self.batches = self._start(step)
        try:
            images, sizes, index, bad = next(self.batches)
        except RuntimeError as error:
            if "worker" not in str(error).lower():
                raise
            raise UserError(
                "A process that decodes images was killed (out of memory?). Use fewer with --workers, or keep the "
                "images with --cache.where disk."
            ) from error
        self.next_step = step + 1
        self.store.note_bad(bad)
        if bool((index < 0).any()):
            raise UserError(f"{len(bad)} images in a row cannot be read, from {bad[0][0]} on: {bad[0][1]}.")
        return Fetched(images.to(self.store.device, non_blocking=True), sizes, index)

    def _start(self, step: int) -> Iterator[Any]:
        store = self.store
        decoder = Decoder(store.examples, store.rectangle)
        loader = DataLoader(
            decoder,
            batch_sampler=StepSampler(self.order, step),
            num_workers=store.workers,
            collate_fn=stack,
            pin_memory=store.device.type == "cuda",
            multiprocessing_context="spawn" if store.workers else None,
            prefetch_factor=2 if store.workers else None,
        )
        return iter(loader)


class StepSampler(Sampler[list[int]]):
    """The positions of step after step, from a given one on, until a step has none."""

    def __init__(self, order: Callable[[int], Tensor], start: int) -> None:
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start
        while len(positions := self.order(step)):
            yield positions.tolist()
            step += 1


class Decoder(Dataset[Any]):
    """Position -> decoded, squeezed image, its size, the position really read and the bad ones met on the way."""

    def __init__(self, examples: Examples, rectangle: tuple[int, int]) -> None:
        self.examples, self.rectangle = examples, rectangle

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, position: int) -> tuple[np.ndarray, tuple[int, int], int, list[tuple[str, str]]]:
        from frugalvit.data.cache import squeeze

        bad: list[tuple[str, str]] = []
        for attempt in range(min(len(self), 100)):
            here = (position + attempt) % len(self)
            try:
                pixels = self.examples.read(here, at_least=self.rectangle)
            except BadImage as error:
                bad.append((error.name, error.reason))
                continue
            small = np.ascontiguousarray(squeeze(pixels, self.rectangle).transpose(2, 0, 1))
            return small, (pixels.shape[0], pixels.shape[1]), here, bad
        return np.zeros((3, *self.rectangle), np.uint8), self.rectangle, -1, bad  # the main process says it


def stack(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, str]]]:
    """What the workers hand over: tensors, so that they travel through shared memory."""
    images, sizes, positions, bad = zip(*samples, strict=True)
    pixels = torch.from_numpy(np.stack(images))
    return pixels, torch.tensor(sizes), torch.tensor(positions), [entry for found in bad for entry in found]
