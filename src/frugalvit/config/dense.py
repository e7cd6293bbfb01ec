"""What can be set for detection and segmentation on a backbone of ours."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import pydantic

from frugalvit.config.base import Config, option, split_commas
from frugalvit.config.compare import Compared
from frugalvit.config.data import CacheConfig
from frugalvit.config.run import RunConfig
from frugalvit.config.types import Auto, Count, Device, Label, LabelCount, Positive, Rate, Share, Span, Whole
from frugalvit.errors import UserError

DETECTOR_HEADS: dict[str, str | type[Any]] = {
    "mask-rcnn": "frugalvit.tasks.detection.mask_rcnn:MaskRCNNHead",
    "cascade": "frugalvit.tasks.detection.cascade:CascadeHead",
}
"""Detector heads by name (``--head``): "module:class", or the class. docs/extending.md shows how to add one."""
if TYPE_CHECKING:
    HeadName = str
else:
    HeadName = Literal[tuple(DETECTOR_HEADS)]


class TransferOptimizerConfig(Config):
    """AdamW, as Swin's detection and segmentation protocols have it."""

    weight_decay: float = option(0.05, "weight decay of matrices (not of biases, norms and position tables)", ge=0)
    betas: tuple[Rate, Rate] = option((0.9, 0.999), "AdamW's averaging rates")
    warmup: int = option(500, "linear warm-up in steps, at most a fifth of the run", ge=0)
    clip: float = option(0.0, "gradient norm limit; 0 for none", ge=0)
    clip_per: Literal["global", "tensor"] = option("global", "one norm over all gradients, or one per tensor")
    layer_decay: float = option(
        1.0, "learning rate factor from each block of the backbone to the one before", gt=0, le=1
    )


class DetectOptimizerConfig(TransferOptimizerConfig):
    """The learning rate falls at steps."""

    milestones: tuple[Share, ...] = option((8 / 12, 11 / 12), "shares of the run at which the learning rate falls")
    factor: float = option(0.1, "what it is multiplied with there", gt=0, le=1)


class SegmentOptimizerConfig(TransferOptimizerConfig):
    """The learning rate falls along a line."""

    warmup: int = option(1500, "linear warm-up in steps, at most a fifth of the run", ge=0)
    weight_decay: float = option(0.01, "weight decay of matrices (not of biases, norms and position tables)", ge=0)
    power: float = option(1.0, "(1 - done)^power: 1 is a straight line", gt=0)
    min_lr: float = option(0.0, "the last learning rate as a share of the highest", ge=0, le=1)


class PicturesConfig(CacheConfig):
    """Where decoded images are kept; these tasks keep whole pictures, in memory."""

    where: Literal["auto", "device", "ram", "off"] = option(  # type: ignore[assignment]
        "auto", "keep decoded images on the device, in RAM, or not at all; auto: in RAM where they fit"
    )


class TransferConfig(RunConfig):
    """What detection and segmentation share beside every run's options."""

    unused: ClassVar[dict[str, str]] = {
        "root": "Give the folder itself",
        "classes": "The data name them",
        "auto_batch": "Lower --batch, or raise --accumulate",
        "stream": "Its images are files",
        "cache.size": "Whole pictures are kept",
        "cache.folder": "Pictures are kept in memory",
    }
    """Every run's options that these do not use, and why: not in --help, and refused rather than ignored."""

    img_size: int | Auto = option("auto", "input size in pixels")  # type: ignore[assignment]
    pretrained: bool = option(False, "start from timm's published weights (needs a network)")
    drop_path: Rate | Auto = option("auto", "stochastic depth; auto: the model's own (detect), 0.2 (segment)")
    compile: bool | Auto = option("auto", "torch.compile the backbone; auto: no, since sizes change from step to step")
    evaluate_every: Count | Auto = option("auto", "steps between evaluations; auto: an epoch, or a tenth of the run")

    cache: PicturesConfig = option(default_factory=PicturesConfig)  # type: ignore[assignment]

    def weight_sources(self) -> dict[str, object]:
        return super().weight_sources() | {"--pretrained": self.pretrained}

    @pydantic.field_validator("img_size", mode="before")
    @classmethod
    def _height_and_width(cls, value: Any) -> Any:
        """Both are for classifiers: here images keep their shape. Two that are alike are one number."""
        sides = split_commas(value) if isinstance(value, str) and "," in value else value
        if not isinstance(sides, list | tuple):
            return value
        if len(sides) != 2 or str(sides[0]) != str(sides[1]):
            what = str(cls.model_fields["img_size"].description).partition(",")[0]
            raise ValueError(f"{cls.recipe_task()} takes one number: the {what}")
        return sides[0]

    @pydantic.model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        for name, reason in self.unused.items():
            if operator.attrgetter(name)(self) not in (None, False, "", "auto"):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is not for {self.recipe_task()}; leave it out. {reason}")
        return self

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        return f"{cls.recipe_task()}-small"


