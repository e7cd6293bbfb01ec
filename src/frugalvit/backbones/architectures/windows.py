"""Windows of a Swin block on a map of any size: padding, shift, masks and relative offsets.

A map is padded at the bottom and right to a multiple of the window, rolled up and left by the shift, and partitioned.
Tokens from opposite borders that the roll puts side by side belong to different *regions*: no attention between them.

Two kinds of padding (released EsViT pads before it shifts, timm shifts before it pads):
  "zeros"   as released EsViT: padding is attended to like any token; only regions are masked.
  "masked"  padding is never attended to. An axis that fits into one window then needs neither padding nor roll.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MASKED = -1e4  # added to a masked score: its exp is zero in every precision, and a fully masked row stays finite

Size = tuple[int, int]


class WindowPlan(NamedTuple):
    """How one block partitions a map of ``size`` tokens. All values are (height, width) in tokens."""

    size: Size
    table: Size  # the window of the table of relative biases
    window: Size  # the actual window: smaller than ``table`` only along an axis shorter than it
    shift: Size  # the border between regions
    roll: Size  # the actual roll: zero along an axis with a single window of its length
    padding: Size
    mask_padding: bool

    @property
    def padded(self) -> Size:
        return self.size[0] + self.padding[0], self.size[1] + self.padding[1]

    @property
    def count(self) -> int:
        """Number of windows in one image."""
        height, width = self.padded
        return (height // self.window[0]) * (width // self.window[1])


def plan_windows(size: Size, table: Size, shift: Size, mask_padding: bool) -> WindowPlan:
    """Return the plan of a map of ``size`` with windows of ``table`` moved by ``shift``."""
    window, roll, padding = [], [], []
    for length, extent, offset in zip(size, table, shift, strict=True):
        is_single = mask_padding and length <= extent
        window.append(length if is_single else extent)
        roll.append(0 if is_single else offset)
        padding.append(0 if is_single else -length % extent)
    return WindowPlan(
        size, table, (window[0], window[1]), shift, (roll[0], roll[1]), (padding[0], padding[1]), mask_padding
    )


def window_partition(tokens: Tensor, plan: WindowPlan) -> Tensor:
    """(B, h, w, C) -> (B * windows, tokens of a window, C): pad, roll, partition."""
    if any(plan.padding):
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, plan.padding[1], 0, plan.padding[0]))
    if any(plan.roll):
        tokens = torch.roll(tokens, (-plan.roll[0], -plan.roll[1]), (1, 2))
    batch, height, width, channels = tokens.shape
    rows, columns = plan.window
    tokens = tokens.view(batch, height // rows, rows, width // columns, columns, channels)
    return tokens.transpose(2, 3).reshape(-1, rows * columns, channels)


def window_reverse(windows: Tensor, plan: WindowPlan) -> Tensor:
    """The inverse of :func:`window_partition`: (B * windows, tokens of a window, C) -> (B, h, w, C)."""
    height, width = plan.padded
    rows, columns = plan.window
    channels = windows.shape[-1]
    tokens = windows.view(-1, height // rows, width // columns, rows, columns, channels)
    tokens = tokens.transpose(2, 3).reshape(-1, height, width, channels)
    if any(plan.roll):
        tokens = torch.roll(tokens, plan.roll, (1, 2))
    if any(plan.padding):
        tokens = tokens[:, : plan.size[0], : plan.size[1]]
    return tokens


def offsets(plan: WindowPlan, tokens: Tensor) -> Tensor:
    """Return (N, N): the row in the table of relative biases for every pair of tokens in a window."""
    return _cached(_build_offsets, (plan.window, plan.table), tokens)


def mask(plan: WindowPlan, tokens: Tensor) -> Tensor | None:
    """Return (windows, N, N): 0 for allowed pairs, :data:`MASKED` for others; None if all are allowed."""
    needs_mask = any(plan.shift) or (plan.mask_padding and any(plan.padding))
    return _cached(_build_mask, (plan,), tokens) if needs_mask else None


def _build_offsets(window: Size, table: Size, device: torch.device) -> Tensor:
    position = torch.arange(window[0] * window[1], device=device)
    row, column = position // window[1], position % window[1]
    down = row[:, None] - row[None, :] + table[0] - 1
    right = column[:, None] - column[None, :] + table[1] - 1
    return down * (2 * table[1] - 1) + right


def _build_pairs(window: Size, table: Size, device: torch.device) -> Tensor:
    """Return (rows of the table, N): the numbers of the token pairs that read a row; N · N means no pair.

    A row belongs to one offset, so every token is the first of at most one of its pairs.
    """
    position = torch.arange(window[0] * window[1], device=device)
    row, column = position // window[1], position % window[1]
    entry = torch.arange((2 * table[0] - 1) * (2 * table[1] - 1), device=device)[:, None]
    second_row = row - (entry // (2 * table[1] - 1) - table[0] + 1)
    second_column = column - (entry % (2 * table[1] - 1) - table[1] + 1)
    inside = (second_row >= 0) & (second_row < window[0]) & (second_column >= 0) & (second_column < window[1])
    return torch.where(inside, position * len(position) + second_row * window[1] + second_column, len(position) ** 2)


def _build_mask(plan: WindowPlan, device: torch.device) -> Tensor:
    (rows, row_real), (columns, column_real) = (_axis_regions(plan, axis, device) for axis in (0, 1))
    region = (rows[:, None] * 3 + columns[None, :])[None, :, :, None]
    real = (row_real[:, None] & column_real[None, :])[None, :, :, None]
    no_roll = plan._replace(padding=(0, 0), roll=(0, 0))  # both maps are already padded and rolled
    region, real = window_partition(region, no_roll)[..., 0], window_partition(real, no_roll)[..., 0]
    forbidden = region[:, :, None] != region[:, None, :]
    if plan.mask_padding:
        forbidden = forbidden | ~real[:, None, :]
    return torch.zeros(forbidden.shape, device=device).masked_fill(forbidden, MASKED)


def _axis_regions(plan: WindowPlan, axis: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the region of every position along an axis after the roll, and whether it is not padding."""
    length, padded, shift, roll = plan.size[axis], plan.padded[axis], plan.shift[axis], plan.roll[axis]
    original = (torch.arange(padded, device=device) + roll) % padded
    if roll:
        rolled = torch.arange(padded, device=device)
        region = (rolled >= padded - plan.window[axis]).long() + (rolled >= padded - shift).long()
    else:  # a single window without roll: a shift above zero divides it into two regions
        region = (original >= shift).long()
    return region, original < length


