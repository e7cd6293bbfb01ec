"""Scores against other people's counting and by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster

from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.detection.coco import CocoData, CocoImage, open_coco
from frugalvit.tasks.detection.dataset import DetectionDataset, View
from frugalvit.tasks.detection.metrics import _curves, agreement, average_precision
from frugalvit.tasks.detection.task import DetectionTask, summary_of
from helpers.dense_models import detector, noisy
from helpers.dense_samples import edit, make_coco


def test_curves_are_of_the_overlaps_they_name() -> None:
    """A precision that is the overlap itself, of the classes that occur."""
    overlaps = np.linspace(0.5, 0.95, 10)  # COCO's
    precision = np.stack([np.tile(overlaps[:, None], 101), np.full((10, 101), -1.0)], 2)
    curves = _curves(precision)
    assert all(values == pytest.approx([float(name.removeprefix("IoU "))] * 101) for name, values in curves.items())
    assert list(curves) == ["IoU 0.50", "IoU 0.75", "IoU 0.90"]


@pytest.fixture
def data(tmp_path: Path) -> CocoData:
    return open_coco(str(make_coco(tmp_path / "shapes", train=12, val=2)))


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_ap_equals_faster_coco_eval_on_its_own(data: CocoData, tmp_path: Path, kind: str, noise: float) -> None:
    """The annotation file as it is on the disk, with its own ids, and results as a file."""
    images = data.splits["train"]
    found = noisy(images, data, noise)
    ours = average_precision(images, data, found, kind)

    key = "bbox" if kind == "bbox" else "segmentation"
    results = [
        {
            "image_id": images[entry["image"]].id,
            "category_id": data.category_ids[entry["label"] - 1],
            "score": entry["score"],
            key: entry[key] if key == "bbox" else {**entry[key], "counts": _text(entry[key]["counts"])},
        }
        for entry in found
    ]
    (tmp_path / "results.json").write_text(json.dumps(results))
    truth = COCO(str(tmp_path / "shapes" / "instances_train.json"))
    evaluation = COCOeval_faster(truth, truth.loadRes(str(tmp_path / "results.json")), kind)
    evaluation.run()
    assert [ours.ap, ours.ap50, ours.ap75] == pytest.approx(evaluation.stats[:3].tolist(), abs=1e-12)
    assert 0.02 < ours.ap < 0.98
    assert np.mean(ours.classes) == pytest.approx(ours.ap)  # type: ignore[arg-type]
    assert np.mean(ours.curves["IoU 0.50"]) == pytest.approx(ours.ap50)
    assert np.mean(ours.curves["IoU 0.75"]) == pytest.approx(ours.ap75)


def test_ap_equals_torchmetrics(data: CocoData) -> None:
    from torchmetrics.detection import MeanAveragePrecision

    images = data.splits["train"]
    found = noisy(images, data, 0.6)
    metric = MeanAveragePrecision(box_format="xywh", iou_type="bbox", backend="faster_coco_eval")
    for place, image in enumerate(images):
        here = [entry for entry in found if entry["image"] == place]
        metric.update(
            [
                {
                    "boxes": torch.tensor([entry["bbox"] for entry in here]).reshape(-1, 4),
                    "scores": torch.tensor([entry["score"] for entry in here]),
                    "labels": torch.tensor([entry["label"] for entry in here], dtype=torch.int64),
                }
            ],
            [
                {
                    "boxes": torch.tensor([entry["bbox"] for entry in image.objects]).reshape(-1, 4),
                    "labels": torch.tensor([data.class_of()[e["category_id"]] for e in image.objects]),
                }
            ],
        )
    theirs = metric.compute()
    ours = average_precision(images, data, found, "bbox")
    assert ours.ap == pytest.approx(float(theirs["map"]), abs=1e-4)
    assert ours.ap50 == pytest.approx(float(theirs["map_50"]), abs=1e-4)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_perfect_detections_score_one(data: CocoData, kind: str) -> None:
    images = data.splits["train"]
    scores = average_precision(images, data, noisy(images, data, 0.0), kind)
    assert scores.ap == pytest.approx(1) and scores.ap75 == pytest.approx(1)


def test_no_detections_score_zero(data: CocoData) -> None:
    assert average_precision(data.splits["train"], data, [], "bbox").ap == 0


def without(images: list[CocoImage], size: str) -> None:
    """Leave out the objects of a size (COCO's areas)."""
    low, high = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, np.inf)}[size]
    for image in images:
        image.objects = [entry for entry in image.objects if not low <= entry["area"] <= high]


