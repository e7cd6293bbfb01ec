"""Options of the input (augmentation, crops, mixing, cache) and of ``data`` and ``data pack``."""

from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from frugalvit.config.base import Config, option
from frugalvit.config.types import (
    MODEL,
    Auto,
    Count,
    DataViewConfig,
    Device,
    Jitter,
    Range,
    Seed,
    Share,
    Side,
    Span,
    Splitting,
    Whole,
)


class AugmentConfig(Config):
    """Augmentation of a training image. The defaults are Drloc's (rand-m9-mstd0.5-inc1, erasing 0.25)."""

    crop: Literal["auto", "resized", "padded", "center"] = option(
        "auto", "resized: random resized crop; padded: shift over a border; auto: padded up to 32 px, else resized"
    )
    scale: Range = option((0.08, 1.0), "area of a random resized crop, as a share of the image")
    ratio: Span = option((3 / 4, 4 / 3), "aspect ratios of a random resized crop, relative to the input's")
    padding: int = option(4, "pixels of black border for the padded crop", ge=0)
    interpolation: Literal["bilinear", "bicubic"] = option("bicubic", "filter to resize crops")
    affine: Literal["bilinear", "bicubic"] = option("bilinear", "filter of rotations and shears; bicubic (timm): slow")
    flip: Share = option(0.5, "probability of a horizontal flip")
    operations: Whole | Auto = option("auto", "RandAugment operations; 0: off; auto: 2, or 0 for short or tiny runs")
    operation_prob: Share = option(0.5, "probability that a drawn RandAugment operation is applied")
    magnitude: float = option(9.0, "RandAugment magnitude", ge=0, le=10)
    magnitude_std: float = option(0.5, "deviation of the magnitude; inf: uniform from 0 up", ge=0, allow_inf_nan=True)
    jitter: Jitter = option((0.0, 0.0, 0.0, 0.0), "colour jitter: brightness, contrast, saturation, hue")
    jitter_prob: Share = option(0.8, "probability of colour jitter, if it is on")
    grayscale: Share = option(0.0, "probability of a grey image")
    blur: Share = option(0.0, "probability of a Gaussian blur")
    blur_sigma: Span = option((0.1, 2.0), "range of the blur's sigma in output pixels")
    erasing: Share = option(0.25, "probability of erasing a rectangle with noise")
    erasing_area: Range = option((0.02, 1 / 3), "share of the area that is erased")
    repeats: int = option(1, "repeated augmentation: copies of an image within one batch", ge=1)


SMALL_INPUT = 32  # up to this input size in pixels, crops and views are milder than the papers', which are made for 224


class Views(NamedTuple):
    """Ranges by which the crops of one image differ."""

    global_scale: tuple[float, float]
    local_scale: tuple[float, float]
    blur_sigma: tuple[float, float]


PAPER_VIEWS = Views((0.4, 1.0), (0.05, 0.4), (0.1, 2.0))
SMALL_VIEWS = Views((0.5, 1.0), (0.2, 0.5), (0.1, 0.3))  # with a sharper teacher, k-NN 44 instead of 28 on CIFAR-100


class CropsConfig(Config):
    """Crops of pre-training. The defaults are EsViT's (2 global and 8 local), milder up to 32 px."""

    global_crops: int = option(2, "number of global crops", ge=1)
    local_crops: int = option(8, "number of local crops; 0: global crops only", ge=0)
    local_size: Count | tuple[Count, Count] | Auto = option("auto", "pixels of a local crop; auto: 96/224 of global")
    global_scale: Range | Auto = option("auto", "area of a global crop; auto: the paper's 0.4,1, up to 32 px 0.5,1")
    local_scale: Range | Auto = option("auto", "area of a local crop; auto: the paper's 0.05,0.4, up to 32 px 0.2,0.5")
    ratio: Span = option((3 / 4, 4 / 3), "aspect ratios of the crops, relative to that of their size in pixels")
    interpolation: Literal["bilinear", "bicubic"] = option("bicubic", "filter to resize crops")
    flip: Share = option(0.5, "probability of a horizontal flip")
    jitter: Jitter = option((0.4, 0.4, 0.2, 0.1), "colour jitter: brightness, contrast, saturation, hue")
    jitter_prob: Share = option(0.8, "probability of colour jitter")
    grayscale: Share = option(0.2, "probability of a grey crop")
    blur_first: Share = option(1.0, "probability of blur on the first global crop")
    blur_global: Share = option(0.1, "probability of blur on the other global crops")
    blur_local: Share = option(0.5, "probability of blur on a local crop")
    blur_sigma: Span | Auto = option("auto", "sigma of the blur in px; auto: the paper's 0.1,2, up to 32 px 0.1,0.3")
    solarize: Share = option(0.2, "probability of solarizing the global crops after the first")

    @model_validator(mode="after")
    def _check_count(self) -> Self:
        if self.global_crops + self.local_crops < 2:
            raise ValueError("two crops are needed to match; raise --crops.global-crops or --crops.local-crops")
        return self

    def views(self, side: int) -> Views:
        """Return the ranges for inputs of ``side`` pixels, with "auto" resolved."""
        default = SMALL_VIEWS if side <= SMALL_INPUT else PAPER_VIEWS
        options = {name: getattr(self, name) for name in Views._fields}
        return default._replace(**{name: value for name, value in options.items() if value != "auto"})


