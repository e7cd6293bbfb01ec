"""Fitting weights to another size: relative-bias tables, position embeddings, patch embeddings.

A table of relative biases holds one value per head for every offset (dy, dx) between two tokens of a window, a position
embedding one vector per token. Both are pictures, so another window or image size is a resized picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor
from torch.nn import functional as F


def resample_bias_table(table: Tensor, new_sides: tuple[int, int], old_sides: tuple[int, int] | None = None) -> Tensor:
    """(rows, heads) with rows = offsets in y times offsets in x -> (new rows, heads), bicubic, every head by itself.

    A window of w tokens has 2 w - 1 offsets a side; ``old_sides`` is taken as square when it is not given.
    """
    rows, heads = table.shape
    height, width = old_sides or square(rows) or (0, 0)
    if height * width != rows:
        raise ValueError(f"a bias table of {rows} rows is not square")
    pictures = table.float().T.reshape(1, heads, height, width)
    resized = F.interpolate(pictures, size=new_sides, mode="bicubic", align_corners=False)
    return resized.reshape(heads, -1).T.to(table.dtype).contiguous()


def resample_position_embedding(embedding: Tensor, new_grid: tuple[int, int], prefix: int) -> Tensor | None:
    """(1, P + N, D) -> (1, prefix + h w, D), bicubic over the grid; None where N is no square grid for any P.

    ``prefix`` counts the class and register tokens the model's embedding has a row for. A file with more of them (a
    distillation token) loses the last, one with fewer gets zeros.
    """
    for tokens in dict.fromkeys((prefix, 1, 0, 2)):
        old_grid = square(embedding.shape[1] - tokens)
        if old_grid is not None:
            break
    else:
        return None
    front, patches = embedding[:, :tokens], embedding[:, tokens:]
    resized = resample_abs_pos_embed(patches, list(new_grid), list(old_grid), num_prefix_tokens=0)
    if tokens < prefix:
        front = torch.cat([front, front.new_zeros(1, prefix - tokens, front.shape[2])], dim=1)
    return torch.cat([front[:, :prefix], resized], dim=1)


def fit_first_convolution(weight: Tensor, shape: Sequence[int], patches: bool) -> Tensor | None:
    """(D, 3, k, k) to another number of channels and, for non-overlapping ``patches``, another patch size."""
    if weight.ndim != 4 or len(shape) != 4 or weight.shape[0] != shape[0]:
        return None
    if weight.shape[1] != shape[1]:
        if weight.shape[1] != 3:
            return None
        weight = adapt_input_conv(shape[1], weight)
    if tuple(weight.shape[2:]) != tuple(shape[2:]):
        if not patches:
            return None
        weight = resample_patch_embed(weight.float(), list(shape[2:])).to(weight.dtype)
    return weight


def square(count: int) -> tuple[int, int] | None:
    """(s, s) when ``count`` = s * s with s > 0."""
    side = math.isqrt(count) if count > 0 else 0
    return (side, side) if side and side * side == count else None
