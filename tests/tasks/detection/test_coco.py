"""COCO files as they come: every oddity met, every mistake one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.data.decode import decode
from frugalvit.data.formats.folder import SPLIT_NAMES
from frugalvit.errors import UserError
from frugalvit.tasks.dense.image_headers import read_image_size
from frugalvit.tasks.detection.coco import find_annotations, masks_of, open_coco
from helpers.dense_samples import annotation, draw, edit, make_coco


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_coco(tmp_path / "shapes")


def test_classes_follow_the_order_of_ids_with_holes(data: Path) -> None:
    found = open_coco(str(data))
    assert found.classes == ("square", "disc")
    assert found.category_ids == (3, 17)
    assert found.class_of() == {3: 1, 17: 2}
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 8, "val": 4}
    assert found.has_masks()


def test_a_byte_order_mark_is_read_over(data: Path) -> None:
    """Editors on Windows begin files with one."""
    path = data / "instances_train.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(open_coco(str(data)).splits["train"]) == 8


def test_polygons_and_run_lengths_give_the_same_mask() -> None:
    _, shapes = draw(np.random.default_rng(0), 64)
    kind, inside = shapes[0]
    entries = [annotation(1, 1, kind, inside, polygons) for polygons in (True, False)]
    polygon, lengths = masks_of(entries, 64, 64)
    assert np.array_equal(lengths.astype(bool), inside)
    assert (polygon != lengths).mean() < 0.01
    assert masks_of([], 5, 7).shape == (0, 5, 7)


def test_compressed_run_lengths_are_read() -> None:
    from faster_coco_eval.core import mask

    _, shapes = draw(np.random.default_rng(1), 32)
    inside = shapes[1][1]
    encoded = mask.encode(np.asfortranarray(inside.astype(np.uint8)))
    assert np.array_equal(masks_of([{"segmentation": encoded}], 32, 32)[0].astype(bool), inside)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ([5, 5, 0, 9], "with a box without area"),
        ([5, 5, 9, -3], "with a box of negative width or height"),
        ([100, 100, 20, 20], "with a box outside the image"),
        ([5, -30, 20, 20], "with a box outside the image"),
    ],
)
def test_boxes_that_hold_nothing_are_left_out_with_their_reason(
    data: Path, box: list[int], reason: str, count: int
) -> None:
    edit(data, "train", lambda content: [entry.update(bbox=box) for entry in content["annotations"][2 : 2 + count]])
    found = open_coco(str(data))
    assert sum(len(image.objects) for image in found.splits["train"]) == 16 - count
    words = ("1 object", "annotation 3") if count == 1 else ("2 objects", "annotation 3 is the first")
    assert f"instances_train.json: {words[0]} {reason} left out ({words[1]})" in found.notes


def test_boxes_over_the_border_are_clipped(data: Path) -> None:
    edit(data, "train", lambda content: content["annotations"][0].update(bbox=[-5, 50, 20, 30]))
    assert open_coco(str(data)).splits["train"][0].objects[0]["bbox"] == [0, 50, 15, 14]


def test_crowds_are_scored_but_not_learnt(data: Path) -> None:
    edit(data, "train", lambda content: content["annotations"][0].update(iscrowd=1))
    image = open_coco(str(data)).splits["train"][0]
    assert len(image.objects) == 2 and len(image.learnable()) == 1


def test_images_without_objects_stay(data: Path) -> None:
    edit(data, "train", lambda content: content.update(annotations=content["annotations"][4:]))
    found = open_coco(str(data))
    assert [len(image.objects) for image in found.splits["train"]] == [0, 0, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("said", [None, 0])
def test_an_area_that_is_not_said_is_the_masks(data: Path, said: int | None, masks: bool) -> None:
    """Polygons and run lengths; of an object without a mask it is the box's, and a number that is said stays."""

    def change(content: dict[str, Any]) -> None:
        for entry in content["annotations"]:
            entry["area"] = said
        content["annotations"][0]["area"] = 7.5

    edit(data, "train", change)
    image, *others = open_coco(str(data), masks=masks).splits["train"]
    assert image.objects[0]["area"] == 7.5
    objects = [(entry, found) for found in others for entry in found.objects]
    for entry, found in objects:
        assert entry["area"] == masks_of([entry], found.height, found.width).sum()
    discs = [entry for entry, _ in objects if entry["category_id"] == 17]
    assert all(entry["area"] < 0.9 * entry["bbox"][2] * entry["bbox"][3] for entry in discs)
    edit(data, "train", lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    entry = open_coco(str(data)).splits["train"][1].objects[0]
    assert entry["area"] == entry["bbox"][2] * entry["bbox"][3]


def test_a_missing_val_is_made_and_said(data: Path) -> None:
    (data / "instances_val.json").unlink()
    found = open_coco(str(data), "auto", 0.25)
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 6, "val": 2}
    assert any("val is made from train" in note for note in found.notes)
    again = open_coco(str(data), "auto", 0.25)
    assert [i.path for i in again.splits["val"]] == [i.path for i in found.splits["val"]]
    assert list(open_coco(str(data), "given").splits) == ["train"]


