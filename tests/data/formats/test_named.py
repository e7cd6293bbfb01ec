"""Named datasets: read by torchvision or by frugalvit, and downloaded completely or not at all."""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from frugalvit.data import open_data
from frugalvit.data.formats.named_catalog import IMAGENET_100
from frugalvit.data.splits import check_trainable
from frugalvit.errors import UserError
from helpers.data_layouts import fill, sizes
from helpers.suite_layouts import LAYOUTS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRUGALVIT_DATASETS", str(tmp_path))
    return tmp_path


EXPECTED: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "food101": ({"train": 12, "test": 12}, ("apple_pie", "pho")),
    "stanford_cars": ({"train": 10, "test": 10}, ("AM General Hummer", "Acura RL")),
    "fgvc_aircraft": ({"train": 12, "val": 12, "test": 12}, ("707-320", "A300B4", "Boeing 717")),
    "dtd": ({"train": 8, "val": 8, "test": 8}, ("banded", "dotted")),
    "oxford_pets": ({"train": 15, "test": 15}, ("Abyssinian", "Beagle", "Great Pyrenees")),
    "caltech101": ({"train": 60, "test": 8}, ("class0", "class1")),
    "mnist": ({"train": 30, "test": 20}, ()),
    "fer2013": ({"train": 28, "val": 14, "test": 14}, ()),
    "gtsrb": ({"train": 18, "test": 9}, ("0", "1", "2")),
    "ucf101": ({"train": 15, "test": 6}, ("class0", "class1", "class2")),
    "hateful_memes": ({"train": 20, "test": 8}, ("0", "1")),
    "country211": ({"train": 4, "val": 4, "test": 4}, ("AD", "AE")),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_present_datasets_open(home: Path, name: str) -> None:
    if name == "country211":
        fill(home / name, {f"{split}/{code}": 2 for split in ("train", "valid", "test") for code in ("AD", "AE")})
    else:
        LAYOUTS[name](home)
    expected, classes = EXPECTED[name]
    source = open_data(name, split="given")
    assert sizes(source) == expected and (not classes or source.classes == classes)
    assert list(source.classes) == sorted(source.classes)
    for examples in source.splits.values():
        assert examples.read(0).ndim == 3 and examples.labels.max() == len(source.classes) - 1
    assert sizes(open_data(f"{name}:{home}", split="given")) == expected


def test_imagenet100_reads_its_classes_only(home: Path) -> None:
    fill(home / "imagenet", {f"{split}/{number}": 1 for split in ("train", "val") for number in IMAGENET_100})
    fill(home / "imagenet", {"train/n01440764": 2, "val/n01440764": 1})  # a class of the other 900
    source = open_data("imagenet100", split="given")
    assert sizes(source) == {"train": 100, "val": 100} and len(set(source.classes)) == 100
    assert source.classes[0] == "n01558993" and source.splits["val"].labels.tolist() == list(range(100))
    shutil.rmtree(home / "imagenet/train/n01855672")
    with pytest.raises(UserError, match="lacks 1 of the 100 classes: n01855672"):
        open_data("imagenet100")


def test_domainnet_sets_have_names(home: Path) -> None:
    with pytest.raises(UserError, match=r"sketch_train\.txt"):
        open_data("domainnet_sketch")
    fill(home / "domainnet", {"sketch/apple": 2, "sketch/bee": 2})
    for split, number in (("train", 0), ("test", 1)):
        lines = [f"sketch/{name}/00{number}.png {label}" for label, name in enumerate(("apple", "bee"))]
        (home / f"domainnet/sketch_{split}.txt").write_text("\n".join(lines))
    source = open_data("domainnet_sketch", split="given")
    assert sizes(source) == {"train": 2, "test": 2} and source.classes == ("apple", "bee")


def test_labels_follow_sorted_class_names(home: Path) -> None:
    LAYOUTS["food101"](home)
    train = open_data("food101", split="given").splits["train"]
    assert all(("apple_pie", "pho")[label] in name for name, label in zip(train.names, train.labels, strict=True))


