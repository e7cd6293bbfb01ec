"""Step -> batch on the device. A batch is a pure function of (seed, step): no state to save, nothing to replay.

The order of an epoch comes from (seed, epoch), augmentation from (seed, step), both drawn for the global batch, of
which a process takes its slice. So resuming at any step is exact, and N processes share one batch.

Varying a batch of small images costs a GPU little and the host much: hundreds of small kernels to queue, as many as
for a large one. So the images of several steps are varied in one go, and then handed out step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.augment.transforms import Augment, EvalTransform
from frugalvit.data.cache.store import ImageStore, Store
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.errors import UserError
from frugalvit.utils import console

MOST_TOGETHER, PIXELS_TOGETHER = 8, 2**23
"""Steps, and pixels of views, that are varied in one go on a GPU; with more pixels the device is the limit anyway."""


@dataclass
class Batch:
    """One step's input.

    images:  (B, C, h, w), or a list of them (multi-crop, global crops first), normalised, on the device.
    targets: (B, K) soft targets with mixing, (B,) class numbers without, None without labels.
    labels:  (B,) class numbers before mixing, or None.
    index:   (B,) positions in the store, on the CPU; those of stand-ins for unreadable images.
    clean:   the images before mixing, where they were mixed and the loader was asked to keep them.
    number:  which of the run's batches it is; a step takes several where gradients are accumulated.
    """

    images: Any
    targets: Tensor | None
    labels: Tensor | None
    index: Tensor
    clean: Tensor | None = None
    number: int = 0


class Batches:
    """Training batches by step.

    Args:
        store: the decoded images, with their labels where there are any.
        batch: images a step over all processes. With fewer images than that, all of them are one batch (said). An
            epoch's incomplete last batch is left out (other images every epoch).
        seed: order, augmentation and mixing follow from it and the step.
        augment: how the images of a step are varied.
        mixing: mixup and cutmix, which need labels; None: images stay as they are.
        rank, world: this process and how many there are; each takes an equal, contiguous slice.
        balance: draw every class equally often: rare classes repeat, large ones are sampled, without replacement
            until a class is used up.
        repeats: repeated augmentation: a batch holds batch / repeats images, each ``repeats`` times; None takes the
            augmentation's own setting.
        keep_clean: keep the images before mixing in ``Batch.clean``.
        together: steps whose images are varied in one go; None: several where the device is a GPU and batches small.
    """

    def __init__(
        self,
        store: Store,
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
        together: int | None = None,
    ) -> None:
        self.store, self.seed, self.augment, self.mixing = store, seed, augment, mixing
        self.rank, self.world = rank, world
        self.balance, self.keep_clean = balance, keep_clean
        self.repeats = augment.repeats if repeats is None else repeats
        if store.labels is None and (balance or mixing is not None):
            raise UserError("Mixing and class balance need labels; these images have none.")
        self.batch = self._possible_batch(batch)
        share = self.batch // world
        self.mine = slice(rank * share, (rank + 1) * share)  # this process's part of every batch
        self.steps_per_epoch = len(store) // self.batch
        self.fetcher = store.fetcher(self.local_order)
        self._epoch_order = functools.lru_cache(maxsize=2)(self._draw_order)
        at_hand = isinstance(store, ImageStore) and store.images.device.type == "cuda"
        usual = steps_per_augment_call(share * augment.pixels) if at_hand else 1
        self.together = usual if together is None else together
        self._group: tuple[int, list[Batch]] = (-1, [])  # its number, and the steps it holds

    def __len__(self) -> int:
        return self.steps_per_epoch

    def batch_at(self, step: int) -> Batch:
        """This process's part of a step's batch."""
        plain = self._grouped_step(step) if self.together > 1 else self._augment_steps(range(step, step + 1))[0]
        if self.mixing is None or plain.labels is None:
            return plain
        views = plain.images
        blend = self.mixing.draw((views.shape[-2], views.shape[-1]), generator_for(self.seed, "mixing", step))
        mixed, targets = self.mixing.apply(views, plain.labels, blend)
        clean = views if self.keep_clean and mixed is not views else None
        return replace(plain, images=mixed, targets=targets, clean=clean)

    def _grouped_step(self, step: int) -> Batch:
        """A step's batch before mixing, out of a group that is kept until another one is wanted."""
        group, place = divmod(step, self.together)
        if group != self._group[0]:
            self._group = (-1, [])  # the last ones' memory is free for the next
            self._group = group, self._augment_steps(range(group * self.together, (group + 1) * self.together))
        return self._group[1][place]

    def _augment_steps(self, steps: range) -> list[Batch]:
        """The batches of neighbouring steps before mixing, their images fetched and augmented all as one."""
        fetched = [self.fetcher.at(step) for step in steps]
        images, sizes, index = fetched[0] if len(fetched) == 1 else map(torch.cat, zip(*fetched, strict=True))
        views = self.augment.apply(images, sizes, torch.cat([self._numbers(step) for step in steps]))
        counts = [len(one.index) for one in fetched]
        parts = views.split(counts) if isinstance(views, Tensor) else _step_by_step(views, counts)
        labels: list[Tensor] | list[None] = [None] * len(counts)
        if self.store.labels is not None:
            labels = list(to_device_packed([self.store.labels[index]], images.device)[0].split(counts))
        found = zip(parts, labels, index.split(counts), steps, strict=True)
        return [Batch(images, label, label, place, number=step) for images, label, place, step in found]

    def _numbers(self, step: int) -> Tensor:
        """The uniform numbers that say how the images of this process' part of a step are varied."""
        return uniform(self.batch, self.augment.columns, generator_for(self.seed, "augment", step))[self.mine]

    def order(self, step: int) -> Tensor:
        """The store positions of a step's global batch, readable or not."""
        epoch, place = divmod(step, self.steps_per_epoch)
        indices = self._epoch_order(epoch)
        if self.repeats == 1:
            return indices[place * self.batch : (place + 1) * self.batch]
        # Copies lie a share of the batch apart, not next to each other: mixing blends neighbours. Only the last image
        # of an odd batch may meet its own copy, as its partner is the first.
        distinct = -(-self.batch // self.repeats)
        chosen = indices[place * distinct : (place + 1) * distinct]
        return chosen.repeat(self.repeats)[: self.batch]

    def local_order(self, step: int) -> Tensor:
        """The store positions of this process's part of a step's batch."""
        return self.order(step)[self.mine]

    def _draw_order(self, epoch: int) -> Tensor:
        generator = generator_for(self.seed, "order", epoch)
        if self.balance:
            assert self.store.labels is not None
            return balanced_order(self.store.labels, len(self.store), generator)
        return torch.randperm(len(self.store), generator=generator)

    def _possible_batch(self, batch: int) -> int:
        # A mixing pair stays in one process.
        count, part = len(self.store), self.world * (2 if self.mixing is not None and self.world > 1 else 1)
        if batch < 1:
            raise UserError(f"A batch of {batch} images is not possible; give at least 1.")
        if count < part:
            raise UserError(f"{count} images cannot be shared by {self.world} processes; use fewer devices.")
        if batch % part:
            raise UserError(
                f"A batch of {batch} cannot be shared by {self.world} processes; give a multiple of {part}."
            )
        if batch > count:
            smaller = count // part * part
            console.info(f"batch {batch} is more than the {count} images there are: each step takes {smaller}")
            return smaller
        return batch


def steps_per_augment_call(pixels: int) -> int:
    """How many steps' batches of so many pixels a GPU varies in one go: a power of two."""
    fit = PIXELS_TOGETHER // max(1, pixels)
    return 1 << max(1, min(MOST_TOGETHER, fit)).bit_length() - 1


def _step_by_step(views: list[Tensor], counts: list[int]) -> list[list[Tensor]]:
    """Every step's part of each view."""
    return [list(step) for step in zip(*(view.split(counts) for view in views), strict=True)]


def balanced_order(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` positions in which every class occurs equally often (to within one), in random order."""
    classes = labels.unique()
    share, extra = divmod(count, len(classes))
    lucky = torch.randperm(len(classes), generator=generator) < extra
    parts = []
    for number, one_more in zip(classes, lucky, strict=True):
        members = (labels == number).nonzero()[:, 0]
        wanted = share + int(one_more)
        rounds = -(-wanted // len(members))
        shuffled = [members[torch.randperm(len(members), generator=generator)] for _ in range(rounds)]
        parts.append(torch.cat(shuffled)[:wanted] if rounds else members[:0])
    order = torch.cat(parts)
    return order[torch.randperm(len(order), generator=generator)]


def eval_batches(
    store: Store, transform: EvalTransform, batch: int, *, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Each image once, in order: (images on the device, labels on the device or None, positions on the CPU).

    rank, world: this process and how many there are; they take turns at the batches, and prepare no others
    """
    everything, apart = torch.arange(len(store)), world * batch
    fetcher = store.fetcher(lambda turn: everything[rank * batch + turn * apart :][:batch])
    for turn, start in enumerate(range(rank * batch, len(store), apart)):
        images, sizes, index = fetcher.at(turn)
        # One that is unreadable has been replaced by another, which is not to be scored in its place.
        itself = index == everything[start : start + batch]
        if not itself.all():
            images, sizes, index = images[itself.to(images.device)], sizes[itself], index[itself]
        if len(index):
            labels = None if store.labels is None else to_device_packed([store.labels[index]], images.device)[0]
            yield transform(images, sizes), labels, index
