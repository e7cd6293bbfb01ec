"""Resample weights to another size: relative-bias tables, position embeddings, patch embeddings.

A table of relative biases has one value per head for every offset (dy, dx) between two tokens of a window, a position
embedding one vector per token. Both are treated as images: another window or image size is a resized image.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor
from torch.nn import functional as F

from frugalvit.backbones.timm_features import Size


@contextmanager
def quiet_tables() -> Iterator[None]:
    """Suppress the warnings of timm's resizing of bias tables about its indexing, which users cannot fix."""
    with warnings.catch_warnings():
        for message in ("Using a non-tuple sequence", r"torch.searchsorted\(\): input value tensor is non-contiguous"):
            warnings.filterwarnings("ignore", message, UserWarning, module=r"timm\.layers\.interpolate")
        yield


def resample_bias_table(table: Tensor, new_sides: Size, old_sides: Size | None = None) -> Tensor:
    """(rows, heads) with rows = offsets in y times offsets in x -> (new rows, heads), bicubic, per head.

    A window of w tokens has 2 w - 1 offsets per side; without ``old_sides`` the old table is square.
    """
    rows, heads = table.shape
    height, width = old_sides or square(rows) or (0, 0)
    if height * width != rows:
        raise ValueError(f"a bias table of {rows} rows is not square")
    images = table.float().T.reshape(1, heads, height, width)
    resized = F.interpolate(images, size=new_sides, mode="bicubic", align_corners=False)
    return resized.reshape(heads, -1).T.to(table.dtype).contiguous()


def inner_bias_table(table: Tensor, new_sides: Size, old_sides: Size) -> Tensor:
    """(rows, heads) -> (new rows, heads): the offsets that a smaller window has, unchanged."""
    top, left = (old_sides[0] - new_sides[0]) // 2, (old_sides[1] - new_sides[1]) // 2
    offsets = table.unflatten(0, old_sides)
    return offsets[top : top + new_sides[0], left : left + new_sides[1]].flatten(0, 1).contiguous()


def resample_position_embedding(
    embedding: Tensor, new_grid: Size, prefix: int, old_grid: Size | None = None
) -> Tensor | None:
    """(1, P + N, D) -> (1, prefix + h w, D), bicubic over the grid; None if N is not a grid for any P.

    ``prefix`` is the number of class and register tokens in the model's embedding. If the file has more (a distillation
    token), the last are dropped; if it has fewer, zeros are added. Without ``old_grid`` the old grid is square.
    """
    for tokens in dict.fromkeys((prefix, 1, 0, 2)):
        count = embedding.shape[1] - tokens
        grid = square(count) if old_grid is None or old_grid[0] * old_grid[1] != count else old_grid
        if grid is not None:
            break
    else:
        return None
    front, patches = embedding[:, :tokens], embedding[:, tokens:]
    resized = resample_abs_pos_embed(patches, list(new_grid), list(grid), num_prefix_tokens=0)
    if tokens < prefix:
        front = torch.cat([front, front.new_zeros(1, prefix - tokens, front.shape[2])], dim=1)
    return torch.cat([front[:, :prefix], resized], dim=1)


def fit_first_convolution(weight: Tensor, shape: Sequence[int], patches: bool) -> Tensor | None:
    """Fit (D, 3, k, k) to another number of channels and, for non-overlapping ``patches``, another patch size."""
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


def square(count: int) -> Size | None:
    """Return (s, s) if ``count`` = s * s with s > 0, else None."""
    side = math.isqrt(count) if count > 0 else 0
    return (side, side) if side and side * side == count else None
