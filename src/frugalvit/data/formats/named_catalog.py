"""The catalogue of named datasets: the 18 of EsViT's Table 9 and others. ``named.py`` opens them.

This module does not import torch, so that ``frugalvit list datasets`` is fast.
"""

import importlib.util
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from frugalvit.data.paths import datasets_root


@dataclass(frozen=True)
class Known:
    """A named dataset. If ``suite`` is true, sizes (train with val) and metric are those of EsViT's Table 9."""

    title: str
    classes: int
    train: int
    test: int
    files: tuple[str, ...]  # the dataset is present if these exist below the root
    metric: str = "accuracy"
    suite: bool = False
    torchvision: str = ""  # the class that downloads and reads it
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)  # arguments of that class, by split
    needs: tuple[str, ...] = ()
    by_hand: str = ""  # instruction for the user, if it cannot be downloaded


IMAGENET_100 = """
n01558993 n01692333 n01729322 n01735189 n01749939 n01773797 n01820546 n01855672 n01978455 n01980166 n01983481
n02009229 n02018207 n02085620 n02086240 n02086910 n02087046 n02089867 n02089973 n02090622 n02091831 n02093428
n02099849 n02100583 n02104029 n02105505 n02106550 n02107142 n02108089 n02109047 n02113799 n02113978 n02114855
n02116738 n02119022 n02123045 n02138441 n02172182 n02231487 n02259212 n02326432 n02396427 n02483362 n02488291
n02701002 n02788148 n02804414 n02859443 n02869837 n02877765 n02974003 n03017168 n03032252 n03062245 n03085013
n03259280 n03379051 n03424325 n03492542 n03494278 n03530642 n03584829 n03594734 n03637318 n03642806 n03764736
n03775546 n03777754 n03785016 n03787032 n03794056 n03837869 n03891251 n03903868 n03930630 n03947888 n04026417
n04067472 n04099969 n04111531 n04127249 n04136333 n04229816 n04238763 n04336792 n04418357 n04429376 n04435653
n04485082 n04493381 n04517823 n04589890 n04592741 n07714571 n07715103 n07753275 n07831146 n07836838 n13037406
n13040303
""".split()  # noqa: SIM905
"""The 100 classes of ImageNet-100 (Tian et al. 2020, CMC), by WordNet number; Drloc's released list is the same."""

DOMAINS = {"clipart": (33_525, 14_604), "infograph": (36_023, 15_582), "painting": (50_416, 21_850),
           "quickdraw": (120_750, 51_750), "real": (120_906, 52_041), "sketch": (48_212, 20_916)}  # fmt: skip
"""The six datasets of DomainNet, with the numbers of training and test images (Drloc, Table 1)."""

_TRAIN_TEST = {"train": {"train": True}, "test": {"train": False}}
_SPLIT_TRAIN_TEST = {"train": {"split": "train"}, "test": {"split": "test"}}
_SPLIT_THREE = {"train": {"split": "train"}, "val": {"split": "val"}, "test": {"split": "test"}}