def test_train_and_val_can_be_joined(data: Path) -> None:
    found = open_coco(str(data), "train+val")
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 12}


def test_layouts_are_found(tmp_path: Path) -> None:
    official = make_coco(tmp_path / "coco")
    (official / "annotations").mkdir()
    for split in ("train", "val"):
        (official / f"instances_{split}.json").rename(official / "annotations" / f"instances_{split}2017.json")
        (official / f"{split}2017").mkdir()
        for path in (official / "images").glob(f"{split}_*.png"):
            path.rename(official / f"{split}2017" / path.name)
    (official / "annotations" / "captions_train2017.json").write_text("{}")
    assert {split: len(images) for split, images in open_coco(str(official)).splits.items()} == {"train": 8, "val": 4}
    assert find_annotations(official)["train"].name == "instances_train2017.json"
    one = official / "annotations" / "instances_train2017.json"
    for path in (official / "train2017").iterdir():
        path.rename(one.parent / path.name)
    assert len(open_coco(str(one), "given").splits["train"]) == 8


@pytest.mark.parametrize("word", SPLIT_NAMES)
def test_splits_are_called_as_those_of_classifiers(data: Path, word: str) -> None:
    (data / "instances_val.json").rename(data / "other.json")
    (data / "instances_train.json").rename(data / f"instances_{word}.json")
    assert find_annotations(data) == {SPLIT_NAMES[word]: data / f"instances_{word}.json"}


def test_of_two_files_of_a_split_the_plainer_name_is_read(data: Path) -> None:
    for name in ("instances_dev.json", "instances_a_validation.json"):
        (data / name).write_bytes((data / "instances_val.json").read_bytes())
    assert find_annotations(data)["val"].name == "instances_val.json"


