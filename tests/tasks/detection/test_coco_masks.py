"""Objects with and without masks side by side: boxes of all are kept, and masks are learnt where enough have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frugalvit.errors import UserError
from frugalvit.tasks.detection.coco import masks_of, open_coco
from frugalvit.tasks.detection.commands import DetectJob
from helpers.dense_runs import detect_config
from helpers.dense_samples import edit, make_coco

BARE = {"nothing": [], "an empty part": [[]], "two corners": [[5.0, 5.0, 20.0, 20.0]], "an odd number": [[5.0] * 7]}


def bare(count: int, kind: str = "nothing") -> Any:
    """The first objects of a file without masks, as tools write boxes among polygons."""
    return lambda content: [entry.update(segmentation=BARE[kind]) for entry in content["annotations"][:count]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """16 objects to learn from, 8 to score."""
    return make_coco(tmp_path / "shapes")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coco(tmp_path_factory.mktemp("many") / "shapes", train=100, val=2, side=40)


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_all_boxes_and_those_masks_that_there_are(many: Path, tmp_path: Path, share: float, kind: str) -> None:
    whole = open_coco(str(many))
    path = many / "instances_train.json"
    before = path.read_text()
    edit(many, "train", bare(round(200 * share), kind))
    try:
        found = open_coco(str(many))
        config = detect_config(many, tmp_path / "run", masks=False)
        assert DetectJob().open(config).masks() == found.masks(), "what is learnt is another question"
    finally:
        path.write_text(before)
    drawn = 200 - round(200 * share)
    assert found.masks() == (drawn, 200) and found.has_masks()
    assert found.about_masks() == f"{drawn} of 200 training objects have one"
    said = f"instances_train.json: {200 - drawn} of 200 objects without a mask: their boxes alone count"
    assert said in found.notes and not any("left out" in note for note in found.notes)
    odd = any(f"{200 - drawn} of them with an outline that is no polygon" in note for note in found.notes)
    assert odd == (kind in ("two corners", "an odd number"))
    place = 0
    for image, full in zip(found.splits["train"], whole.splits["train"], strict=True):
        for entry, other in zip(image.objects, full.objects, strict=True):
            assert {**entry, "segmentation": 0} == {**other, "segmentation": 0}
            assert entry.get("segmentation") == (other["segmentation"] if place >= 200 - drawn else None)
            place += 1


@pytest.mark.parametrize(
    ("objects", "drawn", "learnt"),
    [(16, 16, True), (16, 15, True), (16, 8, True), (16, 7, False), (16, 1, False), (40, 10, True), (40, 9, False),
     (200, 10, True), (200, 9, False), (2, 1, True), (2, 2, True), (16, 0, False)],
)  # fmt: skip
def test_ten_masks_or_half_of_them_are_enough(tmp_path: Path, objects: int, drawn: int, learnt: bool) -> None:
    data = make_coco(tmp_path / "shapes", train=objects // 2, val=1, side=40)
    edit(data, "train", bare(objects - drawn))
    found = open_coco(str(data))
    assert (found.masks(), found.has_masks()) == ((drawn, objects), learnt)
    assert ("too few to learn from" in found.about_masks()) == (not learnt and drawn > 0)
    assert found.about_masks().startswith(
        {0: "no training object has one", objects: "every training object has one"}.get(drawn, f"{drawn} of {objects}")
    )
    job = DetectJob()
    if drawn:  # whoever asks for masks gets them
        assert job.open(detect_config(data, tmp_path / "run", masks=True)).masks() == (drawn, objects)
        return
    with pytest.raises(UserError, match="no object with a usable mask in its training images"):
        job.open(detect_config(data, tmp_path / "run", masks=True))


EMPTY = {
    "outside": [[-30, -30, -20, -30, -20, -20, -30, -20]],
    "a point": [[5, 5, 5, 5, 5, 5]],
    "zeros alone": {"size": [64, 64], "counts": [64 * 64]},
}


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("kind", EMPTY)
def test_of_objects_whose_mask_is_empty_the_box_is_left(data: Path, kind: str, boxed: bool) -> None:
    def empty(content: dict[str, Any]) -> None:
        content["annotations"][0]["segmentation"] = EMPTY[kind]
        if not boxed:
            del content["annotations"][0]["bbox"]

    edit(data, "train", empty)
    found = open_coco(str(data))
    assert found.masks() == (15, 16 if boxed else 15)
    words = "1 of them with a mask that holds no pixel of the image (annotation 1)"
    assert any((words if boxed else "1 object without a box and a usable mask left out") in n for n in found.notes)
    for image in found.splits["train"]:
        assert masks_of(image.masked(), image.height, image.width).any((1, 2)).all()


@pytest.mark.parametrize("kind", [*BARE, "no key"])
def test_boxes_alone_are_a_dataset_too(data: Path, kind: str) -> None:
    for split in ("train", "val"):
        strip = bare(16, kind) if kind in BARE else lambda c: [entry.pop("segmentation") for entry in c["annotations"]]
        edit(data, split, strip)
    found = open_coco(str(data))
    assert found.masks() == (0, 16) and not found.has_masks()
    assert found.about_masks() == "no training object has one" and found.notes == []


def test_masks_of_one_split_alone(data: Path) -> None:
    """Without any to learn from there is nothing to teach a mask head with; without any to score on it learns."""
    edit(data, "val", bare(8))
    found = open_coco(str(data))
    assert found.has_masks() and found.about_masks() == "every training object has one"
    assert "instances_val.json: 8 of 8 objects without a mask: their boxes alone count" in found.notes
    (data / "instances_val.json").rename(data / "other.json")
    (data / "instances_train.json").rename(data / "instances_val.json")
    (data / "other.json").rename(data / "instances_train.json")
    assert not open_coco(str(data)).has_masks()


@pytest.mark.parametrize("categories", ["own", "one"])
def test_classes_without_any_mask_are_known(data: Path, categories: str) -> None:
    def strip(content: dict[str, Any]) -> None:
        for entry in content["annotations"]:
            if entry["category_id"] == 17:
                del entry["segmentation"]

    assert open_coco(str(data)).maskless() == ()
    edit(data, "train", strip)
    assert open_coco(str(data), categories=categories).maskless() == ((2,) if categories == "own" else ())
    edit(data, "train", lambda content: content["categories"].append({"id": 20, "name": "ring"}))
    assert open_coco(str(data)).maskless() == (2,), "what is not learnt at all needs no word"
