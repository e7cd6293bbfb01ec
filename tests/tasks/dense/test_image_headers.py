"""Image sizes, unreadable files and splits."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError
from frugalvit.tasks.dense.image_headers import make_splits
from frugalvit.tasks.detection.coco import CocoData, open_coco
from frugalvit.tasks.segmentation.dataset import Scene, SceneData, open_scenes
from helpers.dense_samples import make_coco, make_scenes

KINDS = ["coco", "scenes"]


def made(kind: str, root: Path, **more: Any) -> tuple[Path, Path]:
    """Make a dataset; return it and the path of its second training image."""
    if kind == "coco":
        return make_coco(root, **more), root / "images" / "train_1.png"
    return make_scenes(root, **more), root / "images" / "train" / "1.png"


def opened(kind: str, data: Path, **more: Any) -> CocoData | SceneData:
    return open_coco(str(data), **more) if kind == "coco" else open_scenes(str(data), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_unreadable_images_are_left_out_or_too_many(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = made(kind, tmp_path / "data", side=40)
    path.write_bytes(b"<html>no image</html>")
    with pytest.raises(UserError, match=r"1 of 8 images .*--cache.max-bad") as one:
        opened(kind, data)
    assert str(one.value).count(str(path)) == 1 and "\n" not in str(one.value)
    capsys.readouterr()
    found = opened(kind, data, max_bad=0.2)
    assert len(found.splits["train"]) == 7 and path not in [item.path for item in found.splits["train"]]
    assert capsys.readouterr().err.count(str(path)) == 1
    other = path.with_name(path.name.replace("1", "4"))
    other.write_bytes(b"")
    with pytest.raises(UserError, match="2 of 8 images"):
        opened(kind, data, max_bad=0.2)
    for image in path.parent.glob("*train*" if kind == "coco" else "*"):
        image.write_bytes(b"")
    with pytest.raises(UserError, match="None of the 8 images"):
        opened(kind, data, max_bad=1.0)


def test_an_unreadable_mask_is_named_once(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data")
    path = data / "masks" / "train" / "1.png"
    path.write_bytes(b"no mask")
    with pytest.raises(UserError, match=r"1\.png is not a readable mask") as error:
        open_scenes(str(data), max_bad=1.0)
    assert str(error.value).count(str(path)) == 1


def test_splits_follow_the_hash_of_the_names() -> None:
    items = [Scene(Path(f"{folder}/{i}.png"), Path("mask.png"), 8, 8) for folder in "ab" for i in range(20)]
    held = hold_out([item.path.name for item in items], None, 0.2, 0)
    found = make_splits({"train": items}, "auto", 0.2, [])
    assert found["val"] == [item for item, out in zip(items, held, strict=True) if out] and len(found["train"]) == 32
