"""Options of label-free pre-training."""

from typing import Any, ClassVar, Literal, Self

from frugalvit.config.base import Config, option
from frugalvit.config.data import AugmentConfig, CropsConfig, MixingConfig
from frugalvit.config.train import DrlocConfig, RunConfig
from frugalvit.config.types import (
    OBJECTIVES,
    Auto,
    Count,
    Labelling,
    Objectives,
    Positive,
    Rate,
    Several,
    Share,
    Strength,
)
from frugalvit.errors import UserError

Centering = Literal["mean", "sinkhorn"]


class MatchingConfig(Config):
    """Heads, centers and temperatures of view and region matching (EsViT §2.2, DINO)."""

    view_weight: Strength | Auto = option("auto", "weight of the view-level loss L_V; auto: 0.5 with L_R, 1 without")
    region_weight: Strength | Auto = option(
        "auto", "weight of the region-level loss L_R; 0: off (DINO); auto: the paper's 0.5 in very long runs, else 0"
    )
    regions_from: float = option(0.0, "add L_R from this epoch on", ge=0)
    prototypes: Several | Auto = option("auto", "K, size of the heads' output; auto: from the number of images")
    hidden: Count | Auto = option("auto", "width of the heads; auto: four times the backbone's, at most 2,048 (paper)")
    bottleneck: int = option(256, "width before the prototypes", ge=1)
    norm_last: bool = option(True, "keep the norms of the prototypes at one")
    hold_last: float = option(1.0, "epochs in which the prototypes are frozen, at most a tenth of the run", ge=0)
    student_temp: float = option(0.1, "temperature of the student", gt=0)
    teacher_temp: Positive | Auto = option("auto", "temperature of the teacher after its warm-up")
    teacher_temp_start: float = option(0.04, "temperature of the teacher at the start", gt=0)
    teacher_temp_warmup: float = option(30.0, "epochs of the teacher's warm-up, at most a third of the run", ge=0)
    momentum: Share | Auto = option("auto", "EMA rate of the teacher, rising to 1")
    centering: Centering | Auto = option(
        "auto", "center of the teacher; mean: a moving average (EsViT); sinkhorn: batches use all prototypes (SwAV)"
    )
    center_momentum: float = option(0.9, "EMA rate of the centers", ge=0, le=1)
    koleo: float = option(0.0, "weight of KoLeo: images move away from the nearest other (DINOv2: 0.1)", ge=0)
    chunked: bool | Auto = option("auto", "compute the logits in chunks to save memory; auto: for many prototypes")

    def weights(self) -> tuple[float, float]:
        """Return the weights of L_V and L_R; an unresolved "auto" is that of a very long run."""
        view, region = self.view_weight, 0.5 if self.region_weight == "auto" else self.region_weight
        return (0.5 if region else 1.0) if view == "auto" else view, region


class HealthConfig(Config):
    """Health metrics: collapse and stagnation."""

    every: float = option(1.0, "epochs between two evaluations of the features; at least a fiftieth of the run", gt=0)
    images: int = option(1024, "images to evaluate", ge=16)
    stop_on_collapse: bool = option(False, "end the run when the features collapse", short="--stop-on-collapse")


class LabelFreeConfig(RunConfig):
    """What pre-training and distillation share: images without labels, and how features are judged."""

    images: Literal["train", "train+val", "all"] = option("train", "splits to train on; labels are not used")
    label_source: Labelling = option("auto", "labels for k-NN; folders: folder names are classes; ignore: none")
    drop_path: Rate | Auto = option("auto", "stochastic depth of the student; auto: the model's own")
    weight_decay_end: float = option(0.4, "weight decay at the end; it rises by a cosine", ge=0)
    health: HealthConfig = option(default_factory=HealthConfig)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate the values, and reject options without effect. A stored config.yaml skips the second check."""
        config = super().parse(values)
        if config.optimizer.layer_decay != 1:
            raise UserError("optimizer.layer_decay is for trained layers: use it with 'train --init'.")
        return config


_ESVIT = ("matching", "crops", "localization", "objectives", "continue_from", "crops_at_once")
_INSTANCES = ("augment", "mixing")


class PretrainConfig(LabelFreeConfig):
    """EsViT: ½ L_V + ½ L_R over 2 global and 8 local crops, student and EMA teacher. Or instance classification."""

    method: Literal["esvit", "instances"] = option("esvit", "match views and regions, or classify images (small data)")

    continue_from: str | None = option(
        None, "new run from another, with its optimizer and options; --steps counts from its start", short="--continue"
    )
    crops_at_once: int = option(0, "crops per forward pass: fewer use less memory and more time; 0: all", ge=0)
    objectives: Objectives = option(default_factory=dict, help=OBJECTIVES)
    matching: MatchingConfig = option(default_factory=MatchingConfig)
    crops: CropsConfig = option(default_factory=CropsConfig)
    localization: DrlocConfig = option(default_factory=DrlocConfig)
    augment: AugmentConfig = option(default_factory=AugmentConfig)
    mixing: MixingConfig = option(default_factory=MixingConfig)
    recipe_task: ClassVar[str] = "pretrain"

    def weight_sources(self) -> dict[str, object]:
        return super().weight_sources() | {"--continue": self.continue_from}

    def has_unused_layers(self) -> bool:
        return self.matching.weights()[0] == 0

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        config = super().parse(values)
        unused = _INSTANCES if config.method == "esvit" else _ESVIT
        for name in () if config.resume else config.changed_options():
            if name in unused:
                raise UserError(f"--{name} has no effect with --method {config.method}: drop one of them.")
        if not (config.localization.weight or config.continue_from or config.resume):  # these two load it from a run
            for name in config.localization.changed_options():
                raise UserError(f"localization.{name} has no effect: set localization.weight too.")
        matching = config.matching
        if matching.centering == "sinkhorn" and "center_momentum" in matching.changed_options():
            raise UserError("matching.center_momentum has no effect with matching.centering sinkhorn: drop one.")
        return config

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        return "instances" if values.get("method") == "instances" else "small"
