"""SegmentationTask: training crops, losses and IoU of a segmenter."""

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
from frugalvit.data.augmentation import operations
from frugalvit.tasks.dense.loader import ImageReader, StepLoader, share, to_device_flat
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.tasks.segmentation.dataset import Scene, SceneData, SegmentationDataset
from frugalvit.tasks.segmentation.metrics import IGNORED, Confusion
from frugalvit.tasks.segmentation.upernet import Segmenter, most_probable, probabilities
from frugalvit.utils import console

_TRIES = 10  # positions tried to find a crop that one class does not fill
_MAX_ASPECT = 4  # limit of an image's long side at test, relative to the short side: strips would take too much memory
_COLOUR_COLUMNS = 8
COLUMNS = 2 + 2 * _TRIES + _COLOUR_COLUMNS  # uniform numbers per item: scale, flip, positions, colours


@dataclass
class SegmentBatch:
    """images (B, 3, S, S), labels (B, S, S)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Crop:
    """A rectangle of the original image, and the size to which it is resized."""

    top: int
    left: int
    height: int
    width: int
    out: tuple[int, int]


def choose_crop(
    labels: Tensor, side: int, scales: tuple[float, float], largest_share: float, numbers: list[float]
) -> Crop:
    """Choose a random crop: resize the short side to side · scale, and take a square of ``side``.

    Of ten random positions, take the first where no class fills more than ``largest_share`` of the counted pixels, else
    the last. With a share of 1, take the first.
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
    """Distort colours, each kind in half of the images.

    Brightness ± 1/8, contrast and saturation × 0.5 to 1.5, hue ± 1/10 of a turn.

    inside: (B, 1, H, W), 1 in the image and 0 in the padding, which must not count in the mean for contrast
    """
    apply, amount = numbers[:, 0::2].float() < 0.5, (numbers[:, 1::2] * 2 - 1).float()
    strength = torch.where(apply, amount, torch.zeros_like(amount)).to(images.device)
    images = (images + strength[:, 0].view(-1, 1, 1, 1) / 8).clamp(0, 1)
    mean = (operations.luma(images) * inside).sum((1, 2, 3), keepdim=True) / inside.sum((1, 2, 3), keepdim=True)
    images = operations.blend(images, mean, 1 + strength[:, 1] / 2)
    images = operations.saturation(images, 1 + strength[:, 2] / 2)
    return operations.hue(images, strength[:, 3] / 10)


