"""A segmenter in the one loop: crops of a step, its losses, and its IoU on whole images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.config.dense import TestConfig
from frugalvit.data.augment import color
from frugalvit.tasks.dense.loader import ImageReader, StepLoader, share, to_device_flat
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.tasks.detection.metrics import IGNORED, Confusion
from frugalvit.tasks.segmentation.dataset import Scene, SceneData, read_labels
from frugalvit.tasks.segmentation.model import Segmenter, most_probable, probabilities
from frugalvit.utils import console

_TRIES = 10
"""Places tried for a crop that is not filled by one class."""
_LONGEST = 4
"""A picture's long side at test, relative to the wanted short side: strips would take all the memory there is."""
_COLOUR_COLUMNS = 8
COLUMNS = 2 + 2 * _TRIES + _COLOUR_COLUMNS
"""Uniform numbers an item needs: scale, mirror, places, colours."""


@dataclass
class SegmentBatch:
    """images (B, 3, S, S), labels (B, S, S)."""

    images: Tensor
    labels: Tensor


class LabelledPictures:
    """Pictures with their classes per pixel, uint8 on the CPU."""

    def __init__(self, scenes: list[Scene], data: SceneData, pictures: ImageReader) -> None:
        self.scenes, self.data, self.pictures = scenes, data, pictures
        self._keeps = pictures.keeps and sum(scene.height * scene.width for scene in scenes) <= pictures.room
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.scenes)

    def load(self, index: int) -> tuple[Tensor, Tensor]:
        """To learn from: the next one where this picture cannot be read."""
        index, pixels = self.pictures.to_learn(index)
        return pixels, self.labels(index)

    def labels(self, index: int) -> Tensor:
        kept = self._kept.get(index)
        if kept is None:
            kept = torch.from_numpy(self.data.table[read_labels(self.scenes[index].mask)])
            if self._keeps:
                self._kept[index] = kept
        return kept


@dataclass(frozen=True)
class Crop:
    """A rectangle of the picture as it is, and the size it is brought to."""

    top: int
    left: int
    height: int
    width: int
    out: tuple[int, int]


def choose_crop(
    labels: Tensor, side: int, scales: tuple[float, float], largest_share: float, numbers: list[float]
) -> Crop:
    """A random crop: the picture's short side becomes side · scale, of which a square of ``side`` is taken.

    The first of ten places at which no class fills more than ``largest_share`` of the counted pixels; else the last.
    With a share of 1 any place will do.
    """
    height, width = labels.shape
    factor = side / min(height, width) * (scales[0] + (scales[1] - scales[0]) * numbers[0])
    tall, wide = min(height, max(1, round(side / factor))), min(width, max(1, round(side / factor)))
    out = (min(side, max(1, round(tall * factor))), min(side, max(1, round(wide * factor))))
    top = left = 0
    for attempt in range(_TRIES):
        top = int(numbers[2 + 2 * attempt] * (height - tall + 1))
        left = int(numbers[3 + 2 * attempt] * (width - wide + 1))
        if largest_share >= 1:
            break
        counts = np.bincount(labels[top : top + tall, left : left + wide].reshape(-1).numpy(), minlength=256)[:IGNORED]
        if (counts > 0).sum() > 1 and counts.max() < largest_share * counts.sum():
            break
    return Crop(top, left, tall, wide, out)


def distort(images: Tensor, numbers: Tensor, inside: Tensor) -> Tensor:
    """Brightness ± 1/8, contrast and saturation × 0.5 to 1.5, hue ± 1/10 of a turn, each for half of the images.

    inside: (B, 1, H, W), 1 where there is picture and 0 beyond, which must not count in the mean contrast is about
    """
    apply, amount = numbers[:, 0::2].float() < 0.5, (numbers[:, 1::2] * 2 - 1).float()
    strength = torch.where(apply, amount, torch.zeros_like(amount)).to(images.device)
    images = (images + strength[:, 0].view(-1, 1, 1, 1) / 8).clamp(0, 1)
    mean = (color.luma(images) * inside).sum((1, 2, 3), keepdim=True) / inside.sum((1, 2, 3), keepdim=True)
    images = color.blend(images, mean, 1 + strength[:, 1] / 2)
    images = color.saturation(images, 1 + strength[:, 2] / 2)
    return color.hue(images, strength[:, 3] / 10)


