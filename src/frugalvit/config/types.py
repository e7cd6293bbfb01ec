"""Kinds of values that several groups of options take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from frugalvit.config.base import Config, check_max_side, check_ordered, option, split_commas


def _word(device: Any) -> Any:
    """A ``torch.device`` as its word, found by its looks: torch is not imported here."""
    first = type(device).__name__ == "device" and getattr(device, "index", None) in (None, 0)
    return device.type if first else device


Auto = Literal["auto"]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], BeforeValidator(_word)]
Precision = Literal["auto", "32", "bf16", "fp16"]
Splitting = Literal["auto", "given", "train+val", "remake"]
Labelling = Literal["auto", "folders", "ignore"]

Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Strength = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
SEEDS = 2**63  # torch takes no more
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Side = Annotated[int, Field(ge=1), AfterValidator(check_max_side)]
Range = Annotated[tuple[Share, Share], BeforeValidator(split_commas), AfterValidator(check_ordered)]
Span = Annotated[tuple[Positive, Positive], BeforeValidator(split_commas), AfterValidator(check_ordered)]
Hue = Annotated[float, Field(ge=0, le=0.5)]
Jitter = Annotated[tuple[Strength, Strength, Strength, Hue], BeforeValidator(split_commas)]


def _share_or_number(labels: float) -> float:
    if labels > 1 and labels != int(labels):
        raise ValueError("a share of each class is at most 1, a number of images of each class is whole")
    return labels


# Of the labels of every class: a share, or from 2 on a number.
LabelPart = Annotated[float, Field(gt=0), AfterValidator(_share_or_number)]

# Masks hold one byte a pixel.
Label = Annotated[int, Field(ge=0, le=255)]
LabelCount = Annotated[int, Field(ge=2, le=256)]


ROOT = "where datasets with a name lie (default: FRUGALVIT_DATASETS, or datasets in the cache, ~/.cache/frugalvit)"
"""What every command says of ``--root``; ``data/paths.py`` has the rule."""


class DataViewConfig(Config):
    """How data are opened by the commands that look at them rather than learn from them."""

    data: str = option(help="a folder, a table, shards, or the name of a dataset", positional=True)
    split: Splitting = option("auto", "as in train: auto makes a missing val; given shows only what is there")
    val_fraction: float = option(0.1, "share of train held out where a val is made", gt=0, lt=1)
    seed: Seed = option(0, "decides which images a made val holds; train always uses 0")
    labels: Labelling = option("auto", "folders: folder names are classes; ignore: no labels")
    classes: str | None = option(None, "file with the classes to keep, one name per line")
    root: str | None = option(None, ROOT)


LABEL_PART = "share of each class's training labels to use (at least one image), or from 2 on how many of each class"
"""What ``train`` and the probes say of ``--labels``."""

MIRROR = "answers are the means over an image and its mirror image, which takes twice as long"
"""What two commands say of ``--mirror``."""
