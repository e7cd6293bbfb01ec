"""COCO files: odd entries are handled, and every mistake is a one-line error."""

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


def test_classes_are_in_the_order_of_ids(data: Path) -> None:
    found = open_coco(str(data))
    assert found.classes == ("square", "disc")
    assert found.category_ids == (3, 17)
    assert found.class_of() == {3: 1, 17: 2}
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 8, "val": 4}
    assert found.has_masks()


def test_a_byte_order_mark_is_skipped(data: Path) -> None:
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


def test_boxes_over_the_border_are_clipped(data: Path) -> None:
    edit(data, "train", lambda content: content["annotations"][0].update(bbox=[-5, 50, 20, 30]))
    assert open_coco(str(data)).splits["train"][0].objects[0]["bbox"] == [0, 50, 15, 14]


def test_crowds_are_scored_but_not_trained_on(data: Path) -> None:
    edit(data, "train", lambda content: content["annotations"][0].update(iscrowd=1))
    image = open_coco(str(data)).splits["train"][0]
    assert len(image.objects) == 2 and len(image.learnable()) == 1


def test_images_without_objects_are_used(data: Path) -> None:
    edit(data, "train", lambda content: content.update(annotations=content["annotations"][4:]))
    found = open_coco(str(data))
    assert [len(image.objects) for image in found.splits["train"]] == [0, 0, 2, 2, 2, 2, 2, 2]


def test_a_missing_val_is_made(data: Path) -> None:
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
def test_splits_have_the_usual_names(data: Path, word: str) -> None:
    (data / "instances_val.json").rename(data / "other.json")
    (data / "instances_train.json").rename(data / f"instances_{word}.json")
    assert find_annotations(data) == {SPLIT_NAMES[word]: data / f"instances_{word}.json"}
    for name in ("instances_a_validation.json", "instances_val.json"):
        (data / name).write_bytes((data / "other.json").read_bytes())
    if SPLIT_NAMES[word] != "val":
        assert find_annotations(data)["val"].name == "instances_val.json", "the earlier name wins"


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


def renumber(content: dict[str, Any]) -> None:
    """Swap the ids of the two categories."""
    other = {3: 17, 17: 3}
    for entry in content["categories"]:
        entry["id"] = other[entry["id"]]
    for entry in content["annotations"]:
        entry["category_id"] = other[entry["category_id"]]