class DetectorConfig(Config):
    """Sizes of the detector on top of the backbone."""

    channels: Count | Auto = option(
        "auto", "channels of the feature pyramid; auto: a third of the backbone's, at most 256"
    )
    hidden: Count | Auto = option("auto", "width of the box heads; auto: four times the channels")
    anchors: Positive | Auto = option(
        "auto", "smallest anchor in strides of its level; auto: 8 at 800 px, smaller with the input and coarse strides"
    )
    octaves: Count | Auto = option(
        "auto", "anchor sizes on a level, doubling; auto: until they reach large objects; 1 where anchors is given"
    )
    proposals: int = option(1000, "regions proposed per image", ge=1)
    samples: int = option(512, "regions per image the box heads learn from", ge=4)
    detections: int = option(100, "detections per image at most", ge=1)


class DetectConfig(TransferConfig):
    """Mask R-CNN or Cascade Mask R-CNN on COCO-format data."""

    data: str | None = option(
        None, "a folder with COCO-format JSON files and images, or one JSON file", positional=True
    )
    img_size: int | Auto = option(  # type: ignore[assignment]
        "auto", "short side of the images at test, in pixels; auto: 5/3 of the data's, at most 800 (128 on a CPU)"
    )
    head: HeadName = option("mask-rcnn", "one box head, or three that refine each other's boxes")
    masks: bool | Auto = option(
        "auto", "predict masks; auto: where 10 training objects have one, or half of them; others teach boxes alone"
    )
    categories: Literal["own", "super", "one"] = option(
        "own", "learn the data's categories, their supercategories, or one, object: few images teach few names"
    )
    scales: Span = option((0.6, 1.0), "smallest and largest short side in training, relative to img-size")
    longest: float = option(5 / 3, "the long side's limit, relative to img-size", gt=0)
    detector: DetectorConfig = option(default_factory=DetectorConfig)
    optimizer: DetectOptimizerConfig = option(default_factory=DetectOptimizerConfig)  # type: ignore[assignment]

    @classmethod
    def recipe_task(cls) -> str:
        return "detect"


class DecoderConfig(Config):
    """UperNet's sizes."""

    channels: Count | Auto = option("auto", "channels; auto: two thirds of the backbone's, at most the paper's 512")
    dropout: float = option(0.1, "dropout before the classifier", ge=0, lt=1)
    auxiliary: float = option(0.4, "weight of the auxiliary head's loss; 0 for none", ge=0)


class TestConfig(Config):
    """How images are looked at when they are scored."""

    __test__ = False  # not a test, whatever pytest thinks of its name

    multi_scale: bool = option(False, "average over several scales and flips", short="--multi-scale")
    scales: list[Positive] = option(
        (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), "the scales, relative to img-size, separated by spaces (with multi-scale)"
    )
    flip: bool = option(True, "and each mirrored (with multi-scale)")
    window: Whole | Auto = option("auto", "side of a sliding window; auto: img-size with multi-scale; 0: whole images")

    def check_typed(self) -> None:
        """What is asked of several scales would do nothing where images are looked at once; not for stored values."""
        usual = type(self).model_fields["scales"].default
        changed = {"--test.scales": self.scales != list(usual), "--no-test.flip": not self.flip}
        named = [flag for flag, given in changed.items() if given]
        if named and not self.multi_scale:
            raise UserError(f"{' and '.join(named)} alone would do nothing; add --multi-scale.")


