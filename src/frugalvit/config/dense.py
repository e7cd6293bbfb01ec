"""Options of detection and segmentation."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.compare import Compared
from frugalvit.config.data import CacheConfig
from frugalvit.config.train import LabelledRunConfig
from frugalvit.config.types import Auto, Count, Device, Label, LabelCount, Positive, Rate, Share, Side, Span, Whole

DETECTOR_HEADS: dict[str, str | type[Any]] = {
    "mask-rcnn": "frugalvit.tasks.detection.heads:MaskRCNNHead",
    "cascade": "frugalvit.tasks.detection.cascade:CascadeHead",
}
"""Detector heads by name (``--head``): "module:class", or the class. docs/extending.md shows how to add one."""
BOXES = "folder of images with boxes (COCO, Pascal VOC, YOLO), or one COCO file"
if TYPE_CHECKING:
    HeadName = str
else:
    HeadName = Literal[tuple(DETECTOR_HEADS)]


class TransferOptimizerConfig(Config):
    """AdamW, as in Swin's detection and segmentation protocols."""

    weight_decay: float = option(0.05, "weight decay of matrices, not of biases, norms and position tables", ge=0)
    betas: tuple[Rate, Rate] = option((0.9, 0.999), "AdamW's betas")
    warmup: int = option(500, "linear warm-up in steps, at most a fifth of the run", ge=0)
    clip: float = option(0.0, "gradient norm limit; 0 for none", ge=0)
    clip_per: Literal["global", "tensor"] = option("global", "clip by one norm over all gradients, or by tensor")


class DetectOptimizerConfig(TransferOptimizerConfig):
    """The learning rate drops at milestones."""

    milestones: tuple[Share, ...] = option((8 / 12, 11 / 12), "shares of the run at which the learning rate drops")
    factor: float = option(0.1, "factor of each drop", gt=0, le=1)


class SegmentOptimizerConfig(TransferOptimizerConfig):
    """The learning rate falls polynomially."""

    warmup: int = option(1500, "linear warm-up in steps, at most a fifth of the run", ge=0)
    weight_decay: float = option(0.01, "weight decay of matrices, not of biases, norms and position tables", ge=0)
    power: float = option(1.0, "power of the decay; 1 is linear", gt=0)
    min_lr: float = option(0.0, "final learning rate as a share of the highest", ge=0, le=1)


class PicturesConfig(CacheConfig):
    """Cache of decoded images: full images, in memory."""

    location: Literal["auto", "device", "ram", "off"] = option(  # type: ignore[assignment]
        "auto", "cache decoded images on the device, in RAM, or not at all; auto: in RAM if they fit"
    )


class TransferConfig(LabelledRunConfig):
    """Options that detection and segmentation share."""

    unused: ClassVar[dict[str, str]] = {
        "root": "Pass the folder itself",
        "classes": "The data names them",
        "auto_batch": "Lower --batch, or raise --accumulate",
        "stream": "Its images are files",
        "cache.size": "Full images are cached",
        "cache.folder": "Images are cached in memory",
    }
    """Inherited options that are refused, with the reason; --help hides them."""

    img_size: Side | Auto = option("auto", "input size in pixels")  # type: ignore[assignment]
    drop_path: Rate | Auto = option("auto", "stochastic depth; auto: the model's own (detect), 0.2 (segment)")
    compile: bool | Auto = option("auto", "torch.compile the backbone; auto: no, because sizes change between steps")
    evaluate_every: Count | Auto = option("auto", "steps between evaluations; auto: an epoch, or a tenth of the run")

    cache: PicturesConfig = option(default_factory=PicturesConfig)  # type: ignore[assignment]

    @pydantic.model_validator(mode="after")
    def _check_unused(self) -> Self:
        for name, reason in self.unused.items():
            if operator.attrgetter(name)(self) not in (None, False, "", "auto"):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is not an option of {self.recipe_task}. {reason}")
        return self

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        return f"{cls.recipe_task}-small"


class DetectorConfig(Config):
    """Sizes of the detector heads."""

    channels: Count | Auto = option("auto", "channels of the pyramid; auto: a third of the backbone's, at most 256")
    hidden: Count | Auto = option("auto", "width of the box heads; auto: four times the channels")
    anchors: Positive | Auto = option("auto", "smallest anchor in strides of its level; auto: 8 at 800 px, else less")
    octaves: Count | Auto = option("auto", "anchor sizes per level, doubling; auto: to large objects, or 1")
    proposals: int = option(1000, "proposed regions per image", ge=1)
    samples: int = option(512, "regions per image that train the box heads", ge=4)
    detections: int = option(100, "largest number of detections per image", ge=1)


