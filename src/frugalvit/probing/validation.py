"""Check and convert features and labels: tensors, numpy arrays or lists."""

from typing import Any

import torch
from torch import Tensor

from frugalvit.errors import UserError


def as_features(train: Any, *others: Any, views: bool = False) -> list[Tensor]:
    """Convert features to finite tensors (N, D) of one width; with ``views`` the first may be (V, N, D)."""
    tensors = [_as_tensor(part) for part in (train, *others)]
    first, *rest = tensors
    if first.ndim not in ((2, 3) if views else (2,)) or any(
        part.ndim != 2 or part.shape[1] != first.shape[-1] for part in rest
    ):
        raise UserError(f"Features must be (N, D) of one width, not {' and '.join(map(_shape, tensors))}.")
    for part in tensors:
        require_finite(part.flatten(0, -2), "features")
    return tensors


def require_finite(values: Tensor, what: str) -> None:
    """Raise an error if rows hold NaN or infinite values: their order, and so every score, is undefined."""
    bad = ~torch.isfinite(values).flatten(1).all(dim=1)
    if bad.any():
        raise UserError(
            f"{what}: {int(bad.sum())} of {len(values)} rows hold NaN or infinite values; "
            "the weights are damaged, or half precision overflowed (try --precision 32)."
        )


def as_labels(labels: Any, features: Tensor, classes: int | None = None) -> Tensor:
    """Convert labels to int64 (N,), one class from 0 for every image of ``features`` (..., N, D)."""
    labels = _as_integers(labels)
    images = features.shape[-2]
    if images == 0 or labels.shape != (images,):
        raise UserError(f"Labels must be one class for each of {images} images, not {_shape(labels)}.")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (classes and highest >= classes):
        limit = f" to {classes - 1}" if classes else ""
        raise UserError(f"Labels must be classes from 0{limit}, but they go from {lowest} to {highest}.")
    return labels


def as_targets(targets: Any, features: Tensor) -> Tensor:
    """Convert several labels per image to int64 (N, C): 1 present, 0 absent, -1 unknown."""
    targets = _as_integers(targets)
    images = features.shape[-2]
    if images == 0 or targets.ndim != 2 or len(targets) != images:
        raise UserError(f"Targets must be (N, C), a row for each of {images} images, not {_shape(targets)}.")
    if bool(((targets < -1) | (targets > 1)).any()):
        raise UserError(f"Targets must be 1, 0 or -1, but they go from {int(targets.min())} to {int(targets.max())}.")
    return targets


def _as_integers(numbers: Any) -> Tensor:
    numbers = _as_tensor(numbers)
    if numbers.is_floating_point():
        raise UserError("Labels must be integers: number them with numpy.unique(labels, return_inverse=True).")
    return numbers.to(torch.int64)


def _as_tensor(array: Any) -> Tensor:
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"Features and labels must be tensors or numpy arrays of numbers: {reason}") from None


def _shape(array: Tensor) -> str:
    return "x".join(map(str, array.shape)) or "a scalar"