@pytest.mark.parametrize("absent", [(), ("small",), ("medium",), ("large",), ("small", "large"), ("medium", "large")])
@pytest.mark.parametrize("detected", [True, False])
def test_a_size_without_objects_has_no_score(data: CocoData, absent: tuple[str, ...], detected: bool) -> None:
    images = data.splits["train"][:6]
    for number, image in enumerate(images):
        for entry in image.objects:
            entry["area"] = (500.0, 3000.0, 20000.0)[number % 3]
    for size in absent:
        without(images, size)
    wrong = {"image": 0, "label": 1, "score": 0.5, "bbox": [0.0, 0.0, 1.0, 1.0]}
    scores = average_precision(images, data, [wrong] if detected else [], "bbox")
    assert (scores.ap, scores.ap50, scores.ap75) == (0, 0, 0)
    for size in ("small", "medium", "large"):
        assert getattr(scores, size) == (None if size in absent else 0), size


@pytest.mark.parametrize("detected", [True, False])
def test_an_object_on_the_border_is_of_both_sizes(data: CocoData, detected: bool) -> None:
    images = data.splits["train"][:1]
    for entry in images[0].objects:
        entry["area"] = 1024.0
    wrong = {"image": 0, "label": 1, "score": 0.5, "bbox": [0.0, 0.0, 1.0, 1.0]}
    scores = average_precision(images, data, [wrong] if detected else [], "bbox")
    assert (scores.small, scores.medium, scores.large) == (0, 0, None)


@pytest.mark.parametrize("detected", [True, False])
def test_without_any_object_there_is_no_score(data: CocoData, detected: bool) -> None:
    images = data.splits["train"][:2]
    for image in images:
        image.objects = []
    wrong = {"image": 0, "label": 1, "score": 0.5, "bbox": [0.0, 0.0, 1.0, 1.0]}
    scores = average_precision(images, data, [wrong] if detected else [], "bbox")
    assert set(summary_of({"bbox": scores}).values()) == {None} and set(scores.classes) == {None}


def test_crowds_forgive(data: CocoData) -> None:
    """A detection inside a crowd is neither right nor wrong; outside it would be wrong."""
    images = data.splits["train"]
    found = noisy(images, data, 0.0)
    wrong = {**found[0], "bbox": [0.0, 0.0, 8.0, 8.0], "score": 1.0}
    assert average_precision(images, data, [*found, wrong], "bbox").ap < 1
    crowd = {**images[0].objects[0], "bbox": [0.0, 0.0, 60.0, 60.0], "iscrowd": 1}
    images[0].objects.append({**crowd, "category_id": data.category_ids[found[0]["label"] - 1]})
    assert average_precision(images, data, [*found, wrong], "bbox").ap == pytest.approx(1)


def test_agreement_is_f1() -> None:
    truth = [{"label": 1, "bbox": [0, 0, 10, 10]}, {"label": 1, "bbox": [20, 0, 10, 10]}]
    hit = {"label": 1, "bbox": [1, 0, 10, 10], "score": 0.9}
    twice = {"label": 1, "bbox": [0, 0, 10, 10], "score": 0.8}
    wrong = {"label": 2, "bbox": [20, 0, 10, 10], "score": 0.7}
    assert agreement(truth, [hit]) == pytest.approx(2 / 3)
    assert agreement(truth, [hit, twice, wrong]) == pytest.approx(2 / 5)
    assert agreement(truth, []) == 0


def _text(counts: Any) -> str:
    return counts.decode() if isinstance(counts, bytes) else counts


def test_mask_ap_counts_only_objects_with_a_mask(data: CocoData) -> None:
    images = data.splits["train"]
    found = noisy(images, data, 0.0)
    for image in images:
        del image.objects[0]["segmentation"]
    detected = found[1::2]  # the second object of each image
    assert average_precision(images, data, detected, "segm").ap == pytest.approx(1)
    box_ap = average_precision(images, data, detected, "bbox").ap
    assert box_ap is not None and box_ap < 0.6, "boxes count for all objects"
    for entry in detected:
        del entry["segmentation"]
    assert average_precision(images, data, detected, "segm").ap == 0, "detections without a mask do not count"


@pytest.mark.parametrize("has_masks", [True, False])
def test_masks_are_scored_if_the_data_have_some(tmp_path: Path, has_masks: bool) -> None:
    folder = make_coco(tmp_path / "boxes")
    if not has_masks:
        edit(folder, "val", lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    opened = open_coco(str(folder), "given")
    images = opened.splits["val"]
    task = DetectionTask(detector(masks=True), View(32))
    dataset = DetectionDataset(images, opened, ImageReader([], []), masks=True)
    assert list(task.scores(dataset, [])) == (["bbox", "segm"] if has_masks else ["bbox"])