class SegmentationTask(DenseTask):
    """A segmenter and its losses. ``side``: of crops, and short side at test; ``test``: views of the final scores."""

    best_metric = "miou"
    loader: StepLoader[tuple[Tensor, Tensor]]
    evaluated: SegmentationDataset

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
        super().__init__(net, **settings)
        self.side = side
        self.scales, self.photometric, self.largest_share = scales, photometric, largest_share
        self.test = test or TestConfig()

    def make_dataset(self, items: list[Scene], data: SceneData, pictures: ImageReader) -> SegmentationDataset:
        return SegmentationDataset(items, data, pictures)

    # -- training

    def batch_at(self, step: int) -> SegmentBatch:
        self.last_evaluation = None
        items, numbers = self.loader.at(step)
        side, rows = self.side, numbers.tolist()
        crops = [
            choose_crop(item[1], side, self.scales, self.largest_share, row)
            for item, row in zip(items, rows, strict=True)
        ]
        cropped = [
            [part[..., c.top : c.top + c.height, c.left : c.left + c.width] for part in item]
            for item, c in zip(items, crops, strict=True)
        ]
        pixels = to_device_flat([picture for picture, _ in cropped], self.device).float() / 255
        classes = to_device_flat([label for _, label in cropped], self.device).float()
        areas = [crop.height * crop.width for crop in crops]
        parts = zip(pixels.split([3 * area for area in areas]), classes.split(areas), crops, rows, strict=True)
        images = torch.zeros(len(items), 3, side, side, device=self.device)
        inside = torch.zeros(len(items), 1, side, side, device=self.device)
        labels = torch.full((len(items), side, side), IGNORED, dtype=torch.int64, device=self.device)
        for index, (picture, label, crop, row) in enumerate(parts):
            image = picture.view(1, 3, crop.height, crop.width)
            image = _resize(image, crop.out)[0]
            truth = F.interpolate(label.view(1, 1, crop.height, crop.width), size=crop.out, mode="nearest-exact")[0, 0]
            flip = row[1] < 0.5
            images[index, :, : crop.out[0], : crop.out[1]] = image.flip(2) if flip else image
            inside[index, :, : crop.out[0], : crop.out[1]] = 1
            labels[index, : crop.out[0], : crop.out[1]] = truth.flip(1) if flip else truth
        if self.photometric:
            images = distort(images, numbers[:, -_COLOUR_COLUMNS:], inside)
        images = self.normalize(images) * inside  # the padding is the mean, not a distorted black
        return SegmentBatch(images, labels)

    def losses(self, batch: SegmentBatch) -> dict[str, Tensor]:
        return self.net.losses(batch.images, batch.labels)

    # -- evaluation

    def evaluate(self, step: int) -> dict[str, float]:
        self.last_evaluation = (self.evaluated, self.scores(self.evaluated, TestConfig()))
        return self.last_evaluation[1][0].summary()

    def score_facts(self) -> dict[str, Any]:
        dataset, (confusion, _) = self.last_evaluation
        return {"scored_on": self.eval_split, "scored_images": len(dataset), **confusion.facts()}

    def cached_scores(
        self, dataset: SegmentationDataset, test: TestConfig
    ) -> tuple[Confusion, list[tuple[int, float]]]:
        """Return the scores of a dataset. Reuse the last evaluation if no step followed and ``test`` is the default."""
        is_default = test.model_dump() == TestConfig().model_dump()
        if self.last_evaluation is not None and self.last_evaluation[0] is dataset and is_default:
            return self.last_evaluation[1]
        return self.scores(dataset, test)

    def scores(self, dataset: SegmentationDataset, test: TestConfig) -> tuple[Confusion, list[tuple[int, float]]]:
        """Return the confusion matrix of all images, and (index, share of correct pixels) of each with counted ones."""
        assert self.fabric is not None
        confusion = Confusion(self.net.spec.classes, self.device)
        shares: list[tuple[int, float]] = []
        with self.evaluating():
            for indices in console.progress(list(self._groups(dataset)), label="evaluating"):
                predicted = self.predict([dataset.pictures.read(index) for index in indices], test)
                truth = torch.stack([dataset.labels(index) for index in indices]).to(self.device)
                for index, answer, labels in zip(indices, predicted, truth, strict=True):
                    confusion.add(answer, labels, index)
                counted = truth != IGNORED
                correct = ((predicted == truth) & counted).sum((1, 2)) / counted.sum((1, 2))
                shares += [(index, s) for index, s in zip(indices, correct.tolist(), strict=True) if not math.isnan(s)]
        return confusion.reduced(self.fabric), sorted(self.gather(shares))

    def predict(self, pictures: list[Tensor], test: TestConfig) -> Tensor:
        """Return the most probable class of every pixel, (B, H, W), of images (3, H, W) of one size."""
        size = (pictures[0].shape[1], pictures[0].shape[2])
        images = [pixels.to(self.device) for pixels in pictures]
        window = (self.side if test.multi_scale else 0) if test.window == "auto" else test.window
        scales = test.scales if test.multi_scale else [1.0]
        flip = test.multi_scale and test.flip
        views: list[Tensor] = []
        with torch.inference_mode(), self.autocast():
            for scale in scales:
                wanted = size_at_test(size, self.side * scale)
                resized = torch.cat([_resize(pixels[None].float() / 255, wanted) for pixels in images])
                smaller = min(wanted, size, key=math.prod)  # probabilities of large images stay at the network's size
                views.append(probabilities(self.net, self.normalize(resized), smaller, window=int(window), flip=flip))
                self.check_finite(views[-1].sum())
            return torch.stack([most_probable([view[index] for view in views], size) for index in range(len(images))])

    def _groups(self, dataset: SegmentationDataset) -> Iterator[list[int]]:
        """Yield batches of consecutive images of one size."""
        assert self.fabric is not None
        indices = share(len(dataset), self.fabric)
        for _, same in itertools.groupby(indices, key=lambda index: dataset.pictures.sizes[index]):
            members = list(same)
            for start in range(0, len(members), self.eval_batch):
                yield members[start : start + self.eval_batch]


def size_at_test(size: tuple[int, int], short: float) -> tuple[int, int]:
    """Return the (height, width) of an image at test: this short side, or a long side of four times it."""
    factor = min(short / min(size), _MAX_ASPECT * short / max(size))
    return max(32, round(size[0] * factor)), max(32, round(size[1] * factor))


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
