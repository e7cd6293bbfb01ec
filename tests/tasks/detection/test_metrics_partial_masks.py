"""Mask AP where some objects have a box alone: neither they nor what has found them count, and all else does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from faster_coco_eval import COCO, COCOeval_faster

from frugalvit.tasks.detection.coco import CocoData, CocoImage, ground_truth, open_coco
from frugalvit.tasks.detection.metrics import average_precision, filter_maskless
from helpers.dense_models import noisy
from helpers.dense_samples import make_coco


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CocoData:
    return open_coco(str(make_coco(tmp_path_factory.mktemp("coco") / "shapes", train=40, val=1)))


def stripped(data: CocoData, share: float, seed: int = 0) -> list[CocoImage]:
    """The images with a share of their objects' masks gone."""
    images = copy.deepcopy(data.splits["train"])
    objects = [entry for image in images for entry in image.objects]
    for place in np.random.default_rng(seed).permutation(len(objects))[: round(share * len(objects))]:
        del objects[place]["segmentation"]
    return images


def mask_ap(images: list[CocoImage], data: CocoData, found: list[dict[str, Any]]) -> float:
    ap = average_precision(images, data, found, "segm").ap
    assert ap is not None
    return ap


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_perfect_detections_score_one(whole: CocoData, share: float) -> None:
    images, found = stripped(whole, share), noisy(whole.splits["train"], whole, 0.0)
    assert mask_ap(images, whole, found) == pytest.approx(1)
    assert average_precision(images, whole, found, "bbox").ap == pytest.approx(1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_what_cannot_be_judged_need_not_be_found(whole: CocoData, share: float) -> None:
    """Only the objects with a mask are detected, or nothing at all."""
    images = stripped(whole, share)
    known = ["segmentation" in entry for image in images for entry in image.objects]
    found = noisy(whole.splits["train"], whole, 0.0)
    left = [entry for entry, there in zip(found, known, strict=True) if there]
    assert mask_ap(images, whole, left) == pytest.approx(1)
    box_ap = average_precision(images, whole, left, "bbox").ap
    assert box_ap is not None and box_ap <= 1 - share + 0.05, "boxes count wherever they are"
    assert mask_ap(images, whole, []) == 0
    lost = [entry for entry, there in zip(found, known, strict=True) if not there]
    assert mask_ap(images, whole, lost) == 0, "objects with a mask are still to be found"


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_boxes_are_scored_as_ever(whole: CocoData, share: float) -> None:
    found = noisy(whole.splits["train"], whole, 0.5)
    before, after = (
        average_precision(part, whole, found, "bbox") for part in (whole.splits["train"], stripped(whole, share))
    )
    assert before == after


def test_where_all_have_masks_nothing_is_left_out(whole: CocoData) -> None:
    images, found = whole.splits["train"], noisy(whole.splits["train"], whole, 0.5)
    kept, left = filter_maskless(images, whole, found)
    assert kept is images and left == found


def as_the_library_has_it(images: list[CocoImage], data: CocoData, found: list[dict[str, Any]]) -> float:
    """COCO's own counting, an object without a mask being one without pixels; without the key it would not count."""
    truth = ground_truth(images, data)
    for entry in truth["annotations"]:
        entry.setdefault("segmentation", [])
    results = [
        {
            "image_id": entry["image"] + 1,
            "category_id": data.category_ids[entry["label"] - 1],
            "score": entry["score"],
            "segmentation": entry["segmentation"],
        }
        for entry in found
    ]
    content = COCO(truth)
    evaluation = COCOeval_faster(content, content.loadRes(results), "segm")
    evaluation.run()
    return float(evaluation.stats[0])


@pytest.mark.parametrize("noise", [0.2, 0.4])
def test_the_score_is_about_that_of_all_masks(whole: CocoData, noise: float) -> None:
    """Over ten draws of which half has masks; COCO's own counting calls half of what was found wrong."""
    complete, ours, theirs = [], [], []
    for seed in range(10):
        found = noisy(whole.splits["train"], whole, noise, seed)
        images = stripped(whole, 0.5, seed)
        complete.append(mask_ap(whole.splits["train"], whole, found))
        ours.append(mask_ap(images, whole, found))
        theirs.append(as_the_library_has_it(images, whole, found))
    assert np.mean(ours) == pytest.approx(np.mean(complete), rel=0.1)
    assert np.mean(theirs) < 0.5 * np.mean(complete)


def lone(whole: CocoData) -> tuple[list[CocoImage], list[dict[str, Any]]]:
    """Two images, each with a square and a disc, the first's square without a mask; and all four found."""
    images = copy.deepcopy(whole.splits["train"][:2])
    found = noisy(images, whole, 0.0)
    del images[0].objects[0]["segmentation"]
    return images, [entry | {"score": 0.5} for entry in found]


def test_whoever_finds_an_object_twice_is_wrong_once(whole: CocoData) -> None:
    images, found = lone(whole)
    again = {**found[0], "score": 0.9}
    assert mask_ap(images, whole, [*found, again]) < 1
    _, left = filter_maskless(images, whole, [*found, again])
    assert left == found, "the surer of the two has found it; the other is judged"


def test_false_alarms_count_beside_objects_without_a_mask(whole: CocoData) -> None:
    """Also inside their boxes, where a crowd would forgive them."""
    images, found = lone(whole)
    left, top, width, height = images[0].objects[0]["bbox"]
    inside = {**found[0], "bbox": [left, top, width / 3, height / 3], "score": 0.9}
    assert mask_ap(images, whole, [*found, inside]) < 1
    other = {**found[0], "label": 2, "score": 0.9}
    assert mask_ap(images, whole, [*found, other]) < 1, "of another class"


def test_images_without_any_mask_say_nothing_and_those_without_objects_do(whole: CocoData) -> None:
    images, found = lone(whole)
    wrong = {**found[0], "bbox": [0.0, 0.0, 3.0, 3.0], "score": 0.9}
    del images[0].objects[1]["segmentation"]
    assert mask_ap(images, whole, [*found, wrong]) == pytest.approx(1)
    kept, left = filter_maskless(images, whole, [*found, wrong])
    assert kept == images[1:] and [entry["image"] for entry in left] == [0, 0]
    images[0].objects = []
    assert mask_ap(images, whole, [*found[2:], wrong]) < 1


def test_a_crowd_without_a_mask_forgives_what_lies_in_its_box(whole: CocoData) -> None:
    images, found = lone(whole)
    images[0].objects[0]["iscrowd"] = 1
    for copies in (1, 3):  # all of them
        assert mask_ap(images, whole, [*found, *[found[0] | {"score": 0.9}] * copies]) == pytest.approx(1)
    images[0].objects[0]["bbox"] = [0.0, 0.0, 2.0, 2.0]
    assert mask_ap(images, whole, [*found, found[0] | {"score": 0.9}]) < 1


def test_detections_without_a_mask_find_none(whole: CocoData) -> None:
    """Of classes that had no mask to learn from; there may be some to find."""
    images, found = whole.splits["train"], noisy(whole.splits["train"], whole, 0.0)
    for entry in found:
        if entry["label"] == 2:
            del entry["segmentation"]
    scores = average_precision(images, whole, found, "segm")
    assert scores.classes == [pytest.approx(1), 0.0]
    assert average_precision(images, whole, [e for e in found if e["label"] == 2], "segm").ap == 0