class SegmentationTask(DenseTask):
    """A segmenter and its losses.

    side: that of the training crops, and of images' short side at test
    test: how images are looked at for the scores at the end; while training every image is looked at once
    """

    best_metric = "miou"
    feeding: StepLoader[tuple[Tensor, Tensor]] | None
    evaluated: LabelledPictures | None

    def __init__(
        self,
        net: Segmenter,
        side: int,
        *,
        scales: tuple[float, float] = (0.5, 2.0),
        photometric: bool = True,
        largest_share: float = 0.75,
        test: TestConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(net.pyramid.backbone, **settings)
        self.net, self.side = net, side
        self.scales, self.photometric, self.largest_share = scales, photometric, largest_share
        self.test = test or TestConfig()

    @property
    def pyramid(self) -> Pyramid:
        return self.net.pyramid

    # -- a step

    def batch_at(self, step: int) -> SegmentBatch:
        assert self.feeding is not None
        self.seen = None
        items, numbers = self.feeding.at(step)
        side, rows = self.side, numbers.tolist()
        crops = [
            choose_crop(item[1], side, self.scales, self.largest_share, row)
            for item, row in zip(items, rows, strict=True)
        ]
        cut = [
            [part[..., c.top : c.top + c.height, c.left : c.left + c.width] for part in item]
            for item, c in zip(items, crops, strict=True)
        ]
        pixels = to_device_flat([picture for picture, _ in cut], self.device).float() / 255
        classes = to_device_flat([label for _, label in cut], self.device).float()
        areas = [crop.height * crop.width for crop in crops]
        parts = zip(pixels.split([3 * area for area in areas]), classes.split(areas), crops, rows, strict=True)
        images = torch.zeros(len(items), 3, side, side, device=self.device)
        inside = torch.zeros(len(items), 1, side, side, device=self.device)
        labels = torch.full((len(items), side, side), IGNORED, dtype=torch.int64, device=self.device)
        for place, (picture, label, crop, row) in enumerate(parts):
            image = picture.view(1, 3, crop.height, crop.width)
            image = _seen_at(image, crop.out)[0]
            known = F.interpolate(label.view(1, 1, crop.height, crop.width), size=crop.out, mode="nearest-exact")[0, 0]
            mirrored = row[1] < 0.5
            images[place, :, : crop.out[0], : crop.out[1]] = image.flip(2) if mirrored else image
            inside[place, :, : crop.out[0], : crop.out[1]] = 1
            labels[place, : crop.out[0], : crop.out[1]] = known.flip(1) if mirrored else known
        if self.photometric:
            images = distort(images, numbers[:, -_COLOUR_COLUMNS:], inside)
        images = self.normalize(images) * inside  # beyond the picture there is the mean, not a distorted black
        return SegmentBatch(images, labels)

    def losses(self, batch: SegmentBatch) -> dict[str, Tensor]:
        return self.net.losses(batch.images, batch.labels)

    # -- scores

    def evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluated is not None
        self.seen = (self.evaluated, self.scores(self.evaluated, TestConfig()))
        return self.seen[1][0].summary()

    def scored(self, dataset: LabelledPictures, test: TestConfig) -> tuple[Confusion, list[tuple[int, float]]]:
        """As ``scores``, which are not made twice of the same weights."""
        plain = test.model_dump() == TestConfig().model_dump()
        known = self.seen is not None and self.seen[0] is dataset and plain
        return self.seen[1] if known and self.seen is not None else self.scores(dataset, test)

    def scores(self, dataset: LabelledPictures, test: TestConfig) -> tuple[Confusion, list[tuple[int, float]]]:
        """Pixels by true and predicted class over all images, and (place, share of pixels that are right) of each.

        An image of which no pixel counts has no such share.
        """
        assert self.fabric is not None
        confusion = Confusion(self.net.spec.classes, self.device)
        shares: list[tuple[int, float]] = []
        was_training, self.nonfinite_outputs = self.training, False
        self.eval()
        for places in console.progress(list(self._groups(dataset)), label="evaluating"):
            predicted = self.predict([dataset.pictures.read(place) for place in places], test)
            truth = torch.stack([dataset.labels(place) for place in places]).to(self.device)
            confusion.add(predicted, truth)
            counted = truth != IGNORED
            right = ((predicted == truth) & counted).sum((1, 2)) / counted.sum((1, 2))
            shares += [(place, one) for place, one in zip(places, right.tolist(), strict=True) if not math.isnan(one)]
        self.train(was_training)
        self.agree_on_broken()
        return confusion.reduced(self.fabric), sorted(self.gather(shares))

    def predict(self, pictures: list[Tensor], test: TestConfig) -> Tensor:
        """The most probable class of every pixel, (B, H, W), of pictures (3, H, W) of one size."""
        size = (pictures[0].shape[1], pictures[0].shape[2])
        images = [pixels.to(self.device) for pixels in pictures]
        window = (self.side if test.multi_scale else 0) if test.window == "auto" else test.window
        scales = test.scales if test.multi_scale else [1.0]
        flip = test.multi_scale and test.flip
        views: list[Tensor] = []
        with torch.inference_mode(), self.autocast():
            for scale in scales:
                wanted = size_at_test(size, self.side * scale)
                look = torch.cat([_seen_at(pixels[None].float() / 255, wanted) for pixels in images])
                kept = min(wanted, size, key=math.prod)  # classes of a large picture stay as small as they were seen
                views.append(probabilities(self.net, self.normalize(look), kept, window=int(window), flip=flip))
                self.check_finite(views[-1].sum())
            return torch.stack([most_probable([view[place] for view in views], size) for place in range(len(images))])

    def _groups(self, dataset: LabelledPictures) -> Iterator[list[int]]:
        """Neighbouring pictures of one size, as many as fit a batch."""
        assert self.fabric is not None
        places = share(len(dataset), self.fabric)
        for _, same in itertools.groupby(places, key=lambda place: dataset.pictures.sizes[place]):
            members = list(same)
            for start in range(0, len(members), self.eval_batch):
                yield members[start : start + self.eval_batch]


def size_at_test(size: tuple[int, int], short: float) -> tuple[int, int]:
    """The (height, width) a picture is looked at in: with this short side, or a long one of four times that."""
    factor = min(short / min(size), _LONGEST * short / max(size))
    return max(32, round(size[0] * factor)), max(32, round(size[1] * factor))


def _seen_at(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures in another size, smoothed where that is smaller; classes are not smoothed."""
    return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
