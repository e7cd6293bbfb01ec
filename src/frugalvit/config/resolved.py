"""The configuration of a run after "auto" is resolved: training needs no further choice.

``experiment/resolve.py`` makes these. "auto" remains in options that each machine resolves (device, precision,
compile, workers, cache), in options that say how to read data, and in the options of a loss that is off.
"""
# Narrower types than in the base class are sound here, because every Config is frozen. Pydantic takes a field from the
# first base class, so some classes repeat the fields of the second.
# pyright: reportIncompatibleVariableOverride=false

from typing import Literal

from frugalvit.config.base import option
from frugalvit.config.dense import DecoderConfig, DetectConfig, DetectorConfig, SegmentConfig, TransferConfig
from frugalvit.config.distil import DistilConfig
from frugalvit.config.pretrain import Centering, LabelFreeConfig, MatchingConfig, PretrainConfig
from frugalvit.config.train import DrlocConfig, LocalizationConfig, OptimizerConfig, RunConfig, TrainConfig
from frugalvit.config.types import Count, Positive, Side, Strength


class ResolvedRunConfig(RunConfig):
    """What all training commands share."""

    img_size: Side | tuple[Side, Side] = option()
    batch: Count = option()
    lr: Positive = option()

    def length(self) -> float:
        """Return the length in epochs; 0 if --steps sets the length."""
        return 0.0 if self.epochs == "auto" else self.epochs


class ResolvedLocalizationConfig(LocalizationConfig):
    weight: Strength = option()

    def head_settings(self) -> DrlocConfig:
        """Return the settings of one head. If the loss is off, "auto" becomes the paper's value."""
        values = {name: getattr(self, name) for name in DrlocConfig.model_fields}
        values["variant"] = "l1" if self.variant in ("auto", "dense") else self.variant
        values["grid_size"] = 7 if self.grid_size == "auto" else self.grid_size
        return DrlocConfig(**values)


class ResolvedOptimizerConfig(OptimizerConfig):
    muon: bool = option()
    layer_decay: float = option()


class ResolvedTrainConfig(ResolvedRunConfig, TrainConfig):
    optimizer: ResolvedOptimizerConfig = option()
    freeze: int = option()
    target: Literal["class", "labels", "number"] = option()
    logit_adjustment: Strength = option()
    ema: float = option()
    evaluate_every: int = option()
    localization: ResolvedLocalizationConfig = option()


class ResolvedMatchingConfig(MatchingConfig):
    region_weight: Strength = option()
    prototypes: int = option()
    hidden: int = option()
    teacher_temp: float = option()
    centering: Centering = option()
    momentum: float = option()


class ResolvedLabelFreeConfig(ResolvedRunConfig, LabelFreeConfig):
    """What pre-training and distillation share."""


class ResolvedPretrainConfig(ResolvedLabelFreeConfig, PretrainConfig):
    matching: ResolvedMatchingConfig = option()


class ResolvedDistilConfig(ResolvedLabelFreeConfig, DistilConfig):
    """Distillation; its "auto" values are those of every run."""


class ResolvedTransferConfig(TransferConfig, ResolvedRunConfig):
    """What detection and segmentation share."""

    img_size: Side = option()
    batch: Count = option()
    lr: Positive = option()
    evaluate_every: int = option()


class ResolvedDetectorConfig(DetectorConfig):
    channels: int = option()
    hidden: int = option()
    anchors: float = option()
    octaves: int = option()


class ResolvedDetectConfig(DetectConfig, ResolvedTransferConfig):
    img_size: Side = option()
    batch: Count = option()
    lr: Positive = option()
    evaluate_every: int = option()
    masks: bool = option()
    detector: ResolvedDetectorConfig = option()


class ResolvedDecoderConfig(DecoderConfig):
    channels: int = option()
    norm: Literal["batch", "group"] = option()


class ResolvedSegmentConfig(SegmentConfig, ResolvedTransferConfig):
    img_size: Side = option()
    batch: Count = option()
    lr: Positive = option()
    evaluate_every: int = option()
    decoder: ResolvedDecoderConfig = option()
