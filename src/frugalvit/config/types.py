"""Annotated types and help texts that several configurations share."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from frugalvit.config.base import Config, option
from frugalvit.config.yaml import read_yaml_text


def split_commas(value: object) -> object:
    """Split several values in one text, as in the settings of a comparison: ``0.1,2``."""
    return value.split(",") if isinstance(value, str) else value


def check_ordered(value: tuple[float, float]) -> tuple[float, float]:
    """Reject a range whose first value is larger than the second."""
    if value[0] > value[1]:
        raise ValueError("the smaller value must come first")
    return value


def _device_name(device: Any) -> Any:
    """Convert a ``torch.device`` to its name, without importing torch."""
    is_default = type(device).__name__ == "device" and getattr(device, "index", None) in (None, 0)
    return device.type if is_default else device


def _check_label_part(labels: float) -> float:
    if labels > 1 and labels != int(labels):
        raise ValueError("use a share of at most 1, or a whole number of images per class")
    return labels


Auto = Literal["auto"]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], BeforeValidator(_device_name)]
Precision = Literal["auto", "32", "bf16", "fp16"]
Splitting = Literal["auto", "given", "train+val"]
TargetKind = Literal["auto", "class", "labels", "number"]
Labelling = Literal["auto", "folders", "ignore"]

Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(gt=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Several = Annotated[int, Field(ge=2)]
SEEDS = 2**63  # torch's limit
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Side = Annotated[int, Field(ge=1, le=8192)]  # a larger image would fill the memory
Range = Annotated[tuple[Share, Share], BeforeValidator(split_commas), AfterValidator(check_ordered)]
Span = Annotated[tuple[Positive, Positive], BeforeValidator(split_commas), AfterValidator(check_ordered)]
Hue = Annotated[float, Field(ge=0, le=0.5)]
Jitter = Annotated[tuple[Strength, Strength, Strength, Hue], BeforeValidator(split_commas)]
LabelPart = Annotated[float, Field(gt=0), AfterValidator(_check_label_part)]
Label = Annotated[int, Field(ge=0, le=255)]  # masks hold one byte per pixel
LabelCount = Annotated[int, Field(ge=2, le=256)]

DATA = "folder, CSV/JSONL (own columns: t.csv:path=A,label=B,root=DIR), dataset name, hf:…, or WebDataset shards"
MODEL = "run folder, checkpoint, exported folder, published weights (NAME.TAG, hf-hub:…, torchvision:…) or model name"
CLASSIFIER = "run folder, checkpoint, exported folder or published weights"
ARCHITECTURE = "architecture of a checkpoint without a configuration; NAME.TAG sets its preprocessing too"
PUBLISHED = "start from published weights, from FRUGALVIT_WEIGHTS (a folder) or the hub"
PRETRAINED = "MODEL is a name: use its published weights, from FRUGALVIT_WEIGHTS (a folder) or the hub"
COVERAGE = "share of images, such as 0.9, for which the set of classes holds the right one (split conformal, LAC)"
LABELS = "auto: read labels; folders: folder names are classes; ignore: no labels"
TARGET = (
    "what an image has: one class, several labels (a|b in a table, JSON lists, boxes), or a number; auto: labels for "
    "JSON lists and VOC2007, else class"
)
TARGET_OF_PROBE = "what an image has: one class, or several labels (logistic only); as in train"
LABEL_PART = "training labels to use: a share of each class, or (2 and more) a number of images per class"
MIRROR = "average over each image and its mirror image; takes twice as long"
PRECISION = "auto: bf16 if the hardware supports it"
ROOT = "folder of named datasets (default: FRUGALVIT_DATASETS, or datasets in ~/.cache/frugalvit)"
VAL_FRACTION = "share of train held out if there is no validation split"


def _check_objectives(value: Any) -> Any:
    """Accept ``{name: 0.1}`` and ``{name: {weight: 0.1, option: value}}``."""
    if not isinstance(value, dict):
        return value
    options: dict[str, dict[str, Any]] = {}
    for name, setting in value.items():
        setting = read_yaml_text(setting) if isinstance(setting, str) else setting
        values = dict(setting) if isinstance(setting, dict) else {"weight": setting}
        values = {key: read_yaml_text(item) if isinstance(item, str) else item for key, item in values.items()}
        weight = values.setdefault("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"the weight of '{name}' must be a number of at least 0")
        options[name] = values
    return options


Objectives = Annotated[dict[str, dict[str, Any]], BeforeValidator(_check_objectives)]
OBJECTIVES = "extra losses from the registry, e.g. '{NAME: {weight: 0.1, OPTION: …}}'"


class DataViewConfig(Config):
    """Data options of commands that read a dataset without training on it."""

    data: str = option(help=DATA, positional=True)
    split: Splitting = option("auto", "as in train: auto makes a missing val; given uses the existing splits")
    val_fraction: float = option(0.1, VAL_FRACTION, gt=0, lt=1)
    seed: Seed = option(0, "seed of a val split made from train; 'frugalvit train' always uses 0")
    label_source: Labelling = option("auto", LABELS)
    classes: str | None = option(None, "file with the classes to use, one name per line")
    root: str | None = option(None, ROOT)
