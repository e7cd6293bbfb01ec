"""Options of supervised training, prediction and replay."""

from typing import Literal

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.data import AugmentConfig, MixingConfig
from frugalvit.config.run import RunConfig
from frugalvit.config.types import LABEL_PART, MIRROR, OBJECTIVES, Auto, Count, Device, LabelPart, Objectives, Rate


class DrlocConfig(Config):
    """Drloc, the dense relative localization loss."""

    weight: float = option(0.0, "λ, the weight of the loss; 0 turns it off")
    variant: Literal["l1", "signed", "ce", "reg"] = option("l1", "Eq. 2, Eq. 3, Eq. 5 or Eq. 6 of the paper")
    form: Literal["paper", "released"] = option(
        "paper", "targets divided by k as in the paper, or as in the released code"
    )
    pairs: Count | Literal["all"] = option(64, "m, token pairs drawn per image; all: every ordered pair")
    hidden: Count | Auto = option("auto", "width of the head; auto: the paper's 512, less for small models")
    grid_size: int | None = option(7, "pool a finer grid to this many cells a side; none: no pooling", ge=2)

    def head_width(self, dim: int) -> int:
        """Return the paper's 512 for its backbones (384 and wider), else the backbone's width."""
        return (512 if dim >= 384 else dim) if self.hidden == "auto" else self.hidden

    @pydantic.field_validator("weight")
    @classmethod
    def _check_weight(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value < 0:
            raise ValueError("λ cannot be negative; 0 turns the loss off")
        return value


class LocalizationConfig(DrlocConfig):
    """Drloc in supervised training."""

    weight: float | Auto = option(  # type: ignore[assignment]
        "auto", "λ, the weight of the loss; 0 turns it off; auto: the paper's value for the family"
    )
    variant: Literal["auto", "l1", "signed", "ce", "reg", "dense"] = option(  # type: ignore[assignment]
        "auto", "Eq. 2, 3, 5 or 6, or Eq. 7 (dense: all blocks); auto: Eq. 5 for large Swins from scratch, else Eq. 2"
    )
    grid_size: int | Auto | None = option(  # type: ignore[assignment]
        "auto", "pool a finer grid to this many cells a side; none: no pooling; auto: 7, or none for dense"
    )
    schedule: Literal["constant", "ramp"] = option("constant", "λ constant (paper), or a rise and fall (released code)")
    images: Literal["mixed", "clean"] = option("mixed", "images after mixup and cutmix, or before (a second forward)")
    lr_scale: float = option(1.0, "learning rate of the head relative to the backbone's", gt=0)
    grid: Literal["normed", "raw"] = option("normed", "tokens after or before the final norm (dense: before)")

    @pydantic.field_validator("grid_size")
    @classmethod
    def _check_grid_size(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 2:
            raise ValueError("it must be at least 2 cells a side")
        return value


class TrainConfig(RunConfig):
    """Supervised training: cross-entropy + λ · Drloc."""

    labels: LabelPart = option(1.0, LABEL_PART)
    balance: bool = option(False, "draw classes equally often")
    pretrained: bool = option(False, "start from timm's published weights (needs a network connection)")
    freeze: int = option(0, "freeze the embedding and the first N blocks", ge=0)
    drop_path: Rate | Auto = option("auto", "stochastic depth; auto: the model's own")
    stretch: float = option(1.0, "use the schedules of a run this many times as long, and stop early", ge=1)
    ema: Rate | Auto = option("auto", "EMA rate of the weights that are evaluated and exported; 0: no EMA")
    evaluate_every: Count | Auto = option(
        "auto", "steps between evaluations; auto: an epoch, or more if evaluation would take over a quarter of the time"
    )
    objectives: Objectives = option(default_factory=dict, help=OBJECTIVES)
    localization: LocalizationConfig = option(default_factory=LocalizationConfig)
    augment: AugmentConfig = option(default_factory=AugmentConfig)
    mixing: MixingConfig = option(default_factory=MixingConfig)

    def weight_sources(self) -> dict[str, object]:
        return super().weight_sources() | {"--pretrained": self.pretrained}


class PredictConfig(Config):
    """Classify images with the preprocessing and class names of the training."""

    model: str = option(help="run folder, checkpoint or exported folder", positional=True)
    images: list[str] = option(help="image files or folders", positional=True)
    top: int = option(5, "number of classes to print", ge=1)
    format: Literal["table", "csv"] = option("table", "output format; or use --json")
    batch: int = option(64, "images per batch", ge=1)
    mirror: bool = option(False, MIRROR)
    device: Device = option("auto", "device to compute on")


class ReplayConfig(Config):
    """Repeat a step with non-finite tensors from the dump in the run folder."""

    evidence: str = option(help="RUN/fault/step_N_process_M.pt, or the run (its newest dump)", positional=True)
    top: int = option(5, "number of non-finite tensors to print of each kind", ge=1)
    device: Device = option("auto", "device to compute on")
