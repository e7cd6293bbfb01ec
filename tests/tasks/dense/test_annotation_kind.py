"""Folders with boxes or masks are recognized, and the command that trains on them is proposed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.cli.advise import advise
from frugalvit.config.tools import AdviseConfig
from frugalvit.tasks.dense.annotation_kind import find_annotation_kind
from frugalvit.tasks.detection.coco import open_coco
from helpers.dense_samples import edit, make_coco, make_scenes


def official(root: Path) -> Path:
    """COCO's own layout: train2017/, val2017/, annotations/."""
    make_coco(root, train=3, val=2)
    (root / "annotations").mkdir()
    for split in ("train", "val"):
        (root / f"{split}2017").mkdir()
        for path in [*(root / "images").glob(f"{split}_*")]:
            path.rename(root / f"{split}2017" / path.name)
        (root / f"instances_{split}.json").rename(root / "annotations" / f"instances_{split}2017.json")
    (root / "images").rmdir()
    return root


def voc(root: Path) -> Path:
    made = make_scenes(root.parent / "made", train=3, val=2)
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True)
    for split in ("train", "val"):
        names = sorted(path.stem for path in (made / "images" / split).iterdir())
        for name in names:
            with Image.open(made / "images" / split / f"{name}.png") as picture:
                picture.save(root / "JPEGImages" / f"{split}{name}.jpg")
            (made / "masks" / split / f"{name}.png").rename(root / "SegmentationClass" / f"{split}{name}.png")
        (root / "ImageSets/Segmentation" / f"{split}.txt").write_text("\n".join(f"{split}{name}" for name in names))
    return root


MAKERS: dict[str, tuple[Callable[[Path], Path], str, str | None]] = {
    "one folder": (lambda root: make_coco(root, train=3, val=2), "detect", None),
    "official COCO": (official, "detect", "train2017"),
    "masks": (lambda root: make_scenes(root, train=3, val=2), "segment", "images/train"),
    "VOC": (voc, "segment", None),
}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_boxes_and_masks_are_recognized(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, verb, own = MAKERS[kind]
    data = make(tmp_path / "data")
    result = advise(AdviseConfig(data=str(data), trial=0, device="cpu"))
    commands = [proposal["command"] for proposal in result.data["proposals"]]
    learn = f"frugalvit {verb} train {data}"
    assert commands[0] == learn and commands[-1] == f"{learn} --init RUN"
    pretrain = f"frugalvit pretrain {data / own if own else 'MORE_IMAGES/'}"
    assert pretrain in commands, "never pre-train on validation images"
    assert result.data["splits"] == {"train": 3, "val": 2} and result.data["images"] == 5
    title = result.tables[0].title
    assert "no labels" not in title and ("boxes and masks of 10 objects" in title or "masks of 5 images" in title)
    assert cli.main(["train", str(data), "--steps", "1", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert f"'{learn}'" in message and "--init RUN" in message
    assert not (tmp_path / "run").exists()


def test_class_folders_are_not_annotations(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", train=2, val=1)
    assert find_annotation_kind(data, ("cat", "dog")) is None and find_annotation_kind(data) is not None
    assert find_annotation_kind(tmp_path / "nowhere") is None
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "about.json").write_text("{}")
    assert find_annotation_kind(plain) is None


@pytest.mark.parametrize(
    ("masked", "title", "note"),
    [
        (20, "boxes and masks of 24 objects in 2 categories", "Masks: every training object has one."),
        (
            12,
            "boxes of 24 objects in 2 categories, masks of 16 of them",
            "Masks: 12 of 20 training objects have one: masks are learned from these, boxes from all.",
        ),
        (
            1,
            "boxes of 24 objects in 2 categories, masks of 5 of them",
            "Masks: 1 of 20 training objects has one: too few to learn from; --masks true overrides this.",
        ),
        (
            0,
            "boxes of 24 objects in 2 categories, masks of 4 of them",
            "Masks: no training object has one.",
        ),
    ],
)
def test_the_number_of_masks_is_noted(masked: int, title: str, note: str, tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", train=10, val=2, side=48)

    def without(content: Any) -> None:
        for entry in content["annotations"][masked:]:
            entry["segmentation"] = [[]]
        assert len(content["annotations"]) == 20

    edit(data, "train", without)
    result = advise(AdviseConfig(data=str(data), trial=0, device="cpu"))
    assert f"{title}, about 48 px" in result.tables[0].title
    assert [line for line in result.data["notes"] if "ask" in line] == [note]
    learned = open_coco(str(data))
    assert learned.masks() == (masked, 20) and learned.about_masks() in note
    if masked == 12:
        edit(data, "train", lambda content: content["annotations"][0].update(iscrowd=1))
        found = find_annotation_kind(data)
        assert found is not None and found.masks.startswith("Masks: 11 of 19 training objects")


def test_segmentation_masks_have_no_note(tmp_path: Path) -> None:
    found = find_annotation_kind(make_scenes(tmp_path / "data", train=2, val=1))
    assert found is not None and found.masks == ""
