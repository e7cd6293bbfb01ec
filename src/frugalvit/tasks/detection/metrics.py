"""COCO's average precision of detections, and their F1 per image for reports."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from torchvision.ops import box_convert, box_iou

from frugalvit.data.formats.coco import CocoData, CocoImage, rle
from frugalvit.utils.intervals import PARTS

_MIN_OVERLAP = 0.5  # IoU from which COCO counts a box as detected


@dataclass
class AveragePrecision:
    """COCO's scores; None without objects. ``curves``: {IoU: precision at 101 recalls}; ``classes``: AP of each."""

    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    curves: dict[str, list[float]]
    classes: list[float | None]


def average_precision(
    images: list[CocoImage], data: CocoData, detections: list[dict[str, Any]], kind: str
) -> AveragePrecision:
    """Score detections with COCO's average precision; faster-coco-eval does the counting.

    detections: dicts of ``image`` (index in ``images``), ``label``, ``score``, ``bbox``, ``segmentation``
    kind:  "bbox", or "segm" over the objects that have a mask
    """
    if kind == "segm":
        images = [replace(image, objects=[o for o in image.objects if "segmentation" in o]) for image in images]
    results = [
        {
            "image_id": entry["image"] + 1,
            "category_id": data.category_ids[entry["label"] - 1],
            "score": entry["score"],
            # Without a box COCO takes the area from the mask, which mask AP by size needs.
            **({"bbox": entry["bbox"]} if kind == "bbox" else {"segmentation": entry["segmentation"]}),
        }
        for entry in detections
    ]
    if not results:  # faster-coco-eval before 1.8 cannot load an empty list
        results = [{"image_id": 1, "category_id": data.category_ids[0], "score": 0.0, "bbox": [0.0, 0.0, 1e-6, 1e-6]}]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(ground_truth(images, data))
        evaluation = COCOeval_faster(
            truth,
            truth.loadRes(results),
            iouType=kind,  # type: ignore[arg-type]
            print_function=lambda *_, **__: None,
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][..., 0, -1]  # (IoU, recall, class), all areas, most detections
    stats = [None if value < 0 else float(value) for value in evaluation.stats[:6]]  # -1: no such object
    classes = [float(part[part > -1].mean()) if (part > -1).any() else None for part in np.moveaxis(precision, 2, 0)]
    return AveragePrecision(*stats, curves=_curves(precision), classes=classes)


AP_KEYS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def leave_parts_out(
    images: list[CocoImage], detections: list[dict[str, Any]]
) -> Iterator[tuple[list[CocoImage], list[dict[str, Any]]]]:
    """Yield the images and their detections without one part at a time, for ``jackknife_facts``."""
    for part in range(min(PARTS, len(images))):
        rest = [index for index in range(len(images)) if index % PARTS != part]
        number = {index: position for position, index in enumerate(rest)}
        found = [entry | {"image": number[entry["image"]]} for entry in detections if entry["image"] in number]
        if rest:
            yield [images[index] for index in rest], found


def ground_truth(images: Sequence[CocoImage], data: CocoData) -> dict[str, Any]:
    """Return the images as a COCO dataset in memory; image ids are 1, 2, …"""
    annotations = [
        {
            **entry,
            "image_id": number,
            **({"segmentation": rle(entry, image.height, image.width)} if "segmentation" in entry else {}),
        }
        for number, image in enumerate(images, 1)
        for entry in image.objects
    ]
    for number, entry in enumerate(annotations, 1):
        entry["id"] = number
    return {
        "info": {},
        "images": [{"id": n, "height": i.height, "width": i.width} for n, i in enumerate(images, 1)],
        "annotations": annotations,
        "categories": [
            {"id": identity, "name": name} for identity, name in zip(data.category_ids, data.classes, strict=True)
        ],
    }


def _curves(precision: np.ndarray) -> dict[str, list[float]]:
    present = [k for k in range(precision.shape[2]) if precision[0, 0, k] > -1]
    if not present:
        return {}
    overlaps = {"IoU 0.50": 0, "IoU 0.75": 5, "IoU 0.90": 8}
    return {name: [float(v) for v in precision[index][:, present].mean(1)] for name, index in overlaps.items()}


def agreement(truth: list[dict[str, Any]], detections: list[dict[str, Any]]) -> float:
    """Return the F1 of an image: by score, each detection takes the free object of its label that it overlaps most."""
    if not truth or not detections:
        return 0.0
    detected, objects = (
        box_convert(torch.tensor([entry["bbox"] for entry in part]).float(), "xywh", "xyxy")
        for part in (detections, truth)
    )
    overlaps = box_iou(detected, objects).tolist()
    free = set(range(len(truth)))
    for index in sorted(range(len(detections)), key=lambda index: -detections[index]["score"]):
        same = [other for other in free if truth[other]["label"] == detections[index]["label"]]
        best = max(same, key=lambda other: overlaps[index][other], default=None)
        if best is not None and overlaps[index][best] >= _MIN_OVERLAP:
            free.remove(best)
    return 2 * (len(truth) - len(free)) / (len(truth) + len(detections))
