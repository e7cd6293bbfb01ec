"""Small detectors, their targets, and noisy detections."""

from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as run_length

from frugalvit import create_backbone
from frugalvit.data.formats.coco import CocoData, CocoImage, masks_of
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.layers import DetectorSpec
from frugalvit.tasks.detection.model import Detector

SIZES = [(64, 64), (48, 64)]


def detector(head: str = "mask-rcnn", masks: bool = True) -> Detector:
    torch.manual_seed(0)
    backbone = create_backbone("swin_nano", img_size=64, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    spec = DetectorSpec(3, head, masks, channels=16, hidden=32, anchors=2, proposals=50, samples=32)
    return Detector(Pyramid(backbone), spec)


def targets(masks: bool = True) -> list[dict[str, torch.Tensor]]:
    """Targets of an image with two objects and one with none."""
    boxes = torch.tensor([[4.0, 4, 30, 34], [40.0, 20, 60, 40]])
    inside = torch.zeros(2, 64, 64, dtype=torch.uint8)
    inside[0, 4:34, 4:30] = 1
    inside[1, 20:40, 40:60] = 1
    full = {"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": inside}
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "masks": inside[:0, :48]}
    return [full, empty] if masks else [{k: v for k, v in t.items() if k != "masks"} for t in (full, empty)]


def noisy(images: list[CocoImage], data: CocoData, noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Detections made from the annotations: moved, sometimes missed or of the wrong class."""
    random = np.random.default_rng(seed)
    detections = []
    for index, image in enumerate(images):
        for entry in image.objects:
            if random.random() < noise / 4:
                continue
            shift = random.normal(0, 6 * noise, 2)
            box = np.add(entry["bbox"], [*shift, *random.normal(0, 3 * noise, 2)])
            label = data.class_of()[entry["category_id"]]
            inside = np.roll(masks_of([entry], image.height, image.width)[0], shift.round().astype(int)[::-1], (0, 1))
            detections.append(
                {
                    "image": index,
                    "label": label if random.random() > noise / 4 else 3 - label,
                    "score": float(random.random()),
                    "bbox": [float(value) for value in [*box[:2], *box[2:].clip(1)]],
                    "segmentation": run_length.encode(np.asfortranarray(inside)),
                }
            )
    return detections