def test_sun397_with_and_without_lists(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LAYOUTS["sun397"](home)
    source = open_data("sun397", split="given")
    assert source.classes == ("abbey", "apse/indoor") and sizes(source) == {"train": 8, "test": 8}
    assert "half of every class" in capsys.readouterr().err
    (home / "SUN397/Training_01.txt").write_text("/a/abbey/sun_00.jpg\n/a/apse/indoor/sun_11.jpg\n")
    (home / "SUN397/Testing_01.txt").write_text("/a/abbey/sun_03.jpg\n")
    source = open_data("sun397", split="given")
    assert sizes(source) == {"train": 2, "test": 1} and source.splits["train"].labels.tolist() == [0, 1]


def test_voc_has_several_labels_per_image(home: Path) -> None:
    LAYOUTS["voc2007"](home)
    source = open_data("voc2007", split="given")
    assert source.classes == ("bird", "boat", "cat") and source.splits["train"].labels is None
    assert sizes(source) == {"train": 10, "val": 6, "test": 8}, "its own val list chooses the settings"
    assert source.splits["train"].targets[:2].tolist() == [[1, 0, -1], [0, 1, 1]]
    check_trainable(source)
    with pytest.raises(UserError, match="several labels per image: --classes"):
        open_data("voc2007", classes=["cat"])


def test_arrays_from_torchvision(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision checks the hash of real files, so this test replaces its class."""
    from torchvision import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)

    class Fake:
        classes = ("zebra", "ant")

        def __init__(self, root: str, split: str) -> None:
            self.data, self.labels = pixels, np.array([0, 1] * 3)

    monkeypatch.setattr(datasets, "SVHN", Fake)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (home / name).touch()
    source = open_data("svhn", split="given")
    assert source.classes == ("ant", "zebra") and source.splits["train"].labels.tolist() == [1, 0] * 3
    np.testing.assert_array_equal(source.splits["test"].read(2), pixels[2].transpose(1, 2, 0))


def test_patch_camelyon_stays_on_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a fake h5py: only this dataset needs the package."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)

    class File(dict):
        def __init__(self, path: object) -> None:
            super().__init__(x=pixels, y=np.arange(5).reshape(5, 1, 1, 1) % 2)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    module = types.ModuleType("h5py")
    module.File = File
    module.__spec__ = importlib.machinery.ModuleSpec("h5py", None)
    monkeypatch.setitem(sys.modules, "h5py", module)
    (home / "pcam").mkdir()
    for split in ("train", "valid", "test"):
        for what in "xy":
            (home / "pcam" / f"camelyonpatch_level_2_split_{split}_{what}.h5").touch()
    source = open_data("pcam", split="given")
    part = source.splits["train"].subset([4, 1])
    assert sizes(source) == {"train": 5, "val": 5, "test": 5} and part.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(part.read(0), pixels[4])
    assert len(part) == 2 and part.fingerprint() != source.splits["train"].fingerprint()


def test_downloads_are_complete_or_absent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def good(root: str, download: bool = False, **arguments: object) -> object:
        if download and not (Path(root) / "eurosat").exists():
            fill(Path(root) / "eurosat/2750", {"Forest": 10, "River": 10})
        return datasets.ImageFolder(str(Path(root) / "eurosat/2750"))

    def broken(root: str, download: bool = False, **arguments: object) -> object:
        fill(Path(root) / "eurosat/2750", {"Forest": 1})
        raise RuntimeError("<urlopen error no route to host>")

    monkeypatch.setattr(datasets, "EuroSAT", broken)
    with pytest.raises(UserError, match=r"Cannot download .*no route.*eurosat/2750"):
        open_data("eurosat")
    assert not (home / "eurosat").exists()
    monkeypatch.setattr(datasets, "EuroSAT", good)
    assert sizes(open_data("eurosat")) == {"train": 18, "val": 2} and (home / "eurosat/2750/Forest").is_dir()


def test_status_of_every_dataset(home: Path) -> None:
    from frugalvit.data.formats.named_catalog import dataset_status, list_datasets

    infos = list_datasets()
    assert sum(info.suite for info in infos) == 18
    assert {info.status for info in infos} == {"downloadable", "by hand"}
    assert all(info.instruction for info in infos)
    LAYOUTS["dtd"](home)
    assert dataset_status("dtd").state == "present"
    assert [info.name for info in list_datasets("mnist")] == ["mnist", "fashion_mnist", "kmnist"]
    assert [info.name for info in list_datasets("cifar*0")] == ["cifar10", "cifar100"]
    with pytest.raises(UserError, match=r"Stanford Cars is not in .* put cars_train/"):
        open_data("stanford_cars")
    with pytest.raises(UserError, match="Did you mean 'cifar100'"):
        open_data("cifar-100")


def test_damaged_named_dataset(home: Path) -> None:
    LAYOUTS["dtd"](home)
    (home / "dtd/dtd/labels/val1.txt").unlink()
    with pytest.raises(UserError, match="Cannot read Describable Textures"):
        open_data("dtd")
