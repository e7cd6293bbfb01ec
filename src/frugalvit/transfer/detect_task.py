"""A detector in the one loop: pictures and objects of a step, its losses, and its COCO scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as run_length
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn import functional as F

from frugalvit import console
from frugalvit.transfer.coco import CocoData, CocoImage, masks_of
from frugalvit.transfer.detection import Detector, Target
from frugalvit.transfer.feed import Feed, Pictures, share
from frugalvit.transfer.pyramid import Pyramid
from frugalvit.transfer.scores import AveragePrecision, average_precision
from frugalvit.transfer.tasks import TransferTask

_SIZES_TRIED = 11
"""Short sides in training: 480, 512, …, 800 in the papers."""


@dataclass
class DetectionBatch:
    """images (B, 3, H, W) padded to the largest; ``sizes`` what of each is image."""

    images: Tensor
    sizes: list[tuple[int, int]]
    targets: list[Target]


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


class ObjectPictures:
    """Pictures with their objects as tensors on the CPU."""

    def __init__(self, images: list[CocoImage], data: CocoData, pictures: Pictures, masks: bool) -> None:
        self.images, self.data, self.pictures, self.masks = images, data, pictures, masks
        self._classes = data.class_of()

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> tuple[Tensor, Target]:
        image = self.images[index]
        entries = image.learnable()
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([self._classes[entry["category_id"]] for entry in entries], dtype=torch.int64)
        target = {"boxes": boxes, "labels": labels}
        if self.masks:
            target["masks"] = torch.from_numpy(masks_of(entries, image.height, image.width))
        return self.pictures.read(index), target


def resize_target(target: Target, before: tuple[int, int], after: tuple[int, int], flip: bool) -> Target:
    """Boxes and masks of a picture that is resized and perhaps mirrored."""
    height, width = after
    scale = torch.tensor([width / before[1], height / before[0]] * 2, device=target["boxes"].device)
    boxes = target["boxes"] * scale
    if flip:
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    resized = {"boxes": boxes, "labels": target["labels"]}
    if "masks" in target:
        masks = target["masks"]
        if len(masks):
            masks = F.interpolate(masks[:, None].float(), size=after, mode="bilinear", align_corners=False)[:, 0] >= 0.5
        else:
            masks = masks.new_zeros((0, height, width))
        resized["masks"] = (masks.flip(2) if flip else masks).to(torch.uint8)
    return resized


def batch_images(images: Sequence[Tensor], multiple: int = 32) -> Tensor:
    """(B, 3, H, W) with every image in its top left corner; sides are rounded up so that every stage fits."""
    height = -(-max(image.shape[1] for image in images) // multiple) * multiple
    width = -(-max(image.shape[2] for image in images) // multiple) * multiple
    whole = images[0].new_zeros((len(images), images[0].shape[0], height, width))
    for place, image in enumerate(images):
        whole[place, :, : image.shape[1], : image.shape[2]] = image
    return whole


class DetectTask(TransferTask):
    """A detector and its losses."""

    score = "box_ap"

    def __init__(self, net: Detector, view: View, **settings: Any) -> None:
        super().__init__(net.features.pyramid.backbone, **settings)
        self.net, self.view = net, view
        self.feeding: Feed[tuple[Tensor, Target]] | None = None
        self.evaluated: ObjectPictures | None = None

    def feed(
        self, feeding: Feed[tuple[Tensor, Target]], evaluated: ObjectPictures, watched: str, fabric: Fabric, batch: int
    ) -> None:
        self.feeding, self.evaluated, self.watched = feeding, evaluated, watched
        self.fabric, self.eval_batch = fabric, batch

    @property
    def pyramid(self) -> Pyramid:
        return self.net.features.pyramid

    # -- a step

    def batch_at(self, step: int) -> DetectionBatch:
        assert self.feeding is not None
        items, numbers = self.feeding.at(step)
        images, targets = [], []
        for (pixels, target), (size_number, flip_number) in zip(items, numbers.tolist(), strict=True):
            before = (pixels.shape[1], pixels.shape[2])
            after = self.view.fit(*before, self.view.side_for(size_number))
            flip = flip_number < 0.5
            images.append(self._prepare(pixels, after, flip))
            moved = {name: value.to(self.device, non_blocking=True) for name, value in target.items()}
            targets.append(resize_target(moved, before, after, flip))
        return DetectionBatch(batch_images(images), [(i.shape[1], i.shape[2]) for i in images], targets)

    def _prepare(self, pixels: Tensor, size: tuple[int, int], flip: bool = False) -> Tensor:
        image = pixels.to(self.device, non_blocking=True)[None].float() / 255
        image = F.interpolate(image, size=size, mode="bilinear", align_corners=False, antialias=True)
        return self.normalize(image.flip(3) if flip else image)[0]

    def forward(self, batch: DetectionBatch, step: int) -> dict[str, Tensor]:
        losses = self.net(batch.images, batch.sizes, batch.targets)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    # -- scores

    def evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluated is not None
        found = summary_of(self.scores(self.evaluated, self.find(self.evaluated)))
        return {name: value for name, value in found.items() if name.endswith(("ap", "ap50", "ap75"))}

    def find(self, dataset: ObjectPictures) -> list[dict[str, Any]]:
        """The detections of all images, gathered over the processes; masks as run lengths."""
        assert self.fabric is not None
        places = list(share(len(dataset), self.fabric))
        found: list[dict[str, Any]] = []
        was_training = self.training
        self.eval()
        starts = range(0, len(places), self.eval_batch)
        for start in console.progress(starts, label="evaluating"):
            part = places[start : start + self.eval_batch]
            for place, objects in zip(part, self.detect([dataset.pictures.read(i) for i in part]), strict=True):
                found += [{"image": place, **entry} for entry in objects]
        self.train(was_training)
        return self.gather(found)

    def detect(self, pictures: list[Tensor]) -> list[list[dict[str, Any]]]:
        """The objects of pictures (3, H, W): label, score, bbox (left, top, width, height) and mask as run lengths."""
        original = [(pixels.shape[1], pixels.shape[2]) for pixels in pictures]
        with torch.inference_mode(), self.autocast():
            images = [
                self._prepare(p, self.view.fit(*o, self.view.side)) for p, o in zip(pictures, original, strict=True)
            ]
            sizes = [(image.shape[1], image.shape[2]) for image in images]
            found = self.net.detect(batch_images(images), sizes, original)
        return [_entries(objects) for objects in found]

    def scores(self, dataset: ObjectPictures, found: list[dict[str, Any]]) -> dict[str, AveragePrecision]:
        """COCO's scores of boxes, and of masks where both the detector and the data have them."""
        drawn = all("segmentation" in entry for image in dataset.images for entry in image.objects)
        kinds = ("bbox", "segm") if self.net.spec.masks and drawn else ("bbox",)
        return {kind: average_precision(dataset.images, dataset.data, found, kind) for kind in kinds}


