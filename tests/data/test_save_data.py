"""``save_data`` writes images from memory as a dataset."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

import frugalvit as fv

GREY = np.arange(6, dtype=np.uint8)[:, None, None] * np.full((1, 5, 7), 40, np.uint8)
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=3)


class Shuffled(list[Any]):
    """As a sorted pandas Series: its index does not follow its order."""

    def __getitem__(self, index: Any) -> Any:
        return list(self)[-1 - index]


class Random(Dataset[Any]):
    """Counts how often its images are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        self.reads += 1
        return Image.fromarray(COLOUR[index]), index % 2


@pytest.mark.parametrize(
    "images",
    [
        COLOUR,
        list(COLOUR),
        [Image.fromarray(image) for image in COLOUR],
        torch.from_numpy(COLOUR).permute(0, 3, 1, 2),
        torch.from_numpy(COLOUR).permute(0, 3, 1, 2) / 255,
    ],
    ids=["array", "list", "PIL", "uint8", "floats"],
)
def test_images_are_read_back(images: Any, tmp_path: Path) -> None:
    source = fv.open_data(fv.save_data(tmp_path / "out", (images, [0, 1] * 3)), split="given")
    train = source.splits["train"]
    assert source.classes == ("0", "1") and train.labels is not None and train.labels.tolist() == [0, 1] * 3
    for index, image in enumerate(COLOUR):
        np.testing.assert_array_equal(train.read(index), image)


def test_files_are_copied_unchanged(tmp_path: Path) -> None:
    Image.fromarray(COLOUR[1]).save(tmp_path / "one.jpg")
    content = (tmp_path / "one.jpg").read_bytes()
    source = fv.open_data(fv.save_data(tmp_path / "out", ([tmp_path / "one.jpg", content], None)), split="given")
    assert source.classes is None and [source.splits["train"].raw(number) for number in range(2)] == [content] * 2


def test_datasets_are_read_once(tmp_path: Path) -> None:
    made = Random()
    pairs = TensorDataset(torch.from_numpy(GREY)[:, None], torch.tensor([0, 1, 0, 1, 0, 1]))
    source = fv.open_data(fv.save_data(tmp_path / "out", made, test=pairs, classes=["hay", "straw"]), split="given")
    assert made.reads == 6 and list(source.splits) == ["train", "test"] and source.classes == ("hay", "straw")
    np.testing.assert_array_equal(source.splits["test"].read(3)[:, :, 0], GREY[3])


@pytest.mark.parametrize(
    ("labels", "classes", "names", "numbers"),
    [
        ([5, 12, 5], None, ("5", "12"), [0, 1, 0]),
        (["b", "a", "b"], None, ("a", "b"), [1, 0, 1]),
        (["b", "a", "b"], ["b", "c", "a"], ("b", "c", "a"), [0, 2, 0]),
        (torch.tensor([2, 0, 2]), ["x", "y", "z"], ("x", "y", "z"), [2, 0, 2]),
        ([0, 1, 0], [10, 11], ("10", "11"), [0, 1, 0]),
        (Shuffled([1, 0, 0]), None, ("0", "1"), [1, 0, 0]),
        (iter("bab"), None, ("a", "b"), [1, 0, 1]),
    ],
)
def test_labels(labels: Any, classes: Any, names: Any, numbers: list[int], tmp_path: Path) -> None:
    source = fv.open_data(fv.save_data(tmp_path / "out", (GREY[:3], labels), classes=classes), split="given")
    stored = source.splits["train"].labels
    assert source.classes == names and stored is not None and stored.tolist() == numbers


class Frame(dict[str, list[str]]):
    """A pandas frame: a dictionary with columns."""

    columns = ("image", "label")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": GREY}, "train: .* got ndarray"),
        ({"train": 3}, "train: .* got int"),
        ({"train": [{"image": GREY[0]}]}, "train: .* got dict"),
        ({"train": Frame()}, "train: .* got Frame"),
        ({"train": torch.utils.data.Dataset()}, "train: .* got Dataset"),  # without a length
        ({"train": (GREY, [0, 1] * 3), "classes": {0: "a", 1: "b"}}, "classes must"),
        ({"train": (GREY, [1, 2])}, "6 images and 2 labels"),
        ({"train": (GREY[:0], [])}, "train has no images"),
        ({"train": (GREY / 255.0, [0] * 6)}, "train-0: .*float64"),
        ({"train": (torch.randn(2, 3, 4, 4), [0, 1])}, "train-0: .*0 to 1"),
        ({"train": (GREY, [0, 1] * 3), "classes": ["a", "a"]}, "classes must"),
        ({"train": (GREY, [0.5] * 6)}, "train-0: .*0.5"),
        ({"train": (GREY, [-1] * 6)}, "train-0: .*-1"),
        ({"train": (GREY, ["a", 1] * 3)}, "Some labels are numbers"),
        ({"train": (GREY, ["a", " "] * 3)}, "train-1: .*' '"),
        ({"train": (GREY, [0, None, 1] * 2)}, "train-1 has no label"),
        ({"train": (GREY, [0, 3] * 3), "classes": ["a", "b"]}, "label 3 .*2 classes"),
        ({"train": (GREY, [0] * 6), "test": (GREY, None)}, "Some splits"),
        ({"train": (["nowhere.png"], None)}, r"nowhere\.png"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(fv.UserError, match=message):
        fv.save_data(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(fv.UserError, match="not empty"):
        fv.save_data(tmp_path, (GREY, None))
    fv.save_data(tmp_path / "out", (GREY, None))
    with pytest.raises(fv.UserError, match="not empty"):
        fv.save_data(tmp_path / "out", (GREY[:2], None))
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(fv.UserError, match="No image of train"):
        fv.save_data(tmp_path / "other", ([tmp_path / "broken.jpg"], None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jpg", "mine", "out"]


@pytest.mark.parametrize("thing", [GREY, None, 3, "", [GREY]])
def test_open_data_refuses_other_types(thing: Any) -> None:
    with pytest.raises(fv.UserError, match=r"fv\.save_data"):
        fv.open_data(thing)