@pytest.mark.parametrize("categories", ["own", "super"])
def test_other_category_ids_are_matched_by_name(data: Path, categories: str) -> None:
    for split in ("train", "val"):
        edit(data, split, lambda c: [entry.update(supercategory=entry["name"] + "s") for entry in c["categories"]])
    same = open_coco(str(data), categories=categories)
    edit(data, "val", renumber)
    found = open_coco(str(data), categories=categories)
    assert found.classes == same.classes and found.category_ids == same.category_ids
    for before, after in zip(same.splits["val"], found.splits["val"], strict=True):
        assert before.objects == after.objects
    assert any("instances_val.json" in note and "matched by name" in note for note in found.notes)
    assert same.notes == []


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "tiff", "webp"])
def test_header_size_equals_decoded_size(tmp_path: Path, ending: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{ending}"
    Image.new("RGB", (20, 12), (90, 120, 30)).save(path, exif=exif)
    assert read_image_size(path) == decode(path).shape[:2]


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
    "box of text": (lambda c: c["annotations"][1].update(bbox=["a"] * 4), r"annotations\[1\]\.bbox"),
    "polygon of text": (lambda c: c["annotations"][0].update(segmentation=["5 5"]), r"annotations\[0\]\.segmentation"),
    "damaged run lengths": (lambda c: c["annotations"][1]["segmentation"].update(counts=[5]), "damaged mask"),
    "text as id": (lambda c: c["annotations"][0].update(category_id="3"), r"annotations\[0\]\.category_id"),
    "null in a path": (lambda c: c["images"][0].update(file_name="a\0b"), r"images\[0\]\.file_name"),
    "entry is a number": (lambda c: c["images"].append(3), r"images\[8\]"),
    "same image id": (lambda c: c["images"][1].update(id=5), "id 5"),
    "same category id": (lambda c: c["categories"].append({"id": 3, "name": "ring"}), "'square' and 'ring'"),
    "category without name": (lambda c: c["categories"][0].pop("name"), r"categories\[0\]\.name"),
    "no categories": (lambda c: c.update(categories=[]), "no categories"),
    "no images": (lambda c: c.update(images=[]), "no images"),
    "no annotations": (lambda c: c.pop("annotations"), "'annotations'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(data: Path, mistake: str) -> None:
    change, message = MISTAKES[mistake]
    edit(data, "train", change)
    with pytest.raises(UserError, match=message) as error:
        open_coco(str(data))
    assert "\n" not in str(error.value) and "instances_train.json" in str(error.value)


def test_folders_without_coco_files(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UserError, match="COCO annotations"):
        open_coco(str(tmp_path))
    with pytest.raises(UserError, match="nowhere"):
        open_coco(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--categories own or one"):
        open_coco(str(data), categories="super")
    (tmp_path / "instances_train.json").write_text("{")
    with pytest.raises(UserError, match="JSON"):
        open_coco(str(tmp_path))


def test_categories_that_train_lacks(data: Path) -> None:
    """An error only if an object has one; also if a name does not identify the category."""
    edit(data, "val", lambda content: content["categories"].append({"id": 4, "name": "ring"}))
    assert open_coco(str(data)).classes == ("square", "disc")
    edit(data, "val", lambda content: content["annotations"][0].update(category_id=4))
    with pytest.raises(UserError, match=r"category 4 'ring', which instances_train.json does not have"):
        open_coco(str(data))
    edit(data, "val", lambda content: content["annotations"][0].update(category_id=3))
    edit(data, "val", lambda content: content["categories"].pop())
    edit(data, "train", lambda content: content["categories"].append({"id": 20, "name": "square"}))
    assert open_coco(str(data)).category_ids == (3, 17, 20)
    edit(data, "val", renumber)
    with pytest.raises(UserError, match=r"'square', which instances_train.json has several times"):
        open_coco(str(data))


# -- objects without masks

NO_MASK: dict[str, Any] = {
    "nothing": [],
    "null": None,
    "an empty part": [[]],
    "two corners": [[5.0, 5.0, 20.0, 20.0]],
    "an odd number": [[5.0] * 7],
    "far away": [[1e9, 5.0, 9.0, 9.0, 5.0, 9.0]],
    "outside": [[-30.0, -30, -20, -30, -20, -20, -30, -20]],
    "a point": [[5.0, 5, 5, 5, 5, 5]],
    "empty run lengths": {"size": [64, 64], "counts": [64 * 64]},
}


def strip(count: int, kind: str = "nothing") -> Any:
    """Take the masks of the first objects of a file, as tools write boxes among polygons."""
    return lambda content: [entry.update(segmentation=NO_MASK[kind]) for entry in content["annotations"][:count]]


@pytest.mark.parametrize("kind", NO_MASK)
def test_objects_without_a_usable_mask_have_a_box(data: Path, kind: str) -> None:
    full = open_coco(str(data))
    edit(data, "train", strip(5, kind))
    found = open_coco(str(data))
    assert found.masks() == (11, 16) and found.has_masks()
    assert found.about_masks() == "11 of 16 training objects have one"
    (note,) = found.notes
    assert note.startswith("instances_train.json: 5 of 16 objects") and open_coco(str(data), masks=False).notes == []
    pairs = zip(found.splits["train"], full.splits["train"], strict=True)
    objects = [pair for image, other in pairs for pair in zip(image.objects, other.objects, strict=True)]
    for index, (entry, other) in enumerate(objects):
        assert {**entry, "segmentation": 0} == {**other, "segmentation": 0}
        assert entry.get("segmentation") == (None if index < 5 else other["segmentation"])


def test_parts_that_are_not_polygons_are_dropped(data: Path) -> None:
    full = open_coco(str(data))
    edit(data, "train", lambda content: content["annotations"][0]["segmentation"].insert(0, [5.0, 5.0, 9.0, 9.0]))
    assert open_coco(str(data)).splits == full.splits


@pytest.mark.parametrize(
    ("objects", "masked", "learned"),
    [(16, 16, True), (16, 8, True), (16, 7, False), (40, 10, True), (40, 9, False), (2, 1, True), (16, 0, False)],
)
def test_ten_masks_or_half_of_them_are_enough(tmp_path: Path, objects: int, masked: int, learned: bool) -> None:
    data = make_coco(tmp_path / "many", train=objects // 2, val=1, side=40)
    edit(data, "train", strip(objects - masked))
    found = open_coco(str(data))
    assert (found.masks(), found.has_masks()) == ((masked, objects), learned)
    assert ("--masks true" in found.about_masks()) == (not learned and masked > 0)


@pytest.mark.parametrize("kind", NO_MASK)
def test_boxes_alone_are_a_dataset(data: Path, kind: str) -> None:
    for split in ("train", "val"):
        edit(data, split, strip(16, kind))
    found = open_coco(str(data))
    assert found.masks() == (0, 16) and not found.has_masks() and found.notes == []


def test_masks_in_one_split_only(data: Path) -> None:
    edit(data, "val", strip(8))
    found = open_coco(str(data))
    assert found.has_masks() and any("instances_val.json: 8 of 8 objects" in note for note in found.notes)
    edit(data, "train", strip(16))
    assert not open_coco(str(data)).has_masks()


@pytest.mark.parametrize("categories", ["own", "one"])
def test_classes_without_any_mask(data: Path, categories: str) -> None:
    assert open_coco(str(data)).maskless() == ()

    def strip_discs(content: dict[str, Any]) -> None:
        for entry in content["annotations"]:
            if entry["category_id"] == 17:
                del entry["segmentation"]

    edit(data, "train", strip_discs)
    assert open_coco(str(data), categories=categories).maskless() == ((2,) if categories == "own" else ())