MISTAKES = {
    "absent file": (
        lambda c: c["images"][2].update(file_name="nowhere.png"),
        "names images that are not there: nowhere",
    ),
    "other size": (lambda c: c["images"][0].update(width=640), "says that"),
    "category": (lambda c: c["annotations"][3].update(category_id=4), "category 4, which is none of the 2"),
    "image": (lambda c: c["annotations"][3].update(image_id=4), "image 4, not listed"),
    "mask size": (lambda c: c["annotations"][1]["segmentation"].update(size=[9, 9]), "is 9×9 px, its image"),
    "no box": (lambda c: c["annotations"][1].update(bbox=[1, 2]), "has no bbox"),
    "twice": (lambda c: c["images"][1].update(id=5), "two images with the id 5"),
    "one id twice": (
        lambda c: c["categories"].append({"id": 3, "name": "ring"}),
        "'square' and 'ring' both have the category id 3",
    ),
    "a category without a name": (lambda c: c["categories"][0].pop("name"), "needs a number 'id' and a 'name'"),
    "no categories": (lambda c: c.update(categories=[]), "names no categories"),
    "no images": (lambda c: c.update(images=[]), "names no images"),
    "not coco": (lambda c: c.pop("annotations"), "no list 'annotations'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(data: Path, mistake: str) -> None:
    change, words = MISTAKES[mistake]
    edit(data, "train", change)
    with pytest.raises(UserError, match=words) as error:
        open_coco(str(data))
    assert "\n" not in str(error.value)


def test_what_is_no_dataset_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no COCO annotations"):
        open_coco(str(tmp_path))
    with pytest.raises(UserError, match="no folder or JSON file"):
        open_coco(str(tmp_path / "nowhere"))
    (tmp_path / "instances_train.json").write_text("{")
    with pytest.raises(UserError, match="not a readable JSON"):
        open_coco(str(tmp_path))


def test_sizes_are_those_of_the_upright_picture(data: Path) -> None:
    picture = Image.open(data / "images" / "train_0.png").resize((64, 32))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(data / "images" / "turned.jpg", exif=exif)

    def rename(content: dict[str, Any]) -> None:
        content["images"][0].update(file_name="turned.jpg", width=32, height=64)
        content["annotations"] = content["annotations"][2:]

    edit(data, "train", rename)
    image = open_coco(str(data)).splits["train"][0]
    assert (image.height, image.width) == (64, 32)


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


def test_supercategories_must_be_there(data: Path) -> None:
    with pytest.raises(UserError, match="'square' has no supercategory; use --categories own or one"):
        open_coco(str(data), categories="super")


def renumber(content: dict[str, Any]) -> None:
    """The ids of the two categories the other way round, in categories and annotations."""
    other = {3: 17, 17: 3}
    for entry in content["categories"]:
        entry["id"] = other[entry["id"]]
    for entry in content["annotations"]:
        entry["category_id"] = other[entry["category_id"]]


@pytest.mark.parametrize("categories", ["own", "super"])
def test_files_that_number_their_categories_otherwise_are_read_by_name(data: Path, categories: str) -> None:
    for split in ("train", "val"):
        edit(data, split, lambda c: [entry.update(supercategory=entry["name"] + "s") for entry in c["categories"]])
    same = open_coco(str(data), categories=categories)
    edit(data, "val", renumber)
    found = open_coco(str(data), categories=categories)
    assert found.classes == same.classes and found.category_ids == same.category_ids
    for before, after in zip(same.splits["val"], found.splits["val"], strict=True):
        assert before.objects == after.objects
    assert any("instances_val.json numbers its categories otherwise than" in note for note in found.notes)
    assert not any("otherwise" in note for note in same.notes)


def test_a_category_that_only_val_has_is_a_mistake_where_it_is_used(data: Path) -> None:
    edit(data, "val", lambda content: content["categories"].append({"id": 4, "name": "ring"}))
    assert open_coco(str(data)).classes == ("square", "disc")
    edit(data, "val", lambda content: content["annotations"][0].update(category_id=4))
    with pytest.raises(UserError, match=r"objects of category 4 'ring', which instances_train.json does not have"):
        open_coco(str(data))


def test_a_name_that_several_categories_have_decides_nothing(data: Path) -> None:
    edit(data, "train", lambda content: content["categories"].append({"id": 20, "name": "square"}))
    assert open_coco(str(data)).category_ids == (3, 17, 20)
    edit(data, "val", renumber)
    with pytest.raises(UserError, match=r"'square', which instances_train.json calls several so"):
        open_coco(str(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "tiff", "webp"])
def test_upright_sizes_are_those_of_the_decoded_picture(tmp_path: Path, ending: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{ending}"
    Image.new("RGB", (20, 12), (90, 120, 30)).save(path, exif=exif)
    assert read_image_size(path) == decode(path).shape[:2]
