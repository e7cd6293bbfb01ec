"""The heads of an attention, side by side again."""

from __future__ import annotations

import torch
from torch import Tensor

from frugalvit.backbones.exporting import is_exporting


def join_heads(attended: Tensor) -> Tensor:
    """(B, heads, T, d) -> (B, T, heads * d)."""
    tokens = attended.transpose(1, 2)
    if is_exporting():
        # How a fused attention lays out what it gives depends on gradients and the batch; a program that is exported
        # must not rely on it, since the exporter to ONNX, for one, runs it again another way.
        tokens = tokens.clone(memory_format=torch.contiguous_format)
    return tokens.flatten(2)
