"""Whoever has boxes or masks is told which command learns them, and not that there are no labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from frugalvit import cli
from frugalvit.advise import advise
from frugalvit.config.product import AdviseConfig
from frugalvit.transfer.found import drawn_in

from .samples import make_coco, make_scenes


def official(root: Path) -> Path:
    """COCO as it is published: train2017/, val2017/, annotations/."""
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
def test_boxes_and_masks_are_labels(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, verb, own = MAKERS[kind]
    data = make(tmp_path / "data")
    result = advise(AdviseConfig(data=str(data), trial=0, device="cpu"))
    commands = [proposal["command"] for proposal in result.data["proposals"]]
    learn = f"frugalvit {verb} train {data}"
    assert commands[0] == learn and commands[-1] == f"{learn} --init RUN"
    pretrain = f"frugalvit pretrain {data / own if own else 'MORE_IMAGES/'}"
    assert pretrain in commands, "never from images that are scored on"
    assert result.data["splits"] == {"train": 3, "val": 2} and result.data["images"] == 5
    title = result.tables[0].title
    assert "no labels" not in title and ("boxes and masks of 10 objects" in title or "masks of 5 images" in title)
    assert cli.main(["train", str(data), "--steps", "1", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"'{learn}'" in said and "--init RUN" in said and "has no labels" not in said
    assert not (tmp_path / "run").exists()


def test_other_folders_are_left_to_their_classes(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", train=2, val=1)
    assert drawn_in(data, ("cat", "dog")) is None and drawn_in(data) is not None
    assert drawn_in(tmp_path / "nowhere") is None
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "about.json").write_text("{}")
    assert drawn_in(plain) is None
