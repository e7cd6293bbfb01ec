"""Options of the input: augmentation, crops for pre-training, mixing of images, and the cache."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from frugalvit.config.base import Config, option
from frugalvit.config.types import Auto, Count, DataViewConfig, Jitter, Range, Seed, Share, Span, Splitting, Whole


class AugmentConfig(Config):
    """How a training image is varied. The defaults are Drloc's recipe (rand-m9-mstd0.5-inc1, erasing 0.25)."""

    crop: Literal["auto", "resized", "padded", "center"] = option(
        "auto", "resized: random resized crop; padded: shift over a border; auto: padded up to 32 px, else resized"
    )
    scale: Range = option((0.08, 1.0), "share of the image's area a random resized crop covers")
    ratio: Span = option((3 / 4, 4 / 3), "aspect ratios of a random resized crop, relative to the input's own")
    padding: int = option(4, "pixels of black border for the padded crop", ge=0)
    interpolation: Literal["bilinear", "bicubic"] = option("bicubic", "filter used to resize crops")
    affine: Literal["bilinear", "bicubic"] = option(
        "bilinear", "filter of rotations, shears and translations; bicubic is timm's, and several times slower on a CPU"
    )
    flip: Share = option(0.5, "probability of a horizontal flip")
    operations: Whole | Auto = option(
        "auto",
        "RandAugment operations drawn per image; 0 switches RandAugment off; auto: none below 180 epochs for networks "
        "below 2 million parameters, and below 5,000 steps from random weights; else 2, and where a magnitude is given",
    )
    operation_prob: Share = option(0.5, "probability that a drawn RandAugment operation is applied")
    magnitude: float = option(9.0, "RandAugment magnitude", ge=0, le=10)
    magnitude_std: float = option(
        0.5, "standard deviation of the magnitude; inf draws it uniformly below it", ge=0, allow_inf_nan=True
    )
    jitter: Jitter = option((0.0, 0.0, 0.0, 0.0), "colour jitter: brightness, contrast, saturation, hue")
    jitter_prob: Share = option(0.8, "probability of colour jitter, where it is on")
    grayscale: Share = option(0.0, "probability of a grey image")
    blur: Share = option(0.0, "probability of a Gaussian blur")
    blur_sigma: Span = option((0.1, 2.0), "range of the blur's sigma in output pixels")
    erasing: Share = option(0.25, "probability of erasing a rectangle with noise")
    erasing_area: Range = option((0.02, 1 / 3), "share of the area that is erased")
    repeats: int = option(1, "repeated augmentation: copies of an image within one batch", ge=1)


SMALL_INPUT = 32
"""Pixels of an input up to which the papers' crops and views, made for 224, are too much."""


class Views(NamedTuple):
    """How far the crops of one image may differ."""

    global_scale: tuple[float, float]
    local_scale: tuple[float, float]
    blur_sigma: tuple[float, float]


PAPER_VIEWS = Views((0.4, 1.0), (0.05, 0.4), (0.1, 2.0))
SMALL_VIEWS = Views((0.5, 1.0), (0.2, 0.5), (0.1, 0.3))  # with a sharper teacher, k-NN 44 instead of 28 on CIFAR-100


