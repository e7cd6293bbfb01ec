"""Make the batch of a step, a pure function of (seed, step), so that resume needs no loader state.

The order of an epoch comes from (seed, epoch), the augmentation from (seed, step). Both are drawn for the global batch,
and each process takes its slice. So resuming at any step is exact, and N processes share one batch.

Augmenting a batch of small images costs the GPU little, but the host must launch hundreds of small kernels. So one call
augments the images of several steps, and the loader returns them step by step.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.transforms import Augment, EvalTransform
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.errors import UserError
from frugalvit.utils import console

MAX_GROUPED_STEPS, MAX_GROUPED_PIXELS = 8, 2**25
"""Limits of one augment call on a GPU: steps, and pixels of all views (400 MB, and a few times that to compute them).
Beyond them the GPU is the bottleneck."""
SMALL_GPU = 12 * 2**30  # bytes; a GPU with less memory takes a quarter of these pixels


@dataclass(frozen=True)
class BatchShard:
    """The part of every batch that this rank takes; all ranks take equal parts."""

    seed: int = 0
    rank: int = 0
    world: int = 1


@dataclass
class Batch:
    """One step's input.

    images:  (B, C, h, w), or a list of them (multi-crop, global crops first), normalized, on the device.
    targets: (B, K) soft targets with mixing, (B,) class numbers without, None without labels.
    labels:  (B,) class numbers before mixing, (B, K) for several labels or a number, or None.
    index:   (B,) indices in the store, on the CPU; an unreadable image has the index of its substitute.
    clean:   the images before mixing, if they were mixed and the loader keeps clean images.
    number:  the number of the batch in the run; with gradient accumulation a step takes several.
    """

    images: Any
    targets: Tensor | None
    labels: Tensor | None
    index: Tensor
    clean: Tensor | None = None
    number: int = 0


class BatchSource(ABC):
    """Training batches by step, of stored images (``Batches``) or of a stream (``StreamingBatches``)."""

    batch: int  # images of a batch, over all processes
    steps_per_epoch: int
    seed: int
    rank: int
    world: int
    augment: Augment
    mixing: Mixing | None
    keep_clean: bool
    decodes_on_demand: bool = False  # True if an unreadable image is detected only when a step needs it
    unreadable: list[tuple[str, str]]  # name and reason of the images that could not be read so far
    readable: int | None = None  # the number of readable images; None if it is unknown

    def __len__(self) -> int:
        return self.steps_per_epoch

    @abstractmethod
    def batch_at(self, step: int) -> Batch:
        """Return this process's part of a step's batch."""

    @abstractmethod
    def with_batch_size(self, batch: int) -> Self:
        """Close this source and return the same images in batches of another size."""

    def peek(self, step: int) -> Batch:
        """Return a step's batch without disturbing the training."""
        return self.batch_at(step)

    def close(self) -> None:  # noqa: B027
        """Stop reader processes, if there are any. A shared store stays open."""

    def mix(self, plain: Batch) -> Batch:
        """Mix the images and labels of a batch, if mixing is on."""
        if self.mixing is None or plain.labels is None:
            return plain
        views = plain.images
        blend = self.mixing.draw((views.shape[-2], views.shape[-1]), generator_for(self.seed, "mixing", plain.number))
        mixed, targets = self.mixing.apply(views, plain.labels, blend)
        clean = views if self.keep_clean and mixed is not views else None
        return replace(plain, images=mixed, targets=targets, clean=clean)