class DetectConfig(TransferConfig):
    """Mask R-CNN or Cascade Mask R-CNN on COCO-format data."""

    data: str | None = option(None, BOXES, positional=True)
    img_size: Side | Auto = option(  # type: ignore[assignment]
        "auto", "short side of test images, in pixels; auto: 5/3 of the data's, at most 800 (128 on a CPU)"
    )
    head: HeadName = option("mask-rcnn", "one box head, or three in a cascade")
    masks: bool | Auto = option("auto", "predict masks; auto: if all training objects have one")
    categories: Literal["own", "super", "one"] = option(
        "own", "own: the data's categories; super: their supercategories; one: a single category, object"
    )
    scales: Span = option((0.6, 1.0), "range of the short side in training, relative to img-size")
    longest: float = option(5 / 3, "limit of the long side, relative to img-size", gt=0)
    detector: DetectorConfig = option(default_factory=DetectorConfig)
    optimizer: DetectOptimizerConfig = option(default_factory=DetectOptimizerConfig)  # type: ignore[assignment]
    recipe_task: ClassVar[str] = "detect"


class DecoderConfig(Config):
    """Sizes of UperNet."""

    channels: Count | Auto = option("auto", "channels; auto: two thirds of the backbone's, at most the paper's 512")
    dropout: float = option(0.1, "dropout before the classifier", ge=0, lt=1)
    auxiliary: float = option(0.4, "weight of the auxiliary loss; 0: none", ge=0)
    norm: Literal["batch", "group"] | Auto = option("auto", "norm over the batch or groups; auto: batch from 8 images")


class TestConfig(Config):
    """Views of an image at evaluation."""

    __test__ = False  # pytest takes the name for a test

    multi_scale: bool = option(False, "average over several scales, as published", short="--multi-scale")
    scales: list[Positive] = option(
        (0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
        "scales relative to img-size, separated by spaces (with --multi-scale)",
        needs="multi_scale",
    )
    flip: bool = option(False, "also average over mirrored images (with --multi-scale)", needs="multi_scale")
    window: Whole | Auto = option("auto", "side of a sliding window; auto: img-size with --multi-scale; 0: full images")


class SegmentConfig(TransferConfig):
    """UperNet on images with a label for every pixel."""

    data: str | None = option(None, "folder of images and masks (also ADE20K, VOC and CamVid)", positional=True)
    img_size: Side | Auto = option(  # type: ignore[assignment]
        "auto", "side of the training crops, in pixels; auto: the data's short side, at most 512 (128 on a CPU)"
    )
    ignore_index: Label | Auto = option("auto", "label to ignore besides 255; auto: void, ADE20K's 0, CamVid's 11")
    label_count: LabelCount | Auto = option("auto", "number of labels; auto: those that occur or have a name")
    instances: bool | Auto = option("auto", "labels number objects: learn object against background; auto: ask if so")
    scales: Span = option((0.5, 2.0), "range of scales in training, relative to img-size")
    photometric: bool = option(True, "distort brightness, contrast, saturation and hue in training")
    largest_share: float = option(0.75, "redraw a crop if one class covers more than this share", gt=0, le=1)
    decoder: DecoderConfig = option(default_factory=DecoderConfig)
    test: TestConfig = option(default_factory=TestConfig)
    optimizer: SegmentOptimizerConfig = option(default_factory=SegmentOptimizerConfig)  # type: ignore[assignment]
    recipe_task: ClassVar[str] = "segment"


class _TrainedModelConfig(Config):
    model: str = option(help="run folder of 'train'", positional=True)
    batch: int = option(8, "images per batch", ge=1)
    device: Device = option("auto", "device to compute on")


class DetectEvalConfig(_TrainedModelConfig):
    """COCO AP of a trained detector on another dataset, or another split."""

    data: str = option(help=BOXES, positional=True)
    split: Literal["train", "val", "test"] = option("val", "split of a folder; a single file is evaluated in full")
    out: str | None = option(None, "folder for pictures and transfer_report.json", short="-o")


class DetectPredictConfig(_TrainedModelConfig):
    """Objects in images: pictures with boxes and masks, and COCO-format JSON."""

    images: list[str] = option(help="image files or folders", positional=True)
    threshold: float = option(0.5, "smallest score of an object", ge=0, le=1)
    out: str = option("predictions", "folder for pictures and detections.json", short="-o")


class SegmentEvalConfig(_TrainedModelConfig):
    """mIoU and mean accuracy of a trained segmenter on another dataset, or another split."""

    data: str = option(help="folder of images and masks", positional=True)
    split: Literal["train", "val", "test"] = option("val", "split to evaluate")
    ignore_index: Label | Auto = option("auto", "label to ignore; auto: as in training")
    test: TestConfig = option(default_factory=TestConfig)
    out: str | None = option(None, "folder for pictures", short="-o")


class SegmentPredictConfig(_TrainedModelConfig):
    """A label for every pixel: masks as PNG files, and pictures of them over the images."""

    images: list[str] = option(help="image files or folders", positional=True)
    test: TestConfig = option(default_factory=TestConfig)
    out: str = option("predictions", "folder for masks and pictures", short="-o")


class DetectCompareConfig(DetectConfig, Compared):
    """Detectors under two or more settings over several seeds, with a paired test."""

    metric: str = option("box_ap", "metric to compare")
    resume: str | None = option(None, hidden=True)


class SegmentCompareConfig(SegmentConfig, Compared):
    """Segmenters under two or more settings over several seeds, with a paired test."""

    metric: str = option("miou", "metric to compare")
    resume: str | None = option(None, hidden=True)
