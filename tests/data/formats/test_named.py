"""Named datasets: read by torchvision or by frugalvit, and downloaded completely or not at all."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from frugalvit.data import check_trainable, open_data
from frugalvit.errors import UserError
from helpers.data_layouts import fill, picture, sizes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRUGALVIT_DATASETS", str(tmp_path))
    return tmp_path


def lay_food101(root: Path) -> None:
    fill(root / "food-101" / "images", {"pie": 3, "soup": 3})
    (root / "food-101" / "meta").mkdir()
    for split, numbers in (("train", (0, 1)), ("test", (2,))):
        listed = {name: [f"{name}/{i:03d}" for i in numbers] for name in ("soup", "pie")}
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(listed))
    for path in (root / "food-101").rglob("*.png"):
        path.rename(path.with_suffix(".jpg"))


def lay_dtd(root: Path) -> None:
    fill(root / "dtd" / "dtd" / "images", {"dotted": 3, "banded": 3})
    (root / "dtd" / "dtd" / "labels").mkdir()
    for i, split in enumerate(("train", "val", "test")):
        (root / "dtd/dtd/labels" / f"{split}1.txt").write_text(f"dotted/{i:03d}.png\nbanded/{i:03d}.png\n")


def lay_gtsrb(root: Path) -> None:
    for label in ("00000", "00001"):
        picture(root / "gtsrb/GTSRB/Training" / label / "0.ppm")
    picture(root / "gtsrb/GTSRB/Final_Test/Images/00.ppm")
    (root / "gtsrb/GT-final_test.csv").write_text("Filename;Width;ClassId\n00.ppm;8;1\n")


def lay_pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    for stem in ("Beagle_1", "Beagle_2", "abyssinian_1"):
        picture(base / "images" / f"{stem}.jpg")
    (base / "annotations").mkdir()
    (base / "annotations/trainval.txt").write_text("Beagle_1 2 2 1\nabyssinian_1 1 1 1\n")
    (base / "annotations/test.txt").write_text("Beagle_2 2 2 1\nabyssinian_1 1 1 1\n")


def lay_ucf101(root: Path) -> None:
    fill(root / "ucf101", {"train/jump": 2, "train/run": 2, "test/run": 1})


def lay_hateful_memes(root: Path) -> None:
    fill(root / "hateful_memes", {"img": 3})
    rows = [json.dumps({"id": i, "img": f"img/{i:03d}.png", "label": i % 2, "text": "x"}) for i in range(3)]
    (root / "hateful_memes/train.jsonl").write_text("\n".join(rows[:2]))
    (root / "hateful_memes/dev.jsonl").write_text(rows[2])


def lay_fer2013(root: Path) -> None:
    (root / "fer2013").mkdir()
    pixels = " ".join(["7"] * 48 * 48)
    usages = ("Training", "Training", "PublicTest", "PrivateTest")
    lines = [f"{i},{pixels},{usage}" for i, usage in enumerate(usages)]
    (root / "fer2013/fer2013.csv").write_text("emotion,pixels,Usage\n" + "\n".join(lines))


def lay_country211(root: Path) -> None:
    fill(root / "country211", {f"{split}/{code}": 2 for split in ("train", "valid", "test") for code in ("AD", "AE")})


def lay_caltech101(root: Path) -> None:
    fill(root / "caltech101/101_ObjectCategories", {"ant": 33, "BACKGROUND_Google": 31})


def lay_sun397(root: Path) -> None:
    (root / "SUN397").mkdir()
    (root / "SUN397/ClassName.txt").write_text("/a/abbey\n/b/bar/indoor\n")
    for folder in ("a/abbey", "b/bar/indoor"):
        for i in range(4):
            picture(root / "SUN397" / folder / f"sun_{i}.jpg")
    (root / "SUN397/Training_01.txt").write_text("/a/abbey/sun_0.jpg\n/b/bar/indoor/sun_1.jpg\n")
    (root / "SUN397/Testing_01.txt").write_text("/a/abbey/sun_3.jpg\n")


LAYOUTS: dict[str, tuple[Callable[[Path], None], dict[str, int], tuple[str, ...]]] = {
    "food101": (lay_food101, {"train": 4, "test": 2}, ("pie", "soup")),
    "dtd": (lay_dtd, {"train": 2, "val": 2, "test": 2}, ("banded", "dotted")),
    "gtsrb": (lay_gtsrb, {"train": 2, "test": 1}, ("0", "1")),
    "oxford_pets": (lay_pets, {"train": 2, "test": 2}, ("Abyssinian", "Beagle")),
    "ucf101": (lay_ucf101, {"train": 4, "test": 1}, ("jump", "run")),
    "hateful_memes": (lay_hateful_memes, {"train": 2, "test": 1}, ("0", "1")),
    "fer2013": (lay_fer2013, {"train": 2, "val": 1, "test": 1}, ()),
    "country211": (lay_country211, {"train": 4, "val": 4, "test": 4}, ("AD", "AE")),
    "caltech101": (lay_caltech101, {"train": 60, "test": 4}, ("BACKGROUND_Google", "ant")),
    "sun397": (lay_sun397, {"train": 2, "test": 1}, ("abbey", "bar/indoor")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_present_datasets_open(home: Path, name: str) -> None:
    lay, expected, classes = LAYOUTS[name]
    lay(home)
    source = open_data(name, split="given")
    assert sizes(source) == expected and (not classes or source.classes == classes)
    assert list(source.classes) == sorted(source.classes)
    for examples in source.splits.values():
        assert examples.read(0).ndim == 3 and examples.labels.max() < len(source.classes)
    assert sizes(open_data(f"{name}:{home}", split="given")) == expected


def test_labels_follow_sorted_class_names(home: Path) -> None:
    lay_food101(home)
    train = open_data("food101", split="given").splits["train"]
    assert all(("pie", "soup")[label] in name for name, label in zip(train.names, train.labels, strict=True))


def test_sun397_without_lists(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay_sun397(home)
    (home / "SUN397/Training_01.txt").unlink()
    assert sizes(open_data("sun397", split="given")) == {"train": 4, "test": 4}
    assert "half of every class" in capsys.readouterr().err


def test_voc_has_several_labels_per_image(home: Path) -> None:
    main = home / "VOCdevkit/VOC2007/ImageSets/Main"
    main.mkdir(parents=True)
    for part, stems in (("trainval", ("1", "2")), ("test", ("3",))):
        (main / f"{part}.txt").write_text("\n".join(stems))
        for label, marks in (("cat", " 1"), ("bird", " 0"), ("cow", "-1")):
            (main / f"{label}_{part}.txt").write_text("\n".join(f"{stem} {marks}" for stem in stems))
        for stem in stems:
            picture(home / "VOCdevkit/VOC2007/JPEGImages" / f"{stem}.jpg")
    source = open_data("voc2007", split="given")
    assert source.classes == ("bird", "cat", "cow") and source.splits["train"].labels is None
    assert source.splits["train"].targets.tolist() == [[-1, 1, 0]] * 2
    with pytest.raises(UserError, match="several labels per image"):
        check_trainable(source)
    with pytest.raises(UserError, match="several labels per image, so --classes"):
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
    from frugalvit.data import dataset_status, list_datasets

    infos = list_datasets()
    assert sum(info.suite for info in infos) == 18
    assert {info.status for info in infos} == {"downloadable", "by hand"}
    assert all(info.instruction for info in infos)
    lay_dtd(home)
    assert dataset_status("dtd").state == "present"
    assert [info.name for info in list_datasets("mnist")] == ["mnist", "fashion_mnist", "kmnist"]
    assert [info.name for info in list_datasets("cifar*0")] == ["cifar10", "cifar100"]
    with pytest.raises(UserError, match=r"Stanford Cars is not in .* put cars_train/"):
        open_data("stanford_cars")
    with pytest.raises(UserError, match="Did you mean 'cifar100'"):
        open_data("cifar-100")


def test_damaged_named_dataset(home: Path) -> None:
    lay_dtd(home)
    (home / "dtd/dtd/labels/val1.txt").unlink()
    with pytest.raises(UserError, match="Cannot read Describable Textures"):
        open_data("dtd")