class MixingConfig(Config):
    """Mixup and cutmix: one blend per step, image i with its neighbour i^1."""

    mixup: float = option(0.8, "alpha of mixup's Beta distribution; 0 turns mixup off", ge=0)
    cutmix: float = option(1.0, "alpha of cutmix's Beta distribution; 0 turns cutmix off", ge=0)
    prob: Share | Auto = option("auto", "share of steps that are mixed; auto: 0.5, or 0 below 180 epochs (hybrids: 60)")
    switch_prob: Share = option(0.5, "probability of cutmix if both are on")
    smoothing: Share | Auto = option("auto", "label smoothing; auto: 0.1; 0 with --unlabelled or a fitted start")

    def label_smoothing(self) -> float:
        """Return the label smoothing; "auto" stays in runs without --unlabelled."""
        return 0.1 if self.smoothing == "auto" else self.smoothing


class CacheConfig(Config):
    """Cache of decoded images."""

    location: Literal["auto", "device", "ram", "disk", "off"] = option(
        "auto", "cache decoded images on the device, in RAM, memory-mapped on disk, or not at all"
    )
    size: Count | Auto = option("auto", "shorter side of a cached image in pixels; auto: 256/224 of the input")
    folder: str | None = option(None, "cache folder (default: FRUGALVIT_CACHE, or ~/.cache/frugalvit)")
    max_bad: Share = option(0.05, "share of unreadable images that stops the run; fewer are replaced by other images")


class DataConfig(DataViewConfig):
    """Options of ``frugalvit data``."""

    decode: Literal["auto", "all", "sample", "headers"] = option(
        "auto", "images to decode in full; auto: all if that takes seconds, else a sample of 2,000; headers: none"
    )
    duplicates: bool = option(True, "find files with the same content")
    seed: Seed = option(0, "seed of a val split made from train, and of the folds of --suspicious")
    suspicious: str | None = option(None, f"rank images by how unlikely their labels are for this model ({MODEL})")
    out: str | None = option(None, "table of --suspicious (default: suspicious.csv)", short="-o", needs="suspicious")
    backbone: str | None = option(None, "architecture of a checkpoint without a configuration", needs="suspicious")
    img_size: Side | None = option(None, "input size in pixels (default: the model's)", needs="suspicious")
    device: Device = option("auto", "device to compute on", needs="suspicious")

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        """Refuse options that --suspicious does not use."""
        for name in self.changed_options() if self.suspicious else ():
            if name in ("decode", "duplicates", "split", "val_fraction"):
                raise ValueError(f"--{name.replace('_', '-')} has no effect with --suspicious")
        return self


class PackConfig(DataViewConfig):
    """Options of ``frugalvit data pack``."""

    out: str = option(help="folder for the shards; it must be empty or not exist", positional=True)
    split: Splitting = option("given", "as in train; given packs the existing splits")
    seed: Seed = option(0, "seed of the shuffling, and of a val split made from train ('frugalvit train' uses 0)")
    shard_megabytes: float = option(256.0, "size of a shard", gt=0)
    shuffle: bool = option(True, "shuffle the classes, as streaming needs")
