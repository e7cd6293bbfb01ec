"""Attention in windows as one Triton kernel each way, read from and written to the map itself.

    out = softmax(q kᵀ / √d + B) v    within every window (Swin, Eq. 4)

Plain torch copies the tokens into windows, adds a bias and a mask of (windows, heads, N, N), and copies back. Here a
program takes one head and loops over windows: it computes the positions of a window's tokens on the padded and shifted
map, holds the head's bias in registers, and never stores scores. The backward pass recomputes the softmax. Gradients of
the bias are added in a fixed order, so that the same step gives the same bits.

``fits`` tells whether the kernels support a plan; ``swin.WindowAttention`` computes everything else in plain torch.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton's type stubs describe only scalars, not tiles.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

from frugalvit.backbones.architectures.windows import WindowPlan

MOST_TOKENS = 64  # tokens of the largest window (8 x 8): the scores of one window and head are one tile in registers
HEAD_WIDTHS = (16, 32, 64)
_FORWARD, _BACKWARD = (2, 2), (4, 3)  # warps and stages, the fastest of those tried on an H200
_PROGRAMS = 1024  # fills the largest GPU several times; each loops over its share of the windows


def fits(plan: WindowPlan, width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support this plan: half precision, small windows, no padding or masked padding."""
    small = plan.window[0] * plan.window[1] <= MOST_TOKENS and width in HEAD_WIDTHS
    return small and dtype in (torch.float16, torch.bfloat16) and (plan.mask_padding or not any(plan.padding))


def window_attention(qkv: Tensor, bias: Tensor, plan: WindowPlan) -> Tensor:
    """qkv (B, h, w, 3·heads·d) in half precision, bias (heads, N, N) float -> (B, h, w, heads·d)."""
    return _attend(qkv.contiguous(), bias.contiguous(), numbers_of(plan))


def numbers_of(plan: WindowPlan) -> list[int]:
    """Return a plan as the list of numbers that the kernels take."""
    return [*plan.size, *plan.window, *plan.padded, *plan.roll, *plan.shift]


@triton.jit
def _tokens(
    window, across, height, width, rows, columns, tall, wide, down, right, part_down, part_right, TILE: tl.constexpr
):
    """Return for each token of a window its position on the map, whether it is real, and its region."""
    token = tl.arange(0, TILE)
    row = window // across * rows + token // columns  # on the padded and shifted map
    column = window % across * columns + token % columns
    y, x = row + down, column + right  # before the shift
    y = tl.where(y >= tall, y - tall, y)
    x = tl.where(x >= wide, x - wide, x)
    real = (token < rows * columns) & (y < height) & (x < width)
    # As in windows._axis_regions: after a shift the last window contains tokens from opposite borders.
    above = (row >= tall - rows).to(tl.int32) + (row >= tall - part_down).to(tl.int32)
    above = tl.where(down > 0, above, (y >= part_down).to(tl.int32))
    left = (column >= wide - columns).to(tl.int32) + (column >= wide - part_right).to(tl.int32)
    left = tl.where(right > 0, left, (x >= part_right).to(tl.int32))
    return y * width + x, real, above * 3 + left


@triton.jit
def _powers(query, key, table, real, region, MASKED: tl.constexpr, SCALE: tl.constexpr):
    """(TILE, TILE) float: 2 to the power of the scores minus their row's maximum, and the sum of each row.

    Scores are in units of ln 2, since the hardware computes powers of two; so is ``table``.
    """
    scores = tl.dot(query, tl.trans(key)) * (SCALE * 1.4426950408889634) + table
    if MASKED:
        scores = tl.where((region[:, None] == region[None, :]) & real[None, :], scores, -1e30)
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers, tl.sum(powers, 1)


@triton.jit
def _table(bias, head, count, TILE: tl.constexpr):
    """A head's biases in units of ln 2, and -1e30 beyond the window."""
    token = tl.arange(0, TILE)
    square = (token[:, None] < count) & (token[None, :] < count)
    values = tl.load(bias + (head * count + token[:, None]) * count + token[None, :], mask=square, other=0.0)
    return tl.where(token[None, :] < count, values * 1.4426950408889634, -1e30)