# Masks and offsets depend only on shapes. They are cached per device outside the modules, so that copies of a model
# share them and checkpoints do not contain them. Tracing (compile, export, jit) computes them in the graph and fuses
# them into later operations; a cached tensor would be a constant there.
@functools.lru_cache(maxsize=256)
def _build_once(build: Callable[..., Tensor], arguments: tuple, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be used in training
        return build(*arguments, device)


def _cached(build: Callable[..., Tensor], arguments: tuple, tokens: Tensor) -> Tensor:
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore
    if traced or type(tokens) not in (Tensor, nn.Parameter) or tokens.is_meta:
        return build(*arguments, tokens.device)
    return _build_once(build, arguments, tokens.device)


def relative_bias(table: Tensor, plan: WindowPlan) -> Tensor:
    """(rows, heads) -> (N, N, heads): the bias of every pair of tokens in a window."""
    # torch.jit.trace cannot record a custom autograd function.
    if torch.is_grad_enabled() and table.requires_grad and not torch.jit.is_tracing():  # pyright: ignore
        return _Read.apply(table, plan)  # type: ignore[return-value]
    return table[offsets(plan, table)]


def score_bias(table: Tensor | None, plan: WindowPlan, queries: Tensor) -> Tensor | None:
    """Return relative bias plus mask, (1 or B * windows, heads, N, N), in the precision of the queries; or None."""
    # Read in full precision, then round, so that the gradients of a table entry are added in full precision.
    bias = None if table is None else relative_bias(table, plan).to(queries.dtype).permute(2, 0, 1)[None]
    masked = mask(plan, queries)
    if masked is None:
        return bias
    masked = masked.to(queries.dtype)[:, None]  # (windows, 1, N, N)
    bias = masked if bias is None else bias + masked
    return bias[None].expand(queries.shape[0] // plan.count, -1, -1, -1, -1).flatten(0, 1)


def map_attention(weights: Tensor, plan: WindowPlan) -> Tensor:
    """Return the attention of windows, (B * windows, heads, N, N), over the map: (B, heads, h * w, h * w).

    It is zero between windows. Attention to padding is dropped and the rows rescaled.
    """
    count = plan.size[0] * plan.size[1]
    # The index on the map of every position of every window. Padding has one extra index, dropped below.
    indices = torch.arange(count, device=weights.device).view(1, *plan.size, 1) + 1
    indices = (window_partition(indices, plan)[..., 0] - 1) % (count + 1)  # padding is 0, becomes -1, then count
    full = weights.new_zeros(len(weights) // plan.count, weights.shape[1], count + 1, count + 1)
    full[:, :, indices[:, :, None], indices[:, None]] = weights.unflatten(0, (-1, plan.count)).transpose(1, 2)
    full = full[:, :, :count, :count]
    return full / full.sum(-1, keepdim=True)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, plan: WindowPlan) -> Tensor:
        ctx.plan = plan
        return table[offsets(plan, table)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pairs = _cached(_build_pairs, (ctx.plan.window, ctx.plan.table), gradient)
        flat = gradient.flatten(0, 1)
        read = pairs < len(flat)
        return flat[pairs.clamp_max(len(flat) - 1)].masked_fill(~read[..., None], 0.0).sum(1), None
