"""Folders with boxes or masks are recognized, and the command that trains on them is proposed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.cli.advise import advise
from frugalvit.config.tools import AdviseConfig
from frugalvit.tasks.dense.annotation_kind import find_annotation_kind
from helpers.dense_samples import as_official_coco, as_voc, make_coco, make_scenes

MAKERS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "one folder": (lambda root: make_coco(root, train=3, val=2), "detect", "boxes of 10 objects in 2 categories"),
    "COCO": (lambda root: as_official_coco(make_coco(root, train=3, val=2)), "detect", "boxes of 10 objects"),
    "masks": (lambda root: make_scenes(root, train=3, val=2), "segment", "masks of 5 images"),
    "VOC": (lambda root: as_voc(make_scenes(root, train=3, val=2)), "segment", "masks of 5 images"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_boxes_and_masks_are_recognized(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, verb, text = MAKERS[name]
    data = make(tmp_path / "data")
    result = advise(AdviseConfig(data=str(data), trial=0, device="cpu"))
    commands = [proposal["command"] for proposal in result.data["proposals"]]
    learn = f"frugalvit {verb} train {data}"
    assert commands[0] == learn and commands[-1] == f"{learn} --init RUN"
    assert result.data["splits"] == {"train": 3, "val": 2} and result.data["images"] == 5
    assert text in result.tables[0].title
    assert cli.main(["train", str(data), "--steps", "1", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert f"'{learn}'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_class_folders_are_not_annotations(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", train=2, val=1)
    assert find_annotation_kind(data, ("cat", "dog")) is None and find_annotation_kind(data) is not None
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "about.json").write_text("{}")
    assert find_annotation_kind(plain) is None
