"""Scores against other people's counting and by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval import COCO, COCOeval_faster

from frugalvit.data.formats.coco import CocoData, open_coco
from frugalvit.tasks.detection.metrics import _curves, agreement, average_precision
from helpers.dense_models import noisy
from helpers.dense_samples import make_coco


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


AREAS = {"small": 500.0, "medium": 3000.0, "large": 20000.0}
WRONG = {"image": 0, "label": 1, "score": 0.5, "bbox": [0.0, 0.0, 1.0, 1.0]}


@pytest.mark.parametrize("present", [["small", "medium", "large"], ["medium"], ["small", "large"], []])
@pytest.mark.parametrize("detections", [[WRONG], []])
def test_a_size_without_objects_has_no_score(data: CocoData, present: list[str], detections: list[Any]) -> None:
    images = data.splits["train"][:6]
    for number, image in enumerate(images):
        image.objects = [
            {**entry, "area": AREAS[size]} for size in present[number % 3 :][:1] for entry in image.objects
        ]
    scores = average_precision(images, data, detections, "bbox")
    assert (scores.ap, scores.ap50, scores.ap75) == ((0, 0, 0) if present else (None,) * 3)
    for size in AREAS:
        assert getattr(scores, f"ap_{size}") == (0 if size in present else None), size
    assert set(scores.classes) == ({0} if present else {None})


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
    assert average_precision(images, data, found, "bbox").ap == pytest.approx(1)
    detected = found[1::2]  # the second object of each image
    assert average_precision(images, data, detected, "segm").ap == pytest.approx(1)
    box_ap = average_precision(images, data, detected, "bbox").ap
    assert box_ap is not None and box_ap < 0.6, "boxes count for all objects"
