"""Options of distillation."""

from typing import Any, ClassVar, Self

from frugalvit.config.base import Config, option
from frugalvit.config.data import AugmentConfig
from frugalvit.config.pretrain import LabelFreeConfig
from frugalvit.config.types import MODEL, Side
from frugalvit.errors import UserError


class TeacherConfig(Config):
    """The first argument; its own class, so that it comes before DATA."""

    teacher: str | None = option(None, f"network to learn from: {MODEL}", positional=True)


class DistillationConfig(Config):
    """What the student learns."""

    grid_weight: float = option(1.0, "weight of the token grid", ge=0)
    pooled_weight: float = option(1.0, "weight of the pooled features", ge=0)


class DistilConfig(LabelFreeConfig, TeacherConfig):
    """Label-free distillation: the student learns the features of a frozen teacher on the same views."""

    teacher_size: Side | None = option(None, "input size of the teacher in pixels (default: its own)")
    cache_teacher: bool = option(False, "run the teacher once per image and cache its features; crops are then fixed")
    distillation: DistillationConfig = option(default_factory=DistillationConfig)
    augment: AugmentConfig = option(default_factory=AugmentConfig)
    recipe_task: ClassVar[str] = "distil"

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        return "distil"

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        config = super().parse(values)
        if not config.distillation.grid_weight + config.distillation.pooled_weight > 0:
            raise UserError("distillation.grid_weight and distillation.pooled_weight are both 0: nothing to learn.")
        if config.cache_teacher:
            for name, fixed in (("crop", "center"), ("operations", 0)):
                if (value := getattr(config.augment, name)) not in ("auto", fixed):
                    raise UserError(f"--cache-teacher needs fixed crops: drop --augment.{name} {value}.")
        return config

    def has_unused_layers(self) -> bool:
        return self.distillation.pooled_weight == 0