class Batches(BatchSource):
    """Training batches of stored images.

    Args:
        batch: images per step over all processes. An epoch drops its incomplete last batch, each time other images.
        rank, world: this process and the number of processes; each takes an equal, contiguous slice.
        balance: draw every class equally often. Rare classes repeat, large ones are sampled. No image repeats before
            all images of its class were drawn.
        repeats: repeated augmentation: a batch holds batch / repeats images, each ``repeats`` times; None: as
            ``augment`` says.
        grouped_steps: steps augmented in one call; None: several if the images are on a GPU and batches are small.
        steps: the length of the run; workers decode no later step in advance.
    """

    def __init__(
        self,
        store: ImageStore,
        batch: int,
        *,
        seed: int,
        augment: Augment,
        mixing: Mixing | None = None,
        rank: int = 0,
        world: int = 1,
        balance: bool = False,
        repeats: int | None = None,
        keep_clean: bool = False,
        grouped_steps: int | None = None,
        steps: int | None = None,
    ) -> None:
        self.store, self.seed, self.augment, self.mixing = store, seed, augment, mixing
        self.rank, self.world, self.unreadable = rank, world, store.unreadable
        self.balance, self.keep_clean, self.decodes_on_demand = balance, keep_clean, store.decodes_on_demand
        self.repeats = augment.repeats if repeats is None else repeats
        if store.labels is None and (balance or mixing is not None):
            raise UserError("Mixing and class balance need labels; these images have none.")
        self._epoch_order = functools.lru_cache(maxsize=2)(self._draw_order)
        self._set_batch(batch, steps, grouped_steps)

    def _set_batch(self, batch: int, steps: int | None, grouped_steps: int | None = None) -> None:
        store, rank = self.store, self.rank
        self.batch = self._limit_batch(batch)
        share = self.batch // self.world
        self.local_slice = slice(rank * share, (rank + 1) * share)  # this process's part of every batch
        self.steps_per_epoch = len(store) // self.batch
        self.fetcher = store.fetcher(self.local_order)
        self.fetcher.end = steps
        on_gpu = store.on_device and store.device.type == "cuda"
        if grouped_steps is None and on_gpu:
            memory = torch.cuda.get_device_properties(store.device).total_memory
            grouped_steps = steps_per_augment_call(share * self.augment.pixels, memory)
        self.grouped_steps = grouped_steps or 1
        self._group: tuple[int, list[Batch]] = (-1, [])  # the number of the group, and the batches of its steps

    @property
    def readable(self) -> int:
        return self.store.readable

    def with_batch_size(self, batch: int) -> Batches:
        other, end = copy.copy(self), self.fetcher.end
        other._set_batch(batch, None if end is None else end * self.batch // batch)
        return other

    def peek(self, step: int) -> Batch:
        end, self.fetcher.end = self.fetcher.end, step + 1  # decode no other step
        try:
            return self.batch_at(step)
        finally:
            self.fetcher.end = end

    def batch_at(self, step: int) -> Batch:
        return self.mix(self._grouped_step(step) if self.grouped_steps > 1 else self._augment_steps([step])[0])

    def _grouped_step(self, step: int) -> Batch:
        """Return a step's batch before mixing. Its group of steps stays in memory until the next group."""
        group, position = divmod(step, self.grouped_steps)
        if group != self._group[0]:
            self._group = (-1, [])  # free the memory of the last group first
            first = group * self.grouped_steps
            self._group = group, self._augment_steps(range(first, first + self.grouped_steps))
        return self._group[1][position]

    def _augment_steps(self, steps: Sequence[int]) -> list[Batch]:
        """Fetch and augment the images of neighbouring steps in one call. Returns their batches before mixing."""
        fetched = [self.fetcher.at(step) for step in steps]
        images, sizes, index = fetched[0] if len(fetched) == 1 else map(torch.cat, zip(*fetched, strict=True))
        views = self.augment.apply(images, sizes, torch.cat([self.augment_draws(step) for step in steps]))
        counts = [len(part.index) for part in fetched]
        single = isinstance(views, Tensor)
        parts = views.split(counts) if single else zip(*(view.split(counts) for view in views), strict=True)
        labels: list[Tensor] | list[None] = [None] * len(counts)
        if self.store.labels is not None:
            labels = list(to_device_packed([self.store.labels[index]], images.device)[0].split(counts))
        batches = zip(parts, labels, index.split(counts), steps, strict=True)
        return [
            Batch(part if single else list(part), label, label, rows, number=step)
            for part, label, rows, step in batches
        ]

    def augment_draws(self, step: int) -> Tensor:
        """Draw the uniform numbers that augment this process's part of a step."""
        return uniform(self.batch, self.augment.columns, generator_for(self.seed, "augment", step))[self.local_slice]

    def order(self, step: int) -> Tensor:
        """Return the store indices of a step's global batch, readable or not."""
        epoch, position = divmod(step, self.steps_per_epoch)
        indices = self._epoch_order(epoch)
        if self.repeats == 1:
            return indices[position * self.batch : (position + 1) * self.batch]
        # Mixing blends neighbours, so copies must not be neighbours. Only the last image of an odd batch may be mixed
        # with its own copy: its partner is the first image.
        distinct = -(-self.batch // self.repeats)
        chosen = indices[position * distinct : (position + 1) * distinct]
        return chosen.repeat(self.repeats)[: self.batch]

    def local_order(self, step: int) -> Tensor:
        """Return the store indices of this process's part of a step's batch."""
        return self.order(step)[self.local_slice]

    def _draw_order(self, epoch: int) -> Tensor:
        generator = generator_for(self.seed, "order", epoch)
        if self.balance:
            assert self.store.labels is not None
            return balanced_order(self.store.labels, len(self.store), generator)
        return torch.randperm(len(self.store), generator=generator)

    def _limit_batch(self, batch: int) -> int:
        """Reduce a batch that is larger than the dataset, with a log line."""
        count, multiple = len(self.store), batch_multiple(self.world, self.mixing)
        if count < multiple:
            raise UserError(f"{count} images are too few for {self.world} processes: use fewer devices.")
        check_batch(batch, self.world, self.mixing)
        if batch > count:
            smaller = count // multiple * multiple
            console.info(f"batch {batch} is larger than the dataset ({count} images): each step takes {smaller}")
            return smaller
        return batch


def batch_multiple(world: int, mixing: Mixing | None) -> int:
    """Return a number that must divide the batch: equal parts for all processes, no mixed pair split."""
    return world * (2 if mixing is not None and world > 1 else 1)


def check_batch(batch: int, world: int, mixing: Mixing | None) -> None:
    """Check that ``world`` processes can share a batch."""
    if batch < 1:
        raise UserError(f"--batch {batch} is too small: use at least 1.")
    if batch % (multiple := batch_multiple(world, mixing)):
        raise UserError(f"{world} processes cannot share --batch {batch}: use a multiple of {multiple}.")


def steps_per_augment_call(pixels: int, memory: int) -> int:
    """Return how many steps of ``pixels`` each a GPU with ``memory`` bytes augments in one call: a power of two."""
    fit = (MAX_GROUPED_PIXELS if memory >= SMALL_GPU else MAX_GROUPED_PIXELS // 4) // max(1, pixels)
    return 1 << max(1, min(MAX_GROUPED_STEPS, fit)).bit_length() - 1


def balanced_order(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` indices in random order, with every class equally often (to within one)."""
    classes = labels.unique()
    share, extra = divmod(count, len(classes))
    gets_one_more = torch.randperm(len(classes), generator=generator) < extra
    parts = []
    for number, one_more in zip(classes, gets_one_more, strict=True):
        members = (labels == number).nonzero()[:, 0]
        wanted = share + int(one_more)
        rounds = -(-wanted // len(members))
        shuffled = [members[torch.randperm(len(members), generator=generator)] for _ in range(rounds)]
        parts.append(torch.cat(shuffled)[:wanted] if rounds else members[:0])
    order = torch.cat(parts)
    return order[torch.randperm(len(order), generator=generator)]


def eval_batches(
    store: ImageStore, transform: EvalTransform, batch: int, *, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Yield images and labels (or None) on the device, indices on the CPU: each readable image once.

    store:       the results of the transform's ``crop``
    rank, world: this process and the number of processes, which take the batches in turn
    """
    everything, stride = torch.arange(len(store)), world * batch
    fetcher = store.fetcher(lambda turn: everything[rank * batch + turn * stride :][:batch])
    for turn, start in enumerate(range(rank * batch, len(store), stride)):
        images, _, index = fetcher.at(turn)
        # Evaluation skips substitutes of unreadable images.
        original = index == everything[start : start + batch]
        if not original.all():
            images, index = images[original.to(images.device)], index[original]
        if len(index):
            labels = None if store.labels is None else to_device_packed([store.labels[index]], images.device)[0]
            yield transform(images), labels, index
