"""Scores of detectors (COCO's average precision) and of segmenters (IoU), with what a report shows of them."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor
from torchvision.ops import box_convert, box_iou

from frugalvit.tasks.detection.coco import CocoData, CocoImage, ground_truth

IGNORED = 255
"""The label of pixels that count nowhere, after a dataset's own labels have been translated."""

_AREAS = ((0, 32**2), (32**2, 96**2), (96**2, float("inf")))
"""Square pixels of COCO's small, medium and large objects; one on a border is of both sizes."""


@dataclass
class AveragePrecision:
    """COCO's scores; None where there is no object to find: of a size, of a class, or none at all.

    ``curves``: precision at 101 recalls for some IoUs, mean over classes; ``classes``: AP of each.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    small: float | None
    medium: float | None
    large: float | None
    curves: dict[str, list[float]]
    classes: list[float | None]


def average_precision(
    images: list[CocoImage], data: CocoData, found: list[dict[str, Any]], kind: str
) -> AveragePrecision:
    """AP of detections: dicts of ``image`` (place in ``images``), ``label``, ``score``, ``bbox``, ``segmentation``.

    kind: "bbox" or "segm", of what can be counted. faster-coco-eval does the counting; an image's place is its id, so
        any id in the file works.
    """
    if kind == "segm":
        images, found = filter_maskless(images, data, found)
    results = [
        {
            "image_id": entry["image"] + 1,
            "category_id": data.category_ids[entry["label"] - 1],
            "score": entry["score"],
            # Without a box COCO takes areas from the masks, which is what mask AP by size is about.
            **({"bbox": entry["bbox"]} if kind == "bbox" else {"segmentation": entry["segmentation"]}),
        }
        for entry in found
    ]
    if not results:  # faster-coco-eval before 1.8 cannot load nothing
        return _nothing_found(images, data)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(ground_truth(images, data))
        evaluation = COCOeval_faster(
            truth,
            truth.loadRes(results),
            iouType=kind,  # type: ignore[arg-type]
            print_function=_nowhere,
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][..., 0, -1]  # (IoU, recall, class), all areas, most detections
    stats = [None if value < 0 else float(value) for value in evaluation.stats[:6]]  # -1: there is nothing of the kind
    return AveragePrecision(*stats, curves=_curves(precision), classes=_per_class(precision))


def _nothing_found(images: list[CocoImage], data: CocoData) -> AveragePrecision:
    """0 where there was something to find."""
    objects = [entry for image in images for entry in image.learnable()]
    sizes = [0.0 if any(low <= o["area"] <= high for o in objects) else None for low, high in _AREAS]
    present = {entry["category_id"] for entry in objects}
    classes = [0.0 if identity in present else None for identity in data.category_ids]
    whole = 0.0 if objects else None
    return AveragePrecision(whole, whole, whole, *sizes, curves={}, classes=classes)


def _curves(precision: np.ndarray) -> dict[str, list[float]]:
    known = [k for k in range(precision.shape[2]) if precision[0, 0, k] > -1]
    if not known:
        return {}
    overlaps = {"IoU 0.50": 0, "IoU 0.75": 5, "IoU 0.90": 8}
    return {name: [float(v) for v in precision[at][:, known].mean(1)] for name, at in overlaps.items()}


def _per_class(precision: np.ndarray) -> list[float | None]:
    means: list[float | None] = []
    for number in range(precision.shape[2]):
        values = precision[:, :, number]
        means.append(float(values[values > -1].mean()) if (values > -1).any() else None)
    return means


def _nowhere(*_: object, **__: object) -> None:
    """faster-coco-eval's tables are not for our standard output."""


