"""``detect train`` on data in which an object has no mask."""

from pathlib import Path

import pytest

from frugalvit.config.dense import DetectConfig
from frugalvit.errors import UserError
from frugalvit.tasks.detection.commands import open_annotations
from helpers.dense_samples import edit, make_coco


def test_masks_are_learned_only_if_all_objects_have_one(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "shapes", train=4, val=1, side=40)
    config = DetectConfig.parse({"data": str(root), "masks": True})
    masked, count = open_annotations(config).masks()
    assert masked == count
    edit(root, "train", lambda content: content["annotations"][0].pop("segmentation"))
    with pytest.raises(UserError, match=rf"{count - 1} of {count} .*--masks"):
        open_annotations(config)
    assert open_annotations(DetectConfig.parse({"data": str(root)})).masks() == (count - 1, count)
