"""Image sizes, unreadable files and splits."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from frugalvit.data.decode import decode
from frugalvit.data.formats.annotated_images import make_splits, read_image_size
from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError
from frugalvit.tasks.segmentation.dataset import Scene, open_scenes
from helpers.dense_samples import make_scenes


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "tiff", "webp"])
def test_header_size_equals_decoded_size(tmp_path: Path, ending: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{ending}"
    Image.new("RGB", (20, 12), (90, 120, 30)).save(path, exif=exif)
    assert read_image_size(path) == decode(path).shape[:2]


def test_an_unreadable_mask_is_named_once(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data")
    path = data / "masks" / "train" / "1.png"
    path.write_bytes(b"no mask")
    with pytest.raises(UserError, match=r"1\.png is not a readable mask"):
        open_scenes(str(data), max_bad=1.0)


def test_splits_follow_the_hash_of_the_names() -> None:
    items = [Scene(Path(f"{folder}/{i}.png"), Path("mask.png"), 8, 8) for folder in "ab" for i in range(20)]
    held_out = hold_out([item.path.name for item in items], None, 0.2, 0)
    splits = make_splits({"train": items}, "auto", 0.2, [])
    assert splits["val"] == [item for item, out in zip(items, held_out, strict=True) if out]
    assert len(splits["train"]) == 32


def test_a_file_listed_twice_is_on_one_side(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number % 6}.png" for number in range(12)]  # every file twice
    for path in paths[:6]:
        Image.new("L", (4, 4), int(path.stem)).save(path)
    notes: list[str] = []
    splits = make_splits({"train": [SimpleNamespace(path=path) for path in paths]}, "auto", 0.5, notes)
    sides = [{item.path for item in splits[split]} for split in ("train", "val")]
    assert [len(side) for side in sides] == [3, 3] and not sides[0] & sides[1]
    assert "6 exact copies" in notes[0]
