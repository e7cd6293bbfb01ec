"""Features and labels as people have them: tensors, numpy's arrays, lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frugalvit.errors import UserError


def as_tensors(*arrays: Any) -> tuple[Any, ...]:
    """Every array as a tensor; None stays."""
    return tuple(None if array is None else _as_tensor(array) for array in arrays)


def _as_tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise UserError(f"features and labels are numbers, as tensors or numpy arrays: {why}") from None