class SegmentConfig(TransferConfig):
    """UperNet on images with a label for every pixel."""

    data: str | None = option(None, "a folder of images and masks (also ADE20K, VOC and CamVid)", positional=True)
    img_size: int | Auto = option(  # type: ignore[assignment]
        "auto", "side of the training crops, in pixels; auto: the data's short side, at most 512 (128 on a CPU)"
    )
    ignore_index: Label | Auto = option(
        "auto",
        "label that counts nowhere (255 never does); auto: a class called void, 0 in ADE20K, 11 in CamVid (where the "
        "folder is called so, or has <split>annot/)",
    )
    label_count: LabelCount | Auto = option("auto", "how many labels there are; auto: as many as occur or are named")
    scales: Span = option((0.5, 2.0), "smallest and largest scale in training, relative to img-size")
    photometric: bool = option(True, "distort brightness, contrast, saturation and hue in training")
    largest_share: float = option(
        0.75, "crops that one class fills further than this are drawn anew; 1: none", gt=0, le=1
    )
    decoder: DecoderConfig = option(default_factory=DecoderConfig)
    test: TestConfig = option(default_factory=TestConfig)
    optimizer: SegmentOptimizerConfig = option(default_factory=SegmentOptimizerConfig)  # type: ignore[assignment]

    @classmethod
    def recipe_task(cls) -> str:
        return "segment"


class _UseConfig(Config):
    model: str = option(help="the folder of a run of 'train'", positional=True)
    batch: int = option(8, "images at once", ge=1)
    device: Device = option("auto", "where to compute")


class DetectEvalConfig(_UseConfig):
    """COCO AP of a trained detector on another dataset, or another split."""

    data: str = option(help="a folder with COCO-format JSON files and images, or one JSON file", positional=True)
    split: Literal["train", "val", "test"] = option("val", "which part of a folder; one file is scored as a whole")
    out: str | None = option(None, "folder for pictures and transfer_report.json", short="-o")


class DetectPredictConfig(_UseConfig):
    """Objects in images: pictures with boxes and masks, and COCO-format JSON."""

    images: list[str] = option(help="image files or folders", positional=True)
    threshold: float = option(0.5, "objects less certain than this are left out", ge=0, le=1)
    out: str = option("predictions", "folder for pictures and detections.json", short="-o")


class SegmentEvalConfig(_UseConfig):
    """mIoU and mean accuracy of a trained segmenter on another dataset, or another split."""

    data: str = option(help="a folder of images and masks", positional=True)
    split: Literal["train", "val", "test"] = option("val", "which part of the data")
    ignore_index: Label | Auto = option("auto", "label that counts nowhere; auto: as in training")
    test: TestConfig = option(default_factory=TestConfig)
    out: str | None = option(None, "folder for pictures", short="-o")


class SegmentPredictConfig(_UseConfig):
    """A label for every pixel of images: masks as PNG files, and pictures of them over the images."""

    images: list[str] = option(help="image files or folders", positional=True)
    test: TestConfig = option(default_factory=TestConfig)
    out: str = option("predictions", "folder for masks and pictures", short="-o")


class DetectCompareConfig(DetectConfig, Compared):
    """Detectors under two or more settings over several seeds, with a paired test."""

    metric: str = option("box_ap", "what is compared")
    resume: str | None = option(None, hidden=True)


class SegmentCompareConfig(SegmentConfig, Compared):
    """Segmenters under two or more settings over several seeds, with a paired test."""

    metric: str = option("miou", "what is compared")
    resume: str | None = option(None, hidden=True)
