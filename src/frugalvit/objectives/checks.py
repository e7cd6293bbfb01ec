"""What is said of input that does not fit: by its shape alone, since looking into a tensor would stall its device."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from frugalvit.errors import UserError


def whole_number(name: str, value: Any) -> int:
    """``value`` where it is an integer, numpy's too, of at least 1."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        raise UserError(f"{name}={shown}: give a whole number, at least 1.")
    return number


def check_temperature(name: str, value: float | Tensor) -> None:
    """A temperature of 0 gives NaN in silence. A tensor is not looked at."""
    if not isinstance(value, Tensor) and not value > 0:
        raise UserError(f"{name}={value!r}: a temperature must be above 0.")


def check_momentum(value: float | Tensor) -> None:
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
        raise UserError(f"momentum={value!r}: give a number from 0 to 1.")


def check_center(center: Tensor, prototypes: int) -> None:
    """A centre of a single number would serve every prototype in silence."""
    if center.numel() != prototypes:
        raise UserError(
            f"a centre of shape {tuple(center.shape)} does not fit {prototypes} prototypes: give one number for each."
        )


def check_crops(what: str, crops: Sequence[Tensor], axes: int, batch: int, width: int, axis: int = 1) -> None:
    """Every crop shows the same images, or one would be spread over the others in silence, and is ``width`` wide.

    axes: how many each tensor has; axis: which of them is the width
    """
    for number, crop in enumerate(crops):
        if crop.ndim != axes or crop.shape[0] != batch or crop.shape[axis] != width or batch == 0:
            raise UserError(
                f"{what}, crop {number}: shape {tuple(crop.shape)} does not fit. Every crop needs {axes} axes, the "
                f"same images (here {batch}, at least 1) and a width of {width}."
            )