@triton.jit
def forward_kernel(
    qkv, bias, out, windows, each, across,
    height, width, rows, columns, tall, wide, down, right, part_down, part_right,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    table = _table(bias, head, rows * columns, TILE)
    for window in range(tl.program_id(0), windows, tl.num_programs(0)):
        image = (window // each).to(tl.int64) * height * width
        index, real, region = _tokens(
            window % each, across, height, width, rows, columns, tall, wide, down, right, part_down, part_right, TILE
        )
        at = (image + index)[:, None] * (HEADS * WIDTH) + head * WIDTH
        source = qkv + at * 3 - (head * WIDTH * 2) + channel[None, :]
        query = tl.load(source, mask=real[:, None], other=0.0)
        key = tl.load(source + HEADS * WIDTH, mask=real[:, None], other=0.0)
        value = tl.load(source + 2 * HEADS * WIDTH, mask=real[:, None], other=0.0)
        powers, total = _powers(query, key, table, real, region, MASKED, SCALE)
        seen = tl.dot(powers.to(value.dtype), value) * (1.0 / total)[:, None]
        tl.store(out + at + channel[None, :], seen.to(value.dtype), mask=real[:, None])


@triton.jit
def backward_kernel(
    grad, qkv, bias, grad_qkv, grad_bias, windows, each, across,
    height, width, rows, columns, tall, wide, down, right, part_down, part_right,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token, channel = tl.arange(0, TILE), tl.arange(0, WIDTH)
    count = rows * columns
    table = _table(bias, head, count, TILE)
    to_bias = tl.zeros((TILE, TILE), tl.float32)
    for window in range(tl.program_id(0), windows, tl.num_programs(0)):
        image = (window // each).to(tl.int64) * height * width
        index, real, region = _tokens(
            window % each, across, height, width, rows, columns, tall, wide, down, right, part_down, part_right, TILE
        )
        at = (image + index)[:, None] * (HEADS * WIDTH) + head * WIDTH
        three = at * 3 - (head * WIDTH * 2) + channel[None, :]
        query = tl.load(qkv + three, mask=real[:, None], other=0.0)
        key = tl.load(qkv + three + HEADS * WIDTH, mask=real[:, None], other=0.0)
        value = tl.load(qkv + three + 2 * HEADS * WIDTH, mask=real[:, None], other=0.0)
        above = tl.load(grad + at + channel[None, :], mask=real[:, None], other=0.0)
        powers, total = _powers(query, key, table, real, region, MASKED, SCALE)
        share = powers * (1.0 / total)[:, None]
        # dv = pᵀ·do;  dp = do·vᵀ;  ds = p ∘ (dp - Σ p ∘ dp);  dq = ds·k/√d;  dk = dsᵀ·q/√d;  dB = Σ ds
        to_value = tl.dot(tl.trans(share.to(value.dtype)), above)
        to_share = tl.dot(above, tl.trans(value))
        to_score = share * (to_share - tl.sum(share * to_share, 1)[:, None])
        to_bias += to_score
        rounded = to_score.to(value.dtype)
        to_query = tl.dot(rounded, key) * SCALE
        to_key = tl.dot(tl.trans(rounded), query) * SCALE
        tl.store(grad_qkv + three, to_query.to(value.dtype), mask=real[:, None])
        tl.store(grad_qkv + three + HEADS * WIDTH, to_key.to(value.dtype), mask=real[:, None])
        tl.store(grad_qkv + three + 2 * HEADS * WIDTH, to_value.to(value.dtype), mask=real[:, None])
    square = (token[:, None] < count) & (token[None, :] < count)
    inside = ((tl.program_id(0) * HEADS + head) * count + token[:, None]) * count + token[None, :]
    tl.store(grad_bias + inside, to_bias, mask=square)


def launch(
    kernel, tensors: list[Tensor], qkv: Tensor, bias: Tensor, numbers: list[int], shares: int, warps: int, stages: int
) -> None:
    """Start a kernel over (shares of the windows, heads)."""
    heads, width = bias.shape[0], qkv.shape[-1] // 3 // bias.shape[0]
    height, tokens_wide, rows, columns, tall, wide, _, _, *shift = numbers
    masked = (tall, wide) != (height, tokens_wide) or any(shift)
    each, across = (tall // rows) * (wide // columns), wide // columns
    windows = qkv.shape[0] * each
    kernel[(shares, heads)](
        *tensors, windows, each, across, *numbers,
        HEADS=heads, WIDTH=width, TILE=max(16, triton.next_power_of_2(rows * columns)), SCALE=width**-0.5,
        MASKED=masked, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def shares_of(qkv: Tensor, bias: Tensor, numbers: list[int]) -> int:
    """Return the number of programs that share the windows of a batch."""
    _, _, rows, columns, tall, wide = numbers[:6]
    windows = qkv.shape[0] * (tall // rows) * (wide // columns)
    return min(windows, -(-_PROGRAMS // bias.shape[0]))


@library.triton_op("frugalvit::window_attention", mutates_args={})
def _attend(qkv: Tensor, bias: Tensor, numbers: list[int]) -> Tensor:
    out = qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)
    kernel = library.wrap_triton(forward_kernel)
    launch(kernel, [qkv, bias, out], qkv, bias, numbers, shares_of(qkv, bias, numbers), *_FORWARD)
    return out


@library.triton_op("frugalvit::window_attention_backward", mutates_args={})
def _attend_backward(grad: Tensor, qkv: Tensor, bias: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
    shares = shares_of(qkv, bias, numbers)
    grad_qkv, parts = torch.empty_like(qkv), bias.new_empty(shares, *bias.shape)
    kernel = library.wrap_triton(backward_kernel)
    launch(kernel, [grad, qkv, bias, grad_qkv, parts], qkv, bias, numbers, shares, *_BACKWARD)
    return grad_qkv, parts.sum(0)


def _remember(ctx, inputs, output) -> None:
    qkv, bias, ctx.numbers = inputs
    ctx.save_for_backward(qkv, bias)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    qkv, bias = ctx.saved_tensors
    grad_qkv, grad_bias = _attend_backward(grad.contiguous(), qkv, bias, ctx.numbers)
    return grad_qkv, grad_bias, None


_attend.register_autograd(_gradients, setup_context=_remember)


@register_flop_formula(torch.ops.frugalvit.window_attention)
def _operations(qkv: torch.Size, bias: torch.Size, *_: Any, **__: Any) -> int:
    """Two products per window, forward: 2 · 2 · tokens · N · C."""
    return 4 * math.prod(qkv) // 3 * bias[-1]


@register_flop_formula(torch.ops.frugalvit.window_attention_backward)
def _operations_backward(grad: torch.Size, qkv: torch.Size, bias: torch.Size, *_: Any, **__: Any) -> int:
    """Four products per window; recomputed scores are not counted, as usual."""
    return 8 * math.prod(grad) * bias[-1]
