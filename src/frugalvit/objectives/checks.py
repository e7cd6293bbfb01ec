"""Checks of arguments. Tensors are checked by shape only: reading their values would wait for the device."""

from collections.abc import Sequence

from torch import Tensor

from frugalvit.errors import UserError


def check_temperature(name: str, value: float | Tensor) -> None:
    """Refuse a temperature of 0, which would give NaN. The value of a tensor is not checked."""
    if not isinstance(value, Tensor) and not value > 0:
        raise UserError(f"{name}={value!r}: use a temperature above 0.")


def check_momentum(name: str, value: float | Tensor) -> None:
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
        raise UserError(f"{name}={value!r}: use a number from 0 to 1.")


def check_center(center: Tensor, prototypes: int) -> None:
    """Refuse a center of another length; torch would broadcast a single number to every prototype."""
    if center.numel() != prototypes:
        raise UserError(
            f"a center of shape {tuple(center.shape)} does not fit {prototypes} prototypes: use one number for each."
        )


def check_crops(name: str, crops: Sequence[Tensor], axes: int, batch: int, width: int, axis: int = 1) -> None:
    """Check that every crop has ``axes`` axes, ``batch`` images and ``width`` at ``axis``. torch would broadcast."""
    for number, crop in enumerate(crops):
        if crop.ndim != axes or crop.shape[0] != batch or crop.shape[axis] != width or batch == 0:
            raise UserError(
                f"{name}, crop {number}: shape {tuple(crop.shape)} does not fit. Every crop needs {axes} axes, the "
                f"same images (here {batch}, at least 1) and a width of {width}."
            )