class Confusion:
    """Pixels by true class (rows) and predicted class (columns); those labelled ``IGNORED`` are not counted."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """(…) class numbers each."""
        counted = truth != IGNORED
        pairs = truth[counted].long() * self.classes + predicted[counted].long()
        self.counts += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)

    def reduced(self, fabric: Any) -> Confusion:
        """The sum over all processes."""
        self.counts = fabric.all_reduce(self.counts, reduce_op="sum")
        return self

    def ious(self) -> Tensor:
        """Per class |truth ∩ predicted| / |truth ∪ predicted|; undefined for a class that occurs in neither."""
        both = self.counts.diagonal().double()
        return both / (self.counts.sum(0) + self.counts.sum(1) - both)

    def accuracies(self) -> Tensor:
        """Per class the share of its pixels that were found; undefined for a class that does not occur."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def summary(self) -> dict[str, float]:
        """``miou`` over the classes in truth or prediction, ``mean_accuracy`` over those in truth, and
        ``pixel_accuracy`` over all pixels."""
        total = self.counts.sum()
        right = self.counts.diagonal().sum()
        return {
            "miou": _mean(self.ious()),
            "mean_accuracy": _mean(self.accuracies()),
            "pixel_accuracy": float(right / total) if total else 0.0,
        }


def _mean(values: Tensor) -> float:
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else 0.0


_LEAST = 0.5
"""The overlap from which on COCO calls a box found."""


def match_detections(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[int, int]:
    """Place of a detection -> place of the object it has found.

    The surest detection first takes the object of its class (``label``) that it overlaps most and nobody has taken.
    """
    if not truth or not found:
        return {}
    guesses, objects = (
        box_convert(torch.tensor([entry["bbox"] for entry in part]).float(), "xywh", "xyxy") for part in (found, truth)
    )
    overlaps = box_iou(guesses, objects).tolist()
    free, taken = set(range(len(truth))), {}
    for place in sorted(range(len(found)), key=lambda place: -found[place]["score"]):
        same = [other for other in free if truth[other]["label"] == found[place]["label"]]
        best = max(same, key=lambda other: overlaps[place][other], default=None)
        if best is not None and overlaps[place][best] >= _LEAST:
            free.remove(best)
            taken[place] = best
    return taken


def agreement(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """F1 of detections against objects."""
    if not truth or not found:
        return 0.0
    return 2 * len(match_detections(truth, found)) / (len(truth) + len(found))


def filter_maskless(
    images: list[CocoImage], data: CocoData, found: list[dict[str, Any]]
) -> tuple[list[CocoImage], list[dict[str, Any]]]:
    """The images, objects and detections that count for masks; the places of ``found`` are those of the new images."""
    found = [entry for entry in found if "segmentation" in entry]
    if all("segmentation" in entry for image in images for entry in image.objects):
        return images, found
    by_image: dict[int, list[dict[str, Any]]] = {}
    for entry in found:
        by_image.setdefault(entry["image"], []).append(entry)
    kept: list[CocoImage] = []
    left: list[dict[str, Any]] = []
    for place, image in enumerate(images):
        if image.learnable() and not image.drawn():
            continue
        left += [{**entry, "image": len(kept)} for entry in _judged(image, data, by_image.get(place, []))]
        kept.append(replace(image, objects=[*image.drawn(), *(_with_region(e) for e in image.objects if e["iscrowd"])]))
    return kept, left


def _judged(image: CocoImage, data: CocoData, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The detections of an image without those of objects that have no mask to judge them by."""
    classes = data.class_of()
    truth = [{**entry, "label": classes[entry["category_id"]]} for entry in image.learnable()]
    bare = {place for place, entry in enumerate(truth) if "segmentation" not in entry}
    taken = match_detections(truth, found) if bare else {}
    return [entry for place, entry in enumerate(found) if taken.get(place) not in bare]


def _with_region(crowd: dict[str, Any]) -> dict[str, Any]:
    """A crowd with its mask, or its box for one."""
    left, top, width, height = crowd["bbox"]
    right, bottom = left + width, top + height
    return {"segmentation": [[left, top, right, top, right, bottom, left, bottom]], **crowd}