DATASETS: dict[str, Known] = {
    "food101": Known("Food-101", 101, 75_750, 25_250, ("food-101/meta", "food-101/images"), suite=True,
                     torchvision="Food101", splits=_SPLIT_TRAIN_TEST),
    "cifar10": Known("CIFAR-10", 10, 50_000, 10_000, ("cifar-10-batches-py",), suite=True,
                     torchvision="CIFAR10", splits=_TRAIN_TEST),
    "cifar100": Known("CIFAR-100", 100, 50_000, 10_000, ("cifar-100-python",), suite=True,
                      torchvision="CIFAR100", splits=_TRAIN_TEST),
    "sun397": Known("SUN397", 397, 19_850, 19_850, ("SUN397/ClassName.txt",), suite=True,
                    torchvision="SUN397", splits={"train": {}}),
    "stanford_cars": Known(
        "Stanford Cars", 196, 8_144, 8_041, suite=True,
        files=("stanford_cars/devkit", "stanford_cars/cars_train", "stanford_cars/cars_test",
               "stanford_cars/cars_test_annos_withlabels.mat"),
        torchvision="StanfordCars", splits=_SPLIT_TRAIN_TEST,
        by_hand="its server is offline; put cars_train/, cars_test/, devkit/ and cars_test_annos_withlabels.mat "
                "into {root}/stanford_cars"),
    "fgvc_aircraft": Known("FGVC Aircraft (variants)", 100, 6_667, 3_333, ("fgvc-aircraft-2013b/data",),
                           "mean per class", True, "FGVCAircraft", _SPLIT_THREE),
    "voc2007": Known(
        "VOC2007 classification", 20, 5_011, 4_952,
        tuple(f"VOCdevkit/VOC2007/ImageSets/Main/{split}.txt" for split in ("train", "val", "test")),
        "11-point mAP", True, "VOCDetection",
        {"train": {"year": "2007", "image_set": "trainval"}, "test": {"year": "2007", "image_set": "test"}}),
    "dtd": Known("Describable Textures", 47, 3_760, 1_880, ("dtd/dtd/images",), suite=True, torchvision="DTD",
                 splits=_SPLIT_THREE),
    "oxford_pets": Known("Oxford-IIIT Pets", 37, 3_680, 3_669,
                         ("oxford-iiit-pet/images", "oxford-iiit-pet/annotations"), "mean per class", True,
                         "OxfordIIITPet",
                         {"train": {"split": "trainval"}, "test": {"split": "test"}}),
    "caltech101": Known("Caltech-101", 102, 3_060, 6_084, ("caltech101/101_ObjectCategories",), "mean per class", True,
                        "Caltech101", {"train": {}}),
    "flowers102": Known("Oxford Flowers 102", 102, 2_040, 6_149,
                        ("flowers-102/jpg", "flowers-102/imagelabels.mat", "flowers-102/setid.mat"),
                        "mean per class", True, "Flowers102", _SPLIT_THREE),
    "mnist": Known("MNIST", 10, 60_000, 10_000, ("MNIST/raw/t10k-labels-idx1-ubyte",), suite=True, torchvision="MNIST",
                   splits=_TRAIN_TEST),
    "fer2013": Known(
        "Facial Emotion Recog. 2013", 7, 32_298, 3_589, ("fer2013/fer2013.csv",), suite=True,
        by_hand="take fer2013.csv from kaggle.com (challenges-in-representation-learning-facial-expression-recognition-"
                "challenge) and put it into {root}/fer2013"),
    "stl10": Known("STL10", 10, 5_000, 8_000, ("stl10_binary/train_X.bin", "stl10_binary/test_X.bin"), suite=True,
                   torchvision="STL10", splits=_SPLIT_TRAIN_TEST),
    "gtsrb": Known("GTSRB", 43, 26_728, 12_630, ("gtsrb/GTSRB/Training", "gtsrb/GT-final_test.csv"), suite=True,
                   torchvision="GTSRB", splits=_SPLIT_TRAIN_TEST),
    "pcam": Known("PatchCamelyon", 2, 294_912, 32_768,
                  tuple(f"pcam/camelyonpatch_level_2_split_{split}_{what}.h5"
                        for split in ("train", "valid", "test") for what in "xy"),
                  suite=True, torchvision="PCAM", splits=_SPLIT_THREE, needs=("h5py", "gdown")),
    "ucf101": Known(
        "UCF101", 101, 9_537, 3_783, ("ucf101/train", "ucf101/test"), suite=True,
        by_hand="unpack UCF101.rar and its train and test splits in {root}, as UCF-101/CLASS/CLIP.avi and "
                "ucfTrainTestlist/trainlist01.txt; benchmarks/ucf101_frames.py of the repository then extracts the "
                "middle frames to ucf101/{{train,test}}/CLASS/CLIP.jpg"),
    "hateful_memes": Known(
        "Hateful Memes", 2, 8_500, 500, ("hateful_memes/train.jsonl", "hateful_memes/img"), "ROC AUC", True,
        by_hand="sign its terms at hatefulmemeschallenge.com and put train.jsonl, dev.jsonl (or dev_seen.jsonl) and "
                "img/ into {root}/hateful_memes"),
    "svhn": Known("SVHN", 10, 73_257, 26_032, ("train_32x32.mat", "test_32x32.mat"), torchvision="SVHN",
                  splits=_SPLIT_TRAIN_TEST),
    "eurosat": Known("EuroSAT", 10, 27_000, 0, ("eurosat/2750",), torchvision="EuroSAT", splits={"train": {}}),
    "country211": Known("Country211", 211, 42_200, 21_100, ("country211/train", "country211/valid", "country211/test"),
                        torchvision="Country211",
                        splits={"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}}),
    "fashion_mnist": Known("Fashion-MNIST", 10, 60_000, 10_000, ("FashionMNIST/raw/t10k-labels-idx1-ubyte",),
                           torchvision="FashionMNIST", splits=_TRAIN_TEST),
    "kmnist": Known("Kuzushiji-MNIST", 10, 60_000, 10_000, ("KMNIST/raw/t10k-labels-idx1-ubyte",), torchvision="KMNIST",
                    splits=_TRAIN_TEST),
    "imagenet100": Known(
        "ImageNet-100", 100, 126_689, 5_000, ("imagenet/train", "imagenet/val"),
        by_hand="put train/ and val/ of ImageNet-1K, with a folder for each class such as n01440764, into "
                "{root}/imagenet; only the 100 classes are read"),
    **{f"domainnet_{domain}": Known(
        f"DomainNet {domain}", 345, *counts,
        (f"domainnet/{domain}", f"domainnet/{domain}_train.txt", f"domainnet/{domain}_test.txt"),
        by_hand=f"take {domain}.zip, {domain}_train.txt and {domain}_test.txt from ai.bu.edu/M3SDA and unpack them in "
                "{root}/domainnet")
       for domain, counts in DOMAINS.items()},
}  # fmt: skip


class DatasetStatus(NamedTuple):
    """The state of a dataset, "present", "downloadable" or "by hand", and an instruction."""

    state: str
    instruction: str


@dataclass(frozen=True)
class DatasetInfo:
    """One line of ``frugalvit list datasets``. ``train`` counts train and val together."""

    name: str
    title: str
    classes: int
    train: int
    test: int
    metric: str
    suite: bool
    status: str
    instruction: str


def dataset_status(name: str, root: str | Path | None = None) -> DatasetStatus:
    """Return whether a dataset is present, can be downloaded, or must be copied by hand, and how."""
    known, home = DATASETS[name], datasets_root(root)
    missing = [package for package in known.needs if importlib.util.find_spec(package) is None]
    if all((home / path).exists() for path in known.files):
        if "h5py" in missing:
            return DatasetStatus("by hand", "to read it: pip install h5py")
        return DatasetStatus("present", str(home / known.files[0].split("/")[0]))
    if known.by_hand:
        return DatasetStatus("by hand", known.by_hand.format(root=home))
    if missing:
        return DatasetStatus("by hand", f"to download and read it: pip install {' '.join(missing)}")
    return DatasetStatus("downloadable", f"'frugalvit data {name}' downloads it to {home}")


def list_datasets(pattern: str = "", root: str | Path | None = None) -> list[DatasetInfo]:
    """List the datasets whose name or title contains ``pattern`` (with ``*`` and ``?``), with their state."""
    rows = []
    for name, known in DATASETS.items():
        if any(fnmatch(text.lower(), f"*{pattern.lower()}*") for text in (name, known.title)):
            status = dataset_status(name, root)
            sizes = (known.classes, known.train, known.test)
            rows.append(DatasetInfo(name, known.title, *sizes, known.metric, known.suite, *status))
    return rows