class CropsConfig(Config):
    """The views of pre-training. The defaults are EsViT's (2 global and 8 local crops), milder at 32 px and less."""

    global_crops: int = option(2, "number of global crops", ge=1)
    local_crops: int = option(8, "number of local crops; 0 trains on global crops only", ge=0)
    local_size: Count | tuple[Count, Count] | Auto = option(
        "auto", "pixels of a local crop (or height and width); auto keeps the paper's 96 : 224"
    )
    global_scale: Range | Auto = option(
        "auto", "share of the area a global crop covers; auto: the paper's 0.4,1, up to 32 px 0.5,1"
    )
    local_scale: Range | Auto = option(
        "auto", "share of the area a local crop covers; auto: the paper's 0.05,0.4, up to 32 px 0.2,0.5"
    )
    ratio: Span = option((3 / 4, 4 / 3), "aspect ratios of the crops, relative to that of their size in pixels")
    interpolation: Literal["bilinear", "bicubic"] = option("bicubic", "filter used to resize crops")
    flip: Share = option(0.5, "probability of a horizontal flip")
    jitter: Jitter = option((0.4, 0.4, 0.2, 0.1), "colour jitter: brightness, contrast, saturation, hue")
    jitter_prob: Share = option(0.8, "probability of colour jitter")
    grayscale: Share = option(0.2, "probability of a grey crop")
    blur_first: Share = option(1.0, "probability of blur on the first global crop")
    blur_global: Share = option(0.1, "probability of blur on the other global crops")
    blur_local: Share = option(0.5, "probability of blur on a local crop")
    blur_sigma: Span | Auto = option(
        "auto", "range of the blur's sigma in crop pixels; auto: the paper's 0.1,2, up to 32 px 0.1,0.3"
    )
    solarize: Share = option(0.2, "probability of solarising the global crops after the first")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if self.global_crops + self.local_crops < 2:
            raise ValueError("one crop has no other to match; raise --crops.global-crops or --crops.local-crops")
        return self

    def views(self, side: int) -> Views:
        """The ranges, with "auto" as it suits inputs of this many pixels."""
        usual = SMALL_VIEWS if side <= SMALL_INPUT else PAPER_VIEWS
        given = {name: getattr(self, name) for name in Views._fields}
        return usual._replace(**{name: value for name, value in given.items() if value != "auto"})


class MixingConfig(Config):
    """Mixup and cutmix: one blend per step, image i with its neighbour i^1."""

    mixup: float = option(0.8, "alpha of mixup's Beta distribution; 0 switches mixup off", ge=0)
    cutmix: float = option(1.0, "alpha of cutmix's Beta distribution; 0 switches cutmix off", ge=0)
    prob: Share | Auto = option(
        "auto",
        "probability that a step is mixed at all; auto: every other step, but in runs below 180 epochs only where "
        "mixup or cutmix is given another value",
    )
    switch_prob: Share = option(0.5, "probability of cutmix where both are on")
    smoothing: Share = option(0.1, "label smoothing")


class CacheConfig(Config):
    """Where decoded images are kept."""

    where: Literal["auto", "device", "ram", "disk", "off"] = option(
        "auto", "keep decoded images on the device, in RAM, memory-mapped on disk, or not at all (workers decode)"
    )
    size: Count | Auto = option("auto", "pixels of a stored image's shorter side; auto: 256/224 of the input")
    folder: str | None = option(None, "cache folder (default: FRUGALVIT_CACHE, or ~/.cache/frugalvit)")
    max_bad: Share = option(
        0.05, "share of unreadable images at which the run stops; below it others are learned from in their turn"
    )


class DataConfig(DataViewConfig):
    """What to look at, and how closely."""

    decode: Literal["auto", "all", "sample", "headers"] = option(
        "auto",
        "which images to decode in full; auto: all when that takes seconds, else a sample of 2,000; headers: none",
    )
    duplicates: bool = option(True, "look for files with the same content")


class PackConfig(DataViewConfig):
    """What to pack, and into what."""

    out: str = option(help="folder for the shards; it must not exist, or be empty", positional=True)
    split: Splitting = option("given", "as in train; given packs what is there")
    seed: Seed = option(0, "decides a made val (train always uses 0), and the order of shuffled examples")
    shard_megabytes: float = option(256.0, "size at which a new shard begins", gt=0)
    shuffle: bool = option(True, "mix the classes, as reading in passing needs; the order follows from the seed")
    decoded: bool = option(True, "write the images decoded too, so that training on the shards begins at once")
    img_size: int | Auto = option(
        "auto", "input size that the decoded images are made for; auto: what train would take on this machine"
    )
