"""Pictures with objects -> what a detector learns from in a step, with as little work on the host as there can be.

Masks are rasterised once and kept as bits; whatever a step needs goes to the device in four copies from pinned memory,
since a copy from anywhere else waits for all the work that is queued there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.data.augment.color import luma
from frugalvit.tasks.dense.loader import ImageReader, to_device_flat
from frugalvit.tasks.detection.coco import CocoData, CocoImage, masks_of
from frugalvit.tasks.detection.layers import Target

_SIZES_TRIED = 11
"""Short sides in training: 480, 512, …, 800 in the papers."""
_MULTIPLE = 32
"""Of which both sides of a network's input are whole multiples, so that every stage fits."""


@dataclass(frozen=True)
class View:
    """How pictures are resized: short side in pixels at test, its range in training, the long side's limit."""

    side: int
    scales: tuple[float, float] = (0.6, 1.0)
    longest: float = 5 / 3

    def side_for(self, number: float) -> int:
        """A training short side, one of eleven between the ends, for a uniform number."""
        low, high = (self.side * scale for scale in self.scales)
        place = min(int(number * _SIZES_TRIED), _SIZES_TRIED - 1)
        return round(low + (high - low) * place / (_SIZES_TRIED - 1))

    def fit(self, height: int, width: int, short: int) -> tuple[int, int]:
        """(height, width) with this short side, or with the longest long side allowed."""
        factor = min(short / min(height, width), self.longest * self.side / max(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))


@dataclass(frozen=True)
class Objects:
    """The n objects of a picture: boxes (n, 4), labels (n,), and masks of the picture's size as bits.

    mask_of: (n,) which of the masks is an object's, -1 for none; None where each has its own
    """

    boxes: Tensor
    labels: Tensor
    bits: Tensor | None
    mask_of: Tensor | None = None


class ObjectPictures:
    """Pictures with their objects as tensors on the CPU; objects are kept where there is room beside the pictures.

    Their masks take n / 24 of what a picture takes: of hundreds of cells many times as much.
    """

    def __init__(self, images: list[CocoImage], data: CocoData, pictures: ImageReader, masks: bool) -> None:
        self.images, self.data, self.pictures, self.masks = images, data, pictures, masks
        self._classes = data.class_of()
        bits = sum(image.height * image.width * len(image.drawn()) for image in images) if masks else 0
        self._keeps = pictures.keeps and bits // 8 <= pictures.room
        self._kept: dict[int, Objects] = {}

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> tuple[Tensor, Objects]:
        """To learn from: the next one where this picture cannot be read."""
        index, pixels = self.pictures.to_learn(index)
        objects = self._kept.get(index)
        if objects is None:
            objects = self._read(index)
            if self._keeps:
                self._kept[index] = objects
        return pixels, objects

    def _read(self, index: int) -> Objects:
        image = self.images[index]
        entries = image.learnable()
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([self._classes[entry["category_id"]] for entry in entries], dtype=torch.int64)
        if not self.masks:
            return Objects(boxes, labels, None)
        drawn = image.drawn()
        bits = torch.from_numpy(np.packbits(masks_of(drawn, image.height, image.width)))
        if len(drawn) == len(entries):
            return Objects(boxes, labels, bits)
        known = torch.tensor(["segmentation" in entry for entry in entries])
        return Objects(boxes, labels, bits, torch.where(known, known.cumsum(0) - 1, -1))


def unpack(bits: Tensor) -> Tensor:
    """Bits in bytes, the highest first -> eight times as many zeros and ones, uint8."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy()))
    return shifted(bits)


def shifted(bits: Tensor) -> Tensor:
    """What ``unpack`` does on a device; on a CPU it takes four times as long as NumPy."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).reshape(-1)


def frame_of(size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) that a picture resized to ``size`` is laid into at test: its own, whatever is looked at with it.

    There is always a strip beyond both sides, since nearly all pictures of a padded training batch have one: an edge of
    the picture that is also one of the input is a rare sight there (on a small set box AP was 0.58 without, 0.63 with).
    """
    return (size[0] // _MULTIPLE + 1) * _MULTIPLE, (size[1] // _MULTIPLE + 1) * _MULTIPLE


def lay_out(
    pictures: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    flips: Sequence[bool],
    mean: Tensor,
    std: Tensor,
    frame: tuple[int, int] | None = None,
) -> Tensor:
    """uint8 pictures -> (B, C, H, W): each resized, perhaps mirrored, in the top left corner, normalised; 0 beyond.

    Without a frame (H, W) it is the largest's sides, rounded up. A network whose mean is one number sees grey.
    """
    height, width = frame or [-(-max(sides) // _MULTIPLE) * _MULTIPLE for sides in zip(*sizes, strict=True)]
    whole = mean.expand(len(pictures), -1, height, width).clone()  # becomes exactly 0 where nothing is laid over it
    pixels = to_device_flat(pictures, mean.device).float() / 255
    parts = pixels.split([picture.numel() for picture in pictures])
    for place, (part, picture, size, flip) in enumerate(zip(parts, pictures, sizes, flips, strict=True)):
        image = part.view(1, *picture.shape)
        image = F.interpolate(image, size=size, mode="bilinear", align_corners=False, antialias=True)
        image = (luma(image) if len(mean) == 1 else image)[0]
        whole[place, :, : size[0], : size[1]] = image.flip(2) if flip else image
    return (whole - mean) / std


def make_targets(
    objects: Sequence[Objects],
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
    flips: Sequence[bool],
    device: torch.device,
) -> list[Target]:
    """Boxes and masks of pictures that are resized and perhaps mirrored, on the device."""
    counts = [len(part.labels) for part in objects]
    boxes = to_device_flat(
        [resize_boxes(o.boxes, b, a, f) for o, b, a, f in zip(objects, before, after, flips, strict=True)], device
    )
    labels = to_device_flat([part.labels for part in objects], device)
    pairs = zip(boxes.view(-1, 4).split(counts), labels.split(counts), strict=True)
    targets = [{"boxes": box, "labels": label} for box, label in pairs]
    bits = [part.bits for part in objects if part.bits is not None]
    if bits:
        whose = [torch.arange(len(o.labels)) if o.mask_of is None else o.mask_of for o in objects]
        drawn = [int((places >= 0).sum()) for places in whose]
        pixels = unpack(to_device_flat(bits, device)).split([8 * len(part) for part in bits])
        for target, part, count, old, new, flip in zip(targets, pixels, drawn, before, after, flips, strict=True):
            masks = part[: count * old[0] * old[1]].view(count, *old)  # the last byte may be longer than the masks
            target["masks"] = resize_masks(masks, new, flip)
        if drawn != counts:
            for target, places in zip(targets, to_device_flat(whose, device).split(counts), strict=True):
                target["mask_of"] = places
    return targets


def resize_boxes(boxes: Tensor, before: tuple[int, int], after: tuple[int, int], flip: bool) -> Tensor:
    height, width = after
    boxes = boxes * torch.tensor([width / before[1], height / before[0]] * 2)
    if flip:
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    return boxes


def resize_masks(masks: Tensor, after: tuple[int, int], flip: bool) -> Tensor:
    """(n, H, W) zeros and ones -> (n, *after), where interpolation gives at least a half."""
    if not len(masks):
        return masks.new_zeros((0, *after))
    inside = F.interpolate(masks[:, None].float(), size=after, mode="bilinear", align_corners=False)[:, 0] >= 0.5
    return (inside.flip(2) if flip else inside).to(torch.uint8)