def summary_of(scores: dict[str, AveragePrecision]) -> dict[str, float]:
    """box_ap, box_ap50, box_ap75, mask_ap, …"""
    words = {"bbox": "box", "segm": "mask"}
    parts = (("ap", "ap"), ("ap50", "ap50"), ("ap75", "ap75"), ("small", "ap_small"), ("medium", "ap_medium"))
    parts = (*parts, ("large", "ap_large"))
    return {f"{words[kind]}_{key}": getattr(ap, part) for kind, ap in scores.items() for part, key in parts}


def _entries(objects: Target) -> list[dict[str, Any]]:
    boxes = objects["boxes"].float().cpu()
    sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    entries = [
        {"label": label, "score": score, "bbox": box}
        for label, score, box in zip(objects["labels"].tolist(), objects["scores"].tolist(), sides, strict=True)
    ]
    if "masks" in objects and entries:
        columns = np.asfortranarray(objects["masks"].cpu().numpy().astype(np.uint8).transpose(1, 2, 0))
        for entry, encoded in zip(entries, run_length.encode(columns), strict=True):
            counts = encoded["counts"]
            text = counts.decode() if isinstance(counts, bytes) else counts
            entry["segmentation"] = {"size": [int(side) for side in encoded["size"]], "counts": text}
    return entries
