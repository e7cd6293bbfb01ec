"""The layers of our Swin: patches, merging, attention in windows, blocks and stages. Tokens are (B, h, w, C)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from frugalvit.backbones.heads import join_heads
from frugalvit.backbones.relative_bias import relative_bias
from frugalvit.backbones.windows import Size, WindowPlan, cut, join, mask, plan_windows
from frugalvit.kernels import KERNELS

if KERNELS:
    from frugalvit.backbones.window_kernel import fits, window_attention


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens: (B, C, H, W) -> (B, H/p, W/p, D). An image is zero-padded to whole patches."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        patch = self.patch_size
        if height % patch or width % patch:
            images = functional.pad(images, (0, -width % patch, 0, -height % patch))
            height, width = images.shape[2:]
        # The convolution as a matrix product: tokens come out last-channel, and the copy is of pixels, not of tokens.
        patches = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.norm(functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias))


class PatchMerging(nn.Module):
    """Four neighbours to one token of another width: (B, h, w, C) -> (B, ceil(h/2), ceil(w/2), D)."""

    def __init__(self, dim: int, out_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=norm_eps)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        height, width = tokens.shape[1:3]
        if height % 2 or width % 2:
            tokens = functional.pad(tokens, (0, 0, 0, width % 2, 0, height % 2))
        batch, height, width, channels = tokens.shape
        tokens = tokens.reshape(batch, height // 2, 2, width // 2, 2, channels)
        tokens = tokens.permute(0, 1, 3, 4, 2, 5).flatten(3)  # the published order: down first, then right
        return self.reduction(self.norm(tokens))


class WindowAttention(nn.Module):
    """softmax(q kᵀ / √d + B) v within windows; B is read from a table by relative offset (Swin Eq. 4)."""

    def __init__(self, dim: int, num_heads: int, window_size: Size) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        table = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(table, num_heads))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, plan: WindowPlan) -> Tensor:
        """(B, h, w, C) -> the same shape, by one kernel over the map where that serves, else window by window."""
        if self._kernels_serve(tokens, plan):
            bias = relative_bias(self.relative_position_bias_table, plan).permute(2, 0, 1)
            return self.proj(window_attention(self.qkv(tokens), bias, plan))
        query, key, value = self._heads(cut(tokens, plan))
        bias = self._bias(plan, query)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return join(self.proj(join_heads(attended)), plan)

    def _kernels_serve(self, tokens: Tensor, plan: WindowPlan) -> bool:
        if not KERNELS or not tokens.is_cuda:  # models are exported from the CPU: an export never holds a kernel
            return False
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else tokens.dtype
        return fits(plan, tokens.shape[-1] // self.num_heads, dtype) and _modern(tokens.device)

    def weights(self, windows: Tensor, plan: WindowPlan) -> Tensor:
        """The softmax itself, (B * windows, heads, N, N), for looking at: at least in fp32, so that rows sum to 1."""
        query, key, _ = self._heads(windows)
        scores = query @ key.transpose(-2, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * query.shape[-1] ** -0.5
        return (scores + self._bias(plan, query)).softmax(-1)

    def _heads(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count, tokens, _ = windows.shape
        query, key, value = self.qkv(windows).view(count, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return query, key, value

    def _bias(self, plan: WindowPlan, query: Tensor) -> Tensor:
        """Relative bias plus mask, (1 or B * windows, heads, N, N), in the precision of the scores."""
        # Read in full precision, then rounded: the gradients of a table entry, one per pair, add up in full precision.
        bias = relative_bias(self.relative_position_bias_table, plan).to(query.dtype).permute(2, 0, 1)[None]
        forbidden = mask(plan, query)
        if forbidden is None:
            return bias
        bias = bias + forbidden.to(query.dtype)[:, None]  # (windows, heads, N, N)
        images = query.shape[0] // plan.count
        return bias[None].expand(images, -1, -1, -1, -1).flatten(0, 1)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Leave the kernels out for a while, to compare with them."""
    global KERNELS
    before, KERNELS = KERNELS, False
    try:
        yield
    finally:
        KERNELS = before


@torch.compiler.assume_constant_result
def _modern(device: torch.device) -> bool:
    """Ampere or later: matrix units for bfloat16."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


class Block(nn.Module):
    """x + attention(norm(x)) in windows, then x + MLP(norm(x)); tokens are (B, h, w, C)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: Size,
        shift: Size,
        mlp_ratio: float,
        drop_path: float,
        mask_padding: bool,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.shift = shift
        self.mask_padding = mask_padding
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = WindowAttention(dim, num_heads, window_size)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def plan(self, tokens: Tensor) -> WindowPlan:
        size = (tokens.shape[1], tokens.shape[2])
        return plan_windows(size, self.attn.window_size, self.shift, self.mask_padding)

    def forward(self, tokens: Tensor) -> Tensor:
        plan = self.plan(tokens)
        tokens = tokens + self.drop_path1(self.attn(self.norm1(tokens), plan))
        return tokens + self.drop_path2(self.mlp(self.norm2(tokens)))


class Stage(nn.Module):
    """Merging of the stage before (none in the first), then blocks whose windows alternate between two places."""

    def __init__(self, downsample: nn.Module, blocks: list[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, tokens: Tensor) -> Tensor:
        return self.forward_blocks(tokens)[-1]

    def block_list(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def forward_blocks(self, tokens: Tensor) -> list[Tensor]:
        """Every block's output."""
        tokens = self.downsample(tokens)
        outputs = []
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, use_reentrant=False)  # type: ignore[assignment]
            else:
                tokens = block(tokens)
            outputs.append(tokens)
        return outputs
