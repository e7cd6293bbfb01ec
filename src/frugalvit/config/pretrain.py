"""What can be set for label-free pre-training."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from frugalvit.config.base import Config, option
from frugalvit.config.data import CropsConfig
from frugalvit.config.run import RunConfig
from frugalvit.config.train import DrlocConfig
from frugalvit.config.types import Auto, Count, Labelling, Positive, Rate, Share
from frugalvit.errors import UserError


class MatchingConfig(Config):
    """Heads, centres and temperatures of view and region matching (EsViT §2.2, DINO)."""

    view_weight: Annotated[float, Field(ge=0)] | Auto = option(
        "auto", "weight of the view-level loss L_V; auto: 0.5 beside L_R, 1 alone"
    )
    region_weight: float = option(0.5, "weight of the region-level loss L_R; 0 is DINO", ge=0)
    regions_from: float = option(0.0, "add L_R from this epoch on", ge=0)
    prototypes: Annotated[int, Field(ge=2)] | Auto = option(
        "auto", "K, size of the heads' output; auto from the number of images"
    )
    hidden: Count | Auto = option(
        "auto", "width of the heads; auto: four times the backbone's, at most the paper's 2,048"
    )
    bottleneck: int = option(256, "width before the prototypes", ge=1)
    norm_last: bool = option(True, "keep the prototypes' norms at one")
    hold_last: float = option(1.0, "epochs in which the prototypes do not learn, at most a tenth of the run", ge=0)
    student_temp: float = option(0.1, "the student's temperature", gt=0)
    teacher_temp: Positive | Auto = option("auto", "the teacher's temperature after its warm-up")
    teacher_temp_start: float = option(0.04, "the teacher's temperature at the start", gt=0)
    teacher_temp_warmup: float = option(30.0, "epochs of that warm-up, at most a third of the run", ge=0)
    momentum: Share | Auto = option("auto", "the teacher follows the student with this rate, rising to 1")
    center_momentum: float = option(0.9, "how slowly the centres follow the teacher's outputs", ge=0, le=1)
    chunked: bool | Auto = option("auto", "never hold all logits; auto: where there are many prototypes")

    def weights(self) -> tuple[float, float]:
        """Of L_V and of L_R."""
        view = self.view_weight
        return (0.5 if self.region_weight else 1.0) if view == "auto" else view, self.region_weight


class HealthConfig(Config):
    """The monitor of collapse and stagnation."""

    every: float = option(
        1.0, "epochs between two looks at features (rank, deviation, k-NN); at least a fiftieth of the run", gt=0
    )
    images: int = option(1024, "images looked at", ge=16)
    stop_on_collapse: bool = option(False, "end the run when it has collapsed", short="--stop-on-collapse")


class PretrainConfig(RunConfig):
    """EsViT: ½ L_V + ½ L_R over 2 global and 8 local crops, student and averaged teacher."""

    images: Literal["train", "train+val", "all"] = option(
        "train", "which splits to learn from; labels are never looked at"
    )
    labels: Labelling = option(
        "auto",
        "of the images k-NN watches with: folders: folder names are classes; ignore: none are, all is learned from",
    )
    continue_from: str | None = option(
        None,
        "a new run that goes on where another stopped, with its weights, optimiser and options but for those given; "
        "--steps and --epochs count from the other's beginning, auto: twice its length",
        short="--continue",
    )
    drop_path: Rate | Auto = option("auto", "stochastic depth of the student; auto: the model's own")
    crops_at_once: int = option(
        0, "crops of one size in one pass, recomputed for the gradients: fewer take less memory; 0: all", ge=0
    )
    weight_decay_end: float = option(0.4, "weight decay rises to this by a cosine", ge=0)
    matching: MatchingConfig = option(default_factory=MatchingConfig)
    crops: CropsConfig = option(default_factory=CropsConfig)
    localization: DrlocConfig = option(default_factory=DrlocConfig)
    health: HealthConfig = option(default_factory=HealthConfig)

    def weight_sources(self) -> dict[str, object]:
        return super().weight_sources() | {"--continue": self.continue_from}

    @classmethod
    def recipe_task(cls) -> str:
        return "pretrain"

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """As all runs' options; one that would do nothing here is refused (what earlier runs stored is not)."""
        made = super().parse(values)
        if made.optimizer.layer_decay != 1:
            raise UserError("optimizer.layer_decay spares layers that have learned: leave it to 'train --init'.")
        if not (made.localization.weight or made.continue_from or made.resume):  # these two bring a weight of their own
            usual = DrlocConfig()
            for name, value in made.localization:
                if value != getattr(usual, name):
                    raise UserError(
                        f"localization.{name} is of a loss that is off here: give localization.weight too, or leave it."
                    )
        return made

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        return "small"
