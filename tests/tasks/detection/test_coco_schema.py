"""What is wrong in a single annotation is mended where that is plain, and said where something is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frugalvit.tasks.detection.coco import masks_of, open_coco
from helpers.dense_samples import edit, make_coco


@pytest.mark.parametrize("said", [-1, -0.5, 0])
def test_an_area_that_is_none_is_the_masks(tmp_path: Path, said: float) -> None:
    data = make_coco(tmp_path / "shapes", train=2, val=1)
    edit(data, "train", lambda content: [entry.update(area=said) for entry in content["annotations"]])
    for image in open_coco(str(data)).splits["train"]:
        areas = masks_of(image.objects, image.height, image.width).sum((1, 2)).tolist()
        assert [entry["area"] for entry in image.objects] == areas and min(areas) > 0


@pytest.mark.parametrize("part", [[], [5.0, 5.0, 9.0, 9.0], [5.0] * 7, [1e9, 5.0, 9.0, 9.0, 5.0, 9.0], "5 5"])
@pytest.mark.parametrize("count", [1, 2])
def test_parts_of_a_mask_that_are_no_polygon_are_said(tmp_path: Path, part: Any, count: int) -> None:
    data = make_coco(tmp_path / "shapes", train=4, val=1)
    whole = open_coco(str(data))

    def spoil(content: dict[str, Any]) -> None:
        polygons = [entry for entry in content["annotations"] if isinstance(entry["segmentation"], list)]
        for entry in polygons[:count]:
            entry["segmentation"].insert(0, part)

    edit(data, "train", spoil)
    found = open_coco(str(data))
    which = "1 object" if count == 1 else "2 objects"
    first = "annotation 1" if count == 1 else "annotation 1 is the first"
    assert found.notes == [
        f"instances_train.json: {which} without those parts of the mask that are no polygon ({first})"
    ]
    assert found.splits == whole.splits, "the rest of the mask is kept"
    assert open_coco(str(data), masks=False).notes == [], "nobody will look at them"
