"""Objectives by name: the interface of an extra loss of a training task, and the table of them.

``@register_objective("smoothness")`` registers a class when its module is imported; then
``get_objective("smoothness")(dim)`` builds it. docs/extending.md shows an example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from frugalvit.errors import UserError, did_you_mean
from frugalvit.features import Features


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may use besides the features of one training step.

    images:  (B, C, H, W), normalized, as the backbone saw them
    labels:  (B) class numbers, or (B, classes) shares after mixing; None without labels
    teacher: the teacher's features of the same images, without gradient; None without a teacher
    step:    number of the optimizer step, from 0
    """

    images: Tensor
    labels: Tensor | None = None
    teacher: Features | None = None
    step: int = 0


class Objective(nn.Module):
    """A loss on the features of a batch. Subclass it, define ``forward``, and register the class.

    A task builds it as ``cls(dim, **options)``, where ``dim`` is the number of channels D of ``Features.grid``.
    Its parameters, if any, are trained and saved together with the network.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: Features, context: ObjectiveContext) -> Tensor:
        """Return the loss, a scalar averaged over the batch. So its weight does not depend on the batch size."""
        raise NotImplementedError


ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])
_OBJECTIVES: dict[str, type[Objective]] = {}


def register_objective(name: str) -> Callable[[ObjectiveClass], ObjectiveClass]:
    """Return a class decorator that adds an objective under ``name``."""

    def register(cls: ObjectiveClass) -> ObjectiveClass:
        known = _OBJECTIVES.get(name, cls)
        if known.__qualname__ != cls.__qualname__:  # a plugin's file may be imported under two module names
            raise UserError(f"objective {name!r} is already registered by {known.__module__}; choose another name.")
        _OBJECTIVES[name] = cls
        return cls

    return register


def get_objective(name: str) -> type[Objective]:
    """Return the class registered under ``name``."""
    if name not in _OBJECTIVES:
        names = ", ".join(list_objectives())
        raise UserError(f"objective {name!r} is unknown; choose one of {names}.{did_you_mean(name, _OBJECTIVES)}")
    return _OBJECTIVES[name]


def list_objectives() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_OBJECTIVES)
