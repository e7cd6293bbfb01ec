"""Training batches of a detector from images with objects, with little work on the host.

Masks are rasterized once and cached as bits. A step goes to the device in four copies from pinned memory, because any
other copy waits for all work that is queued there.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.data.augmentation.operations import luma
from frugalvit.data.formats.coco import CocoData, CocoImage, masks_of
from frugalvit.tasks.dense.loader import ImageReader, to_device_flat
from frugalvit.tasks.detection.layers import Target

_TRAIN_SIZES = 11  # number of short sides in training: 480, 512, …, 800 in the papers
_MULTIPLE = 32  # both sides of the network's input are multiples of this, so that every stage fits


@dataclass(frozen=True)
class View:
    """How images are resized: short side in pixels at test, its range in training, the long side's limit."""

    side: int
    scales: tuple[float, float] = (0.6, 1.0)
    longest: float = 5 / 3

    def side_for(self, number: float) -> int:
        """Return one of eleven short sides for training, chosen by a uniform number."""
        low, high = (self.side * scale for scale in self.scales)
        index = min(int(number * _TRAIN_SIZES), _TRAIN_SIZES - 1)
        return round(low + (high - low) * index / (_TRAIN_SIZES - 1))

    def fit(self, height: int, width: int, short: int) -> tuple[int, int]:
        """Return the (height, width) with this short side; less if the long side would exceed its limit."""
        factor = min(short / min(height, width), self.longest * self.side / max(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))


@dataclass(frozen=True)
class Objects:
    """The n objects of an image: boxes (n, 4), labels (n,), and masks of the image's size as bits."""

    boxes: Tensor
    labels: Tensor
    bits: Tensor | None


class DetectionDataset:
    """Images with their objects as tensors on the CPU, cached if they fit: n masks take n / 24 of the image."""

    def __init__(self, images: list[CocoImage], data: CocoData, pictures: ImageReader, masks: bool) -> None:
        self.images, self.data, self.pictures, self.masks = images, data, pictures, masks
        self._classes = data.class_of()
        bits = sum(image.height * image.width * len(image.trainable()) for image in images) if masks else 0
        caches = pictures.is_cached and bits // 8 <= pictures.free_bytes
        self.objects = functools.cache(self._read) if caches else self._read

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> tuple[Tensor, Objects]:
        """Return the pixels and objects of a training image; of the next one if it is unreadable."""
        index, pixels = self.pictures.read_or_substitute(index)
        return pixels, self.objects(index)

    def _read(self, index: int) -> Objects:
        image = self.images[index]
        entries = image.trainable()
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([self._classes[entry["category_id"]] for entry in entries], dtype=torch.int64)
        if not self.masks:
            return Objects(boxes, labels, None)
        return Objects(boxes, labels, torch.from_numpy(np.packbits(masks_of(entries, image.height, image.width))))


def unpack_bits(bits: Tensor) -> Tensor:
    """Unpack bytes on their device, the highest bit first, to eight times as many zeros and ones, uint8."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).reshape(-1)


def padded_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of the network's input at test. It depends on this image only.

    Both sides are always padded, because nearly all images of a training batch are: an image edge at the input's edge
    is rare there (box AP on a small dataset: 0.58 without padding, 0.63 with it).
    """
    return (size[0] // _MULTIPLE + 1) * _MULTIPLE, (size[1] // _MULTIPLE + 1) * _MULTIPLE


def stack_images(
    pictures: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    flips: Sequence[bool],
    mean: Tensor,
    std: Tensor,
    input_size: tuple[int, int] | None = None,
) -> Tensor:
    """Resize, flip, normalize and stack uint8 images: (B, C, H, W), padded right and below with 0.

    input_size: (H, W); by default the largest sides, rounded up. With a mean of one channel images become grey.
    """
    height, width = input_size or [-(-max(sides) // _MULTIPLE) * _MULTIPLE for sides in zip(*sizes, strict=True)]
    stacked = mean.expand(len(pictures), -1, height, width).clone()  # the padding becomes exactly 0
    pixels = to_device_flat(pictures, mean.device).float() / 255
    parts = pixels.split([picture.numel() for picture in pictures])
    for index, (part, picture, size, flip) in enumerate(zip(parts, pictures, sizes, flips, strict=True)):
        image = part.view(1, *picture.shape)
        image = F.interpolate(image, size=size, mode="bilinear", align_corners=False, antialias=True)
        image = (luma(image) if len(mean) == 1 else image)[0]
        stacked[index, :, : size[0], : size[1]] = image.flip(2) if flip else image
    return (stacked - mean) / std


def make_targets(
    objects: Sequence[Objects],
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
    flips: Sequence[bool],
    device: torch.device,
) -> list[Target]:
    """Return boxes, labels and masks of resized and flipped images, on the device."""
    counts = [len(part.labels) for part in objects]
    resized = []
    for part, old, (height, width), flip in zip(objects, before, after, flips, strict=True):
        box = part.boxes * torch.tensor([width / old[1], height / old[0]] * 2)
        mirrored = torch.stack([width - box[:, 2], box[:, 1], width - box[:, 0], box[:, 3]], 1)
        resized.append(mirrored if flip else box)
    boxes = to_device_flat(resized, device)
    labels = to_device_flat([part.labels for part in objects], device)
    pairs = zip(boxes.view(-1, 4).split(counts), labels.split(counts), strict=True)
    targets = [{"boxes": box, "labels": label} for box, label in pairs]
    bits = [part.bits for part in objects if part.bits is not None]
    if bits:
        pixels = unpack_bits(to_device_flat(bits, device)).split([8 * len(part) for part in bits])
        for target, part, count, old, new, flip in zip(targets, pixels, counts, before, after, flips, strict=True):
            masks = part[: count * old[0] * old[1]].view(count, *old)  # the last byte may have bits left over
            target["masks"] = resize_masks(masks, new, flip)
    return targets


def resize_masks(masks: Tensor, after: tuple[int, int], flip: bool) -> Tensor:
    """Resize masks (n, H, W) of zeros and ones to (n, *after): 1 where interpolation gives at least 0.5."""
    if not len(masks):
        return masks.new_zeros((0, *after))
    inside = F.interpolate(masks[:, None].float(), size=after, mode="bilinear", align_corners=False)[:, 0] >= 0.5
    return (inside.flip(2) if flip else inside).to(torch.uint8)
