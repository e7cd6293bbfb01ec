"""COCO files: odd entries are handled, and every mistake is a one-line error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as run_length

from frugalvit.data.formats.coco import find_annotations, masks_of, open_coco
from frugalvit.data.formats.image_folder import SPLIT_NAMES
from frugalvit.errors import UserError
from helpers.dense_samples import annotation, as_official_coco, draw, edit, make_coco


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_coco(tmp_path / "shapes")


def test_classes_are_in_the_order_of_ids(data: Path) -> None:
    path = data / "instances_train.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")  # with a byte order mark
    opened = open_coco(str(data))
    assert opened.classes == ("square", "disc") and opened.category_ids == (3, 17)
    assert opened.class_of() == {3: 1, 17: 2}
    assert {split: len(images) for split, images in opened.splits.items()} == {"train": 8, "val": 4}


@pytest.mark.parametrize("kind", ["polygon", "run lengths", "compressed"])
def test_masks_of_every_format(kind: str) -> None:
    _, shapes = draw(np.random.default_rng(0), 64)
    name, inside = shapes[0]
    entry = annotation(1, 1, name, inside, kind == "polygon")
    if kind == "compressed":
        entry["segmentation"] = run_length.encode(np.asfortranarray(inside.astype(np.uint8)))
    assert (masks_of([entry], 64, 64)[0] != inside).mean() < (0.01 if kind == "polygon" else 1e-9)
    assert masks_of([], 5, 7).shape == (0, 5, 7)


def test_objects_are_clipped_and_crowds_are_not_trained_on(data: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["annotations"][0].update(bbox=[-5, 50, 20, 30])
        content["annotations"][1].update(iscrowd=1)
        content["annotations"] = content["annotations"][:2]

    edit(data, "train", change)
    first, *others = open_coco(str(data)).splits["train"]
    assert first.objects[0]["bbox"] == [0, 50, 15, 14]
    assert len(first.objects) == 2 and len(first.trainable()) == 1
    assert len(others) == 7 and not any(image.objects for image in others), "images without objects are used"


def test_a_missing_val_is_made(data: Path) -> None:
    (data / "instances_val.json").unlink()
    found = open_coco(str(data), "auto", 0.25)
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 6, "val": 2}
    assert any("val is made from train" in note for note in found.notes)
    again = open_coco(str(data), "auto", 0.25)
    assert [i.path for i in again.splits["val"]] == [i.path for i in found.splits["val"]]
    assert list(open_coco(str(data), "given").splits) == ["train"]


@pytest.mark.parametrize("word", SPLIT_NAMES)
def test_splits_have_the_usual_names(data: Path, word: str) -> None:
    (data / "instances_val.json").unlink()
    (data / "instances_train.json").rename(data / f"instances_{word}.json")
    assert find_annotations(data) == {SPLIT_NAMES[word]: data / f"instances_{word}.json"}


def test_the_name_of_a_file_precedes_that_of_its_folder(data: Path) -> None:
    data = data.rename(data.with_name("train"))
    assert find_annotations(data) == {split: data / f"instances_{split}.json" for split in ("train", "val")}


def test_a_single_file_of_any_name(data: Path) -> None:
    (data / "instances_val.json").unlink()
    (data / "annotations").mkdir()
    file = (data / "instances_train.json").rename(data / "annotations" / "my_coco.json")
    assert find_annotations(data) == {"train": file}


def test_the_layout_of_coco(data: Path) -> None:
    as_official_coco(data)
    (data / "annotations" / "captions_train2017.json").write_text("{}")
    assert find_annotations(data)["train"].name == "instances_train2017.json"
    assert {split: len(images) for split, images in open_coco(str(data)).splits.items()} == {"train": 8, "val": 4}
    assert {split: len(images) for split, images in open_coco(str(data), "train+val").splits.items()} == {"train": 12}


def test_the_layout_of_roboflow(data: Path) -> None:
    for split, folder in (("train", "train"), ("val", "valid")):
        (data / folder).mkdir()
        (data / f"instances_{split}.json").rename(data / folder / "_annotations.coco.json")
        for path in [*(data / "images").glob(f"{split}_*")]:
            path.rename(data / folder / path.name)
    assert {split: len(images) for split, images in open_coco(str(data)).splits.items()} == {"train": 8, "val": 4}
    assert len(open_coco(str(data / "train" / "_annotations.coco.json"), "given").splits["train"]) == 8


def test_categories_can_be_merged(data: Path) -> None:
    for split in ("train", "val"):
        edit(data, split, lambda content: [c.update(supercategory="shape") for c in content["categories"]])
        edit(
            data,
            split,
            lambda content: content["categories"].append({"id": 20, "name": "cat", "supercategory": "animal"}),
        )
    own, grouped, one = (open_coco(str(data), categories=how) for how in ("own", "super", "one"))
    assert grouped.classes == ("animal", "shape") and grouped.category_ids == (1, 2)
    assert one.classes == ("object",) and one.category_ids == (1,)
    for found, number in ((grouped, 2), (one, 1)):
        for split, images in own.splits.items():
            for before, after in zip(images, found.splits[split], strict=True):
                boxes = [[entry["bbox"] for entry in image.objects] for image in (before, after)]
                assert boxes[0] == boxes[1]
                assert {entry["category_id"] for entry in after.objects} <= {number}


@pytest.mark.parametrize("box", [[5, 5, 0, 9], [5, 5, 9, -3], [100, 100, 20, 20], [5, -30, 20, 20], []])
def test_objects_without_a_box_inside_are_left_out(data: Path, box: list[int]) -> None:
    def spoil(content: dict[str, Any]) -> None:
        for entry in content["annotations"][2:4]:
            entry.update(bbox=box, segmentation=[])

    edit(data, "train", spoil)
    found = open_coco(str(data))
    assert sum(len(image.objects) for image in found.splits["train"]) == 14
    assert any("instances_train.json: 2 objects left out" in note and "first: 3" in note for note in found.notes)


@pytest.mark.parametrize("area", [None, 0, -1])
def test_a_missing_area_is_computed(data: Path, area: int | None) -> None:
    """From the mask, or from the box of an object without one."""
    edit(data, "train", lambda content: [entry.update(area=area) for entry in content["annotations"]])
    edit(data, "train", lambda content: content["annotations"][0].update(area=7.5))
    first, *others = open_coco(str(data)).splits["train"]
    assert first.objects[0]["area"] == 7.5
    for image in others:
        areas = masks_of(image.objects, image.height, image.width).sum((1, 2)).tolist()
        assert [entry["area"] for entry in image.objects] == areas
    edit(data, "train", lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    entry = open_coco(str(data)).splits["train"][1].objects[0]
    assert entry["area"] == entry["bbox"][2] * entry["bbox"][3]


MISTAKES: dict[str, tuple[Any, str]] = {
    "missing image": (lambda c: c["images"][2].update(file_name="nowhere.png"), r"nowhere\.png"),
    "wrong size": (lambda c: c["images"][0].update(width=640), "640×64"),
    "unknown category": (lambda c: c["annotations"][3].update(category_id=4), "category 4"),
    "unknown image": (lambda c: c["annotations"][3].update(image_id=4), "image 4"),
    "mask size": (lambda c: c["annotations"][1]["segmentation"].update(size=[9, 9]), "9×9"),
    "short box": (lambda c: c["annotations"][1].update(bbox=[1, 2]), "bbox"),
    "box of text": (lambda c: c["annotations"][1].update(bbox=["a"] * 4), r"annotations\.1\.bbox"),
    "polygon of text": (lambda c: c["annotations"][0].update(segmentation=["5 5"]), r"annotations\.0\.segmentation"),
    "damaged run lengths": (lambda c: c["annotations"][1]["segmentation"].update(counts=[5]), "damaged mask"),
    "text as id": (lambda c: c["annotations"][0].update(category_id="3"), r"annotations\.0\.category_id"),
    "null in a path": (lambda c: c["images"][0].update(file_name="a\0b"), r"images\.0\.file_name"),
    "entry is a number": (lambda c: c["images"].append(3), r"images\.8"),
    "same image id": (lambda c: c["images"][1].update(id=5), "id 5"),
    "same category id": (lambda c: c["categories"].append({"id": 3, "name": "ring"}), "id 3"),
    "category without name": (lambda c: c["categories"][0].pop("name"), r"categories\.0\.name"),
    "same category name": (lambda c: c["categories"].append({"id": 20, "name": "square"}), "name 'square'"),
    "no categories": (lambda c: c.update(categories=[]), "categories"),
    "no images": (lambda c: c.update(images=[]), "images"),
    "no annotations": (lambda c: c.pop("annotations"), "annotations"),
    "another category in val": (lambda c: c["categories"].pop(), "category 17"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(data: Path, mistake: str) -> None:
    change, message = MISTAKES[mistake]
    edit(data, "train", change)
    with pytest.raises(UserError, match=message) as error:
        open_coco(str(data))
    assert "\n" not in str(error.value) and "instances_train.json" in str(error.value)


def test_folders_without_coco_files(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UserError, match="COCO files"):
        open_coco(str(tmp_path))
    with pytest.raises(UserError, match="nowhere"):
        open_coco(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--categories own or one"):
        open_coco(str(data), categories="super")
    (tmp_path / "instances_train.json").write_text("{")
    with pytest.raises(UserError, match="JSON"):
        open_coco(str(tmp_path))


# -- objects without masks

NO_MASK: dict[str, Any] = {
    "nothing": [],
    "null": None,
    "an empty part": [[]],
    "two corners": [[5.0, 5.0, 20.0, 20.0]],
    "an odd number": [[5.0] * 7],
    "far away": [[1e9, 5.0, 9.0, 9.0, 5.0, 9.0]],
}


def strip(count: int, kind: str = "nothing") -> Any:
    """Take the masks of the first objects of a file, as tools write boxes among polygons."""
    return lambda content: [entry.update(segmentation=NO_MASK[kind]) for entry in content["annotations"][:count]]


@pytest.mark.parametrize("kind", NO_MASK)
def test_objects_without_a_usable_mask_have_a_box(data: Path, kind: str) -> None:
    full = open_coco(str(data))
    edit(data, "train", strip(5, kind))
    stripped = open_coco(str(data))
    assert stripped.masks() == (11, 16)
    pairs = zip(stripped.splits["train"], full.splits["train"], strict=True)
    objects = [pair for image, other in pairs for pair in zip(image.objects, other.objects, strict=True)]
    for index, (entry, other) in enumerate(objects):
        assert {**entry, "segmentation": 0} == {**other, "segmentation": 0}
        assert entry.get("segmentation") == (None if index < 5 else other["segmentation"])
