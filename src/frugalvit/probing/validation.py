"""Features and labels as people have them: tensors, numpy's arrays, lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frugalvit.errors import UserError


def as_tensors(*arrays: Any) -> tuple[Any, ...]:
    """Every array as a tensor; None stays."""
    return tuple(None if array is None else _as_tensor(array) for array in arrays)


def require_features(whose: str, training: Tensor, *others: Tensor, views: bool = False) -> None:
    """Training features (N, D), with ``views`` also (V, N, D), and others of the same width."""
    fit = training.ndim in ((2, 3) if views else (2,))
    if not fit or any(other.ndim != 2 or other.shape[1] != training.shape[-1] for other in others):
        shapes = " and ".join(shape_words(part) for part in (training, *others))
        raise UserError(f"{whose} needs (N, D) features of one width, not {shapes}.")


def as_labels(labels: Any, features: Tensor, what: str, classes: int | None = None) -> Tensor:
    """One class for every image of ``features`` (..., N, D), as int64 (N,); ``what`` they are goes into the message.

    Whole numbers of any type are taken, bool and float too, and a column (N, 1) of them. A negative one would count
    classes from the end, and one beyond ``classes`` be a class that nothing can answer: both are refused.
    """
    labels = _as_tensor(labels)
    column = labels.ndim == 2 and labels.shape[1] == 1
    if labels.ndim != 1 and not column:
        raise UserError(
            f"the labels of the {what} are one class an image, (N,), not {shape_words(labels)}: give targets.argmax(1) "
            'of one-hot targets; several labels an image are for logistic_probe with metric="map11".'
        )
    labels = _as_whole(labels.flatten(), features, what)
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0:
        raise UserError(
            f"the labels of the {what} hold {smallest}, but classes are numbered from 0: "
            "number them anew, as numpy.unique(labels, return_inverse=True) does."
        )
    if classes is not None and largest >= classes:
        raise UserError(
            f"the labels of the {what} hold {largest}, but of {classes} classes the last is {classes - 1}: "
            f"there must be at least {largest + 1} classes."
        )
    return labels


def as_targets(targets: Any, features: Tensor, what: str) -> Tensor:
    """Several labels for every image of ``features`` (N, D), as int64 (N, C): 1 present, 0 absent, -1 unknown."""
    targets = _as_tensor(targets)
    if targets.ndim != 2:
        raise UserError(
            f"several labels an image are targets (N, C), not {shape_words(targets)} as of the {what}: "
            'for one label an image take another metric than "map11".'
        )
    targets = _as_whole(targets, features, what)
    if bool(((targets < -1) | (targets > 1)).any()):
        raise UserError(
            f"targets (N, C) are 1 = present, 0 = absent or -1 = unknown, but those of the {what} "
            f"go from {int(targets.min())} to {int(targets.max())}: give a column of 0 and 1 for every class."
        )
    return targets


def shape_words(array: Tensor) -> str:
    """As 300x64; a single number has no shape."""
    return "x".join(str(size) for size in array.shape) or "a single number"


def _as_whole(numbers: Tensor, features: Tensor, what: str) -> Tensor:
    """As int64, where all are whole and there are as many as images, at least one."""
    images = features.shape[-2]
    if images != len(numbers) or images == 0:
        raise UserError(f"{images} {what} but {len(numbers)} labels.")
    if numbers.is_floating_point():  # a table read with gaps has 3.0 for class 3, and NaN for the gaps
        broken = numbers[~torch.isfinite(numbers) | (numbers != numbers.floor())]
        if len(broken):
            raise UserError(
                f"the labels of the {what} hold {broken[0].item():g}, but classes are whole numbers: "
                "number them from 0, as numpy.unique(labels, return_inverse=True) does."
            )
    return numbers.detach().to(torch.int64)


def _as_tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise UserError(f"features and labels are numbers, as tensors or numpy arrays: {why}") from None
