"""Where the tokens of a network's output lie in the image.

timm networks end in one of four layouts: (B, C, h, w), (B, h, w, C), tokens (B, T, C) with or without prefix tokens
(class, distillation, registers) in front. One function turns each of them into a grid (B, C, h, w).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from frugalvit.errors import UserError

Size = tuple[int, int]


def prefix_tokens(model: nn.Module) -> int | None:
    """How many tokens stand before the grid, or None where the network does not say."""
    count = getattr(model, "num_prefix_tokens", None)
    return int(count) if isinstance(count, int) else None


def reduction(model: nn.Module) -> int | None:
    """Pixels between two neighbouring tokens of the final grid, as the network's ``feature_info`` has it."""
    info = getattr(model, "feature_info", None)
    last = list(info)[-1] if info else {}
    return last.get("reduction") or None


def cell_sides(model: nn.Module, image: Size, grid: Size) -> tuple[float, float]:
    """Height and width in pixels of a region of the final grid; the last ones may reach beyond the image.

    What ``feature_info`` states, or halves of it where the stem was slowed; where none of these gives this grid, as
    many shares of the image as there are regions.
    """
    stated = int(reduction(model) or 0)
    steps = [stated / 2**halved for halved in range(stated.bit_length())]

    def side(pixels: int, count: int) -> float:
        # Padding makes one region more of what is left over, cutting leaves it out; never is it a whole region.
        return next((step for step in steps if abs(pixels / step - count) < 1), pixels / count)

    return side(image[0], grid[0]), side(image[1], grid[1])


def kept_cells(grid: Size, image: Size, padded: Size) -> Size:
    """Rows and columns of the grid of a padded image that hold any of the image itself."""
    return -(-image[0] * grid[0] // padded[0]), -(-image[1] * grid[1] // padded[1])


class SeveralGrids(UserError):
    """A network that ends in several maps (CoaT, CrossViT): any one of them would be but a part of what it learned."""


def to_grid(output: object, model: nn.Module, image: Size, channels: int | None = None) -> Tensor:
    """``output`` of ``forward_features`` (or of a block) as (B, C, h, w); UserError where it holds no grid.

    channels: the width of the output where known; tells (B, C, h, w) from (B, h, w, C).
    """
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        sizes = [part for part in output[1:] if isinstance(part, list | tuple) and len(part) == 2]
        if len(output) == 1 + len(sizes):  # (tokens, (h, w)), as MViT's blocks give
            return _tokens_to_grid(output[0], model, image, channels, tuple(sizes[0]) if sizes else None)
    if not isinstance(output, Tensor) or output.dim() not in (3, 4):
        kind = SeveralGrids if isinstance(output, list) else UserError
        raise kind(f"{_name(model)} gives no single grid of tokens; choose a network that ends in one feature map")
    if output.dim() == 3:
        return _tokens_to_grid(output, model, image, channels, None)
    if _is_channels_last(output, model, channels):
        return output.permute(0, 3, 1, 2)
    return output


def _is_channels_last(output: Tensor, model: nn.Module, channels: int | None) -> bool:
    stated = str(getattr(model, "output_fmt", "")).upper()
    if stated:
        return stated.endswith("NHWC")
    return channels is not None and output.shape[3] == channels and output.shape[1] != channels


def _tokens_to_grid(tokens: Tensor, model: nn.Module, image: Size, channels: int | None, size: Size | None) -> Tensor:
    if channels is not None and tokens.shape[2] != channels and tokens.shape[1] == channels:
        tokens = tokens.transpose(1, 2)
    count = tokens.shape[1]
    if size is None:
        prefix, size = _prefix_and_size(count, model, image)
    else:
        prefix = count - size[0] * size[1]
    return tokens[:, prefix:].transpose(1, 2).unflatten(2, size)


def chosen_stages(
    model: Any, grids: list[Tensor], indices: int | Sequence[int] | None, norm: bool, output_fmt: str
) -> list[Tensor]:
    """Of all blocks' grids (B, C, h, w) what timm's ``forward_intermediates`` asks for: the last so many stages, those
    of these numbers, or all. ``norm`` is the final norm, on the last stage."""
    if output_fmt != "NCHW":
        raise UserError(f"{_name(model)} gives its stages as NCHW only; ask for output_fmt='NCHW'.")
    stages = [grids[end] for end in model.stage_ends]
    if norm:
        stages[-1] = model.final_norm(stages[-1])
    count = len(stages)
    wanted = range(count) if indices is None else range(count - indices, count) if isinstance(indices, int) else indices
    return [stages[index] for index in wanted]


def _prefix_and_size(count: int, model: nn.Module, image: Size) -> tuple[int, Size]:
    """Prefix tokens and (h, w), such that prefix + h * w = count and h : w is close to the image's shape."""
    stated = prefix_tokens(model)
    prefixes = [0, 1, 2] if stated is None else [stated, 0]
    step = reduction(model)
    if step:
        expected = {(image[0] // step, image[1] // step), (-(-image[0] // step), -(-image[1] // step))}
        for prefix in prefixes:
            for size in expected:
                if size[0] * size[1] == count - prefix > 0:
                    return prefix, size
    for prefix in prefixes:
        size = _closest_shape(count - prefix, image)
        if size is not None:
            return prefix, size
    raise UserError(
        f"{_name(model)} gives {count} tokens for {image[0]}x{image[1]} pixels, which is no grid; "
        "choose a network that keeps its tokens where they lie"
    )


def _closest_shape(count: int, image: Size) -> Size | None:
    """The factors (h, w) of ``count`` closest to the image's aspect; None if none is within a step of rounding."""
    if count < 1:
        return None
    shapes = [(height, count // height) for height in range(1, count + 1) if count % height == 0]
    aspect = image[0] / image[1]
    height, width = min(shapes, key=lambda shape: abs(math.log(shape[0] / shape[1] / aspect)))
    if count == 1 and max(image) >= 64:  # a lone token of a large image is a class token, not a grid
        return None
    low, high = (height - 0.5) / (width + 0.5), (height + 0.5) / max(width - 0.5, 0.5)
    return (height, width) if low <= aspect <= high else None


def _name(model: nn.Module) -> str:
    configuration = getattr(model, "pretrained_cfg", None) or {}
    return configuration.get("architecture") or type(model).__name__
