"""What can be set for supervised training, prediction and comparison."""

from __future__ import annotations

from typing import Literal

import pydantic

from frugalvit.config.base import Config, option
from frugalvit.config.data import AugmentConfig, MixingConfig
from frugalvit.config.run import RunConfig
from frugalvit.config.types import LABEL_PART, MIRROR, Auto, Count, Device, LabelPart, Rate


class DrlocConfig(Config):
    """Drloc: the dense relative localization loss, wherever it is added."""

    weight: float = option(0.0, "λ, the weight of the loss; 0 turns it off")
    variant: Literal["l1", "signed", "ce", "reg"] = option("l1", "Eq. 2, Eq. 3, Eq. 5 or Eq. 6 of the paper")
    form: Literal["paper", "released"] = option(
        "paper", "targets over k as in the paper, or as the released code has it"
    )
    pairs: Count | Literal["all"] = option(64, "m, token pairs drawn per image; all: every ordered pair")
    hidden: Count | Auto = option(
        "auto", "width of the head's hidden layers; auto: the paper's 512, less for small models"
    )
    grid_size: int | None = option(7, "a finer grid is pooled to this many cells a side; none keeps it", ge=2)

    def head_width(self, dim: int) -> int:
        """The paper's 512 for its backbones (384 and wider); a head must not outweigh a small backbone."""
        return (512 if dim >= 384 else dim) if self.hidden == "auto" else self.hidden

    @pydantic.field_validator("weight")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value < 0:
            raise ValueError("λ cannot be negative; 0 turns the loss off")
        return value


class LocalizationConfig(DrlocConfig):
    """Drloc in supervised training."""

    weight: float | Auto = option(  # type: ignore[assignment]
        "auto", "λ, the weight of the loss; 0 turns it off; auto: the paper's for the family"
    )
    variant: Literal["auto", "l1", "signed", "ce", "reg", "dense"] = option(  # type: ignore[assignment]
        "auto",
        "Eq. 2, Eq. 3, Eq. 5, Eq. 6 of the paper, or every block at once (Eq. 7; a second forward); auto: Eq. 5 for "
        "large Swins from scratch, Eq. 2 otherwise",
    )
    grid_size: int | Auto | None = option(  # type: ignore[assignment]
        "auto", "a finer grid is pooled to this many cells a side; none keeps it; auto: 7, dense keeps every grid"
    )
    schedule: Literal["constant", "ramp"] = option(
        "constant", "λ constant (paper) or up and down again (released code)"
    )
    images: Literal["mixed", "clean"] = option(
        "mixed", "localise in the images after mixup and cutmix, or before (a second forward)"
    )
    lr_scale: float = option(1.0, "the head's learning rate relative to the backbone's", gt=0)
    grid: Literal["normed", "raw"] = option("normed", "the tokens after or before the final norm (dense: before)")

    @pydantic.field_validator("grid_size")
    @classmethod
    def _several_cells(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 2:
            raise ValueError("a grid of fewer than 2 cells a side leaves nothing to localise")
        return value


class TrainConfig(RunConfig):
    """Supervised training: cross-entropy + λ · Drloc."""

    labels: LabelPart = option(1.0, LABEL_PART)
    balance: bool = option(False, "draw classes equally often")
    pretrained: bool = option(False, "start from timm's published weights (needs a network)")
    freeze: int = option(0, "leave the first N blocks (and the embedding) as they are", ge=0)
    drop_path: Rate | Auto = option("auto", "stochastic depth; auto: the model's own")
    stretch: float = option(
        1.0, "schedules of the learning rate and of λ's ramp for a run this many times as long, cut off", ge=1
    )
    ema: Rate | Auto = option("auto", "averaging rate of the weights that are evaluated and exported; 0 for none")
    evaluate_every: Count | Auto = option(
        "auto", "steps between evaluations; auto: an epoch, or as often as a quarter of the time allows"
    )
    localization: LocalizationConfig = option(default_factory=LocalizationConfig)
    augment: AugmentConfig = option(default_factory=AugmentConfig)
    mixing: MixingConfig = option(default_factory=MixingConfig)

    def weight_sources(self) -> dict[str, object]:
        return super().weight_sources() | {"--pretrained": self.pretrained}


class PredictConfig(Config):
    """The classes of images, with the preprocessing and names the model was trained with."""

    model: str = option(help="a run, one of its checkpoints, or an exported folder", positional=True)
    images: list[str] = option(help="image files or folders", positional=True)
    top: int = option(5, "how many classes to name", ge=1)
    format: Literal["table", "csv"] = option("table", "how to print (or use --json)")
    batch: int = option(64, "images at once", ge=1)
    mirror: bool = option(False, MIRROR)
    device: Device = option("auto", "where to compute")


class ReplayConfig(Config):
    """A step that gave infinite or undefined numbers, run again from what it left in the run's folder."""

    evidence: str = option(help="RUN/fault/step_N_process_M.pt, or the run (its newest)", positional=True)
    top: int = option(5, "how many bad tensors of each kind to name", ge=1)
    device: Device = option("auto", "where to compute")
