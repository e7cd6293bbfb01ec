"""Check and convert features and labels: tensors, numpy arrays or lists."""

from typing import Any

import torch
from torch import Tensor

from frugalvit.errors import UserError


def as_tensors(*arrays: Any) -> tuple[Any, ...]:
    """Convert every array to a tensor; None stays None."""
    return tuple(None if array is None else _as_tensor(array) for array in arrays)


def require_features(user: str, training: Tensor, *others: Tensor, views: bool = False) -> None:
    """Check that training features are (N, D), with ``views`` also (V, N, D), and others as wide."""
    fit = training.ndim in ((2, 3) if views else (2,))
    if not fit or any(other.ndim != 2 or other.shape[1] != training.shape[-1] for other in others):
        shapes = " and ".join(shape_text(part) for part in (training, *others))
        raise UserError(f"{user} needs (N, D) features of one width, not {shapes}.")


def as_labels(labels: Any, features: Tensor, what: str, classes: int | None = None) -> Tensor:
    """Convert labels to int64 (N,), one class for every image of ``features`` (..., N, D).

    Integers of any type are accepted, bool and float too, as (N,) or (N, 1). Numbers below 0 and beyond ``classes`` are
    errors. ``what`` names the features in messages.
    """
    labels = _as_tensor(labels)
    column = labels.ndim == 2 and labels.shape[1] == 1
    if labels.ndim != 1 and not column:
        raise UserError(
            f"The labels of the {what} must be (N,), one class per image, not {shape_text(labels)}: give "
            'targets.argmax(1) of one-hot targets, or use logistic_probe with metric="map11" for several labels.'
        )
    labels = _as_integers(labels.flatten(), features, what)
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0:
        raise UserError(
            f"The labels of the {what} hold {smallest}, but classes start at 0: "
            "renumber them with numpy.unique(labels, return_inverse=True)."
        )
    if classes is not None and largest >= classes:
        raise UserError(
            f"The labels of the {what} hold {largest}, but the last of {classes} classes is {classes - 1}: "
            f"give at least {largest + 1} classes."
        )
    return labels


def as_targets(targets: Any, features: Tensor, what: str) -> Tensor:
    """Convert several labels per image to int64 (N, C): 1 present, 0 absent, -1 unknown."""
    targets = _as_tensor(targets)
    if targets.ndim != 2:
        raise UserError(
            f"The targets of the {what} must be (N, C), not {shape_text(targets)}: "
            'for one label per image use another metric than "map11".'
        )
    targets = _as_integers(targets, features, what)
    if bool(((targets < -1) | (targets > 1)).any()):
        raise UserError(
            f"The targets of the {what} go from {int(targets.min())} to {int(targets.max())}, but must be "
            "1 = present, 0 = absent or -1 = unknown: give a column of 0 and 1 for every class."
        )
    return targets


def shape_text(array: Tensor) -> str:
    """Write a shape as 300x64; a scalar has none."""
    return "x".join(str(size) for size in array.shape) or "a scalar"


def _as_integers(numbers: Tensor, features: Tensor, what: str) -> Tensor:
    """Convert to int64; an error if the count differs from that of the images or a number is not whole."""
    images = features.shape[-2]
    if images != len(numbers) or images == 0:
        raise UserError(f"There are {images} {what} but {len(numbers)} labels.")
    if numbers.is_floating_point():  # a table with gaps is read as floats: 3.0 for class 3, NaN for a gap
        invalid = numbers[~torch.isfinite(numbers) | (numbers != numbers.floor())]
        if len(invalid):
            raise UserError(
                f"The labels of the {what} hold {invalid[0].item():g}, but classes are integers: "
                "number them with numpy.unique(labels, return_inverse=True)."
            )
    return numbers.detach().to(torch.int64)


def _as_tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"Features and labels must be tensors or numpy arrays of numbers: {reason}") from None
