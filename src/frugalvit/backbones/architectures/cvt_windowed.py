"""CvT-T of EsViT, window size 7: attention within windows, convolutions between them.

Li et al., "Efficient Self-supervised Vision Transformers for Representation Learning" (EsViT, 2022), 2.1, A.2 and
Table 6, after Wu et al., "CvT" (2021):

* four stages, widths 64-192-384-768, depths 2-2-6-2, heads 1-3-6-12; embeddings are convolutions 7/4 and 3/2;
* one depthwise 3x3 convolution, batch norm and a pointwise convolution give queries, keys and values together;
* attention within windows of 7 x 7 (or the full map if it is smaller), never shifted: windows exchange information only
  through the 3x3 convolutions and the embeddings;
* scores are scaled by (full width)^-1/2, not by (head width)^-1/2; the MLP uses x * sigmoid(1.702 x);
* a relative position bias per window and head, as in the paper. The released runs did not use it:
  ``relative_bias=False``, 29.30 M parameters.

Inputs of any size, square or not: the map is padded to full windows. ``padding="masked"`` (default) pads after the
convolution and masks the padding in attention. ``padding="zeros"`` is the released form: it pads with zeros before the
convolution and attends to the padding like any position.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers.activations import QuickGELU
from timm.layers.weight_init import trunc_normal_
from timm.models import register_model
from torch import Tensor, nn

from frugalvit.backbones.architectures import common
from frugalvit.errors import UserError

Padding = Literal["masked", "zeros"]


class Embedding(nn.Module):
    """Overlapping convolution, then a norm: (B, C, H, W) -> (B, D, H / stride, W / stride)."""

    def __init__(self, in_dim: int, dim: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_dim, dim, kernel, stride, (kernel - stride + 1) // 2)
        self.norm = common.MapNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        common.check_pixels(x, int(self.proj.kernel_size[0]), int(self.proj.padding[0]))
        return self.norm(self.proj(x))


class ConvProjection(nn.Module):
    """(B, C, H, W) -> queries, keys and values together, (B, 3 C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)
        self.pw = nn.Conv2d(dim, 3 * dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pw(self.bn(self.dw(x)))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(dim, hidden, 1), QuickGELU(), nn.Conv2d(hidden, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class WindowAttention(nn.Module):
    """softmax(q k^T / sqrt(C) + bias) v among the positions of each window of a map (B, C, H, W)."""

    def __init__(self, dim: int, heads: int, window: int, relative_bias: bool, padding: Padding) -> None:
        super().__init__()
        self.dim = dim
        self.heads = heads
        self.window = window
        self.window_size = (window, window)  # other windowed networks use this name
        self.padding = padding
        self.qkv = ConvProjection(dim)
        self.proj_out = nn.Conv2d(dim, dim, 1)
        # One entry per row and column offset in [-(window - 1), window - 1]; smaller windows use inner entries.
        table = torch.zeros((2 * window - 1) ** 2, heads) if relative_bias else None
        self.relative_position_bias_table = None if table is None else nn.Parameter(trunc_normal_(table, std=0.02))

    def window_of(self, height: int, width: int) -> tuple[int, int]:
        if self.padding == "zeros":
            side = min(self.window, height, width)
            return side, side
        return min(self.window, height), min(self.window, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return q, k, v as (3, B, windows * heads, N, d), N positions per window, and the bias of the scores."""
        height, width = x.shape[2:]
        window = self.window_of(height, width)
        fill = (0, -width % window[1], 0, -height % window[0])
        qkv = F.pad(self.qkv(x), fill) if self.padding == "masked" else self.qkv(F.pad(x, fill))
        tall, wide = qkv.shape[2] // window[0], qkv.shape[3] // window[1]
        parts = qkv.reshape(x.shape[0], 3, self.heads, -1, tall, window[0], wide, window[1])
        parts = parts.permute(1, 0, 4, 6, 2, 5, 7, 3).reshape(
            3, x.shape[0], tall * wide * self.heads, window[0] * window[1], -1
        )
        bias = self.bias(window)
        if self.padding == "masked" and any(fill):
            real_rows = (torch.arange(qkv.shape[2], device=x.device) < height).view(tall, 1, window[0], 1)
            real_columns = (torch.arange(qkv.shape[3], device=x.device) < width).view(1, wide, 1, window[1])
            real = (real_rows & real_columns).reshape(tall * wide, 1, 1, -1)
            bias = torch.where(real, 0.0 if bias is None else bias, float("-inf"))
        if bias is not None:
            # Windows and heads share one axis, so that the bias is not copied per image.
            bias = bias.expand(tall * wide, self.heads, *[window[0] * window[1]] * 2).flatten(0, 1).to(qkv.dtype)
        return parts, bias

    def bias(self, window: tuple[int, int]) -> Tensor | None:
        """Return (heads, N, N): the table's entries for the offsets between all positions of a window."""
        table = self.relative_position_bias_table
        if table is None:
            return None
        rows, columns = (torch.arange(side, device=table.device) for side in window)
        row_offset = (rows[:, None] - rows)[:, None, :, None] + self.window - 1
        column_offset = (columns[:, None] - columns)[None, :, None, :] + self.window - 1
        index = (row_offset * (2 * self.window - 1) + column_offset).flatten(2).flatten(0, 1)
        return table[index].permute(2, 0, 1)

    def merge(self, windows: Tensor, height: int, width: int) -> Tensor:
        """(B, windows * heads, N, d) -> (B, heads * d, height, width), without the padding."""
        window = self.window_of(height, width)
        tall, wide = -(-height // window[0]), -(-width // window[1])
        maps = windows.reshape(windows.shape[0], tall, wide, self.heads, *window, -1).permute(0, 3, 6, 1, 4, 2, 5)
        return maps.reshape(windows.shape[0], -1, tall * window[0], wide * window[1])[:, :, :height, :width]

    def forward(self, x: Tensor) -> Tensor:
        (queries, keys, values), bias = self.project(x)
        out = F.scaled_dot_product_attention(queries, keys, values, bias, scale=self.dim**-0.5)
        return self.proj_out(self.merge(out, x.shape[2], x.shape[3]))

    def attention(self, x: Tensor) -> Tensor:
        """(B, heads, T, T) over the T positions of the map: zero between windows, without padding."""
        batch, (height, width) = x.shape[0], x.shape[2:]
        (queries, keys, _), bias = self.project(x)
        scores = (queries @ keys.transpose(2, 3)).float() * self.dim**-0.5
        weights = (scores if bias is None else scores + bias).softmax(-1)
        window = self.window_of(height, width)
        tall, wide = -(-height // window[0]), -(-width // window[1])
        cells = torch.arange(tall * window[0] * wide * window[1], device=x.device)
        index = cells.view(tall, window[0], wide, window[1]).transpose(1, 2).reshape(tall * wide, -1)
        full = weights.new_zeros(batch, self.heads, len(cells), len(cells))
        full[:, :, index[:, :, None], index[:, None]] = weights.unflatten(1, (-1, self.heads)).transpose(1, 2)
        real = cells.view(tall * window[0], wide * window[1])[:height, :width].flatten()
        full = full[:, :, real][..., real]
        return full / full.sum(-1, keepdim=True)


class WindowedCvT(common.StagedModel):
    """Images (B, C, H, W) -> map (B, 768, H/32, W/32). ``patch_size`` is the stride of the first embedding."""

    family = "cvt"
    stem_names = r"^stage0\.0\."

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        patch_size: int = 4,
        window_size: int = 7,
        embed_dim: int | Sequence[int] = 64,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 3, 6, 12),
        mlp_ratio: float = 4.0,
        relative_bias: bool = True,
        padding: Padding = "masked",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if padding not in ("masked", "zeros"):
            raise UserError(f"padding={padding!r} is unknown; choose 'masked' or 'zeros' (as released EsViT).")
        dims = common.stage_widths(embed_dim, (1, 3, 6, 12), depths, num_heads)
        super().__init__(
            dims, depths, patch_size=patch_size, in_chans=in_chans, num_classes=num_classes, drop_rate=drop_rate
        )
        rates = common.drop_path_rates(drop_path_rate, depths)
        for stage, dim in enumerate(dims):
            common.check_heads(dim, num_heads[stage])
            embed = Embedding(dims[stage - 1], dim, 3, 2) if stage else Embedding(in_chans, dim, 7, patch_size)
            blocks = [
                nn.Sequential(
                    common.Residual(
                        common.MapNorm(dim),
                        WindowAttention(dim, num_heads[stage], window_size, relative_bias, padding),
                        rate,
                    ),
                    common.Residual(common.MapNorm(dim), Mlp(dim, int(dim * mlp_ratio)), rate),
                )
                for rate in rates[stage]
            ]
            self.feature_info[stage]["module"] = f"stage{stage}"
            self.add_module(f"stage{stage}", nn.Sequential(embed, common.Blocks(blocks)))
        self.norm = nn.LayerNorm(dims[-1])
        self.apply(initialize)

    def layer_names(self) -> list[tuple[str, tuple[int, ...] | None]]:
        # A later stage's embedding belongs to the stage's first block.
        return [(r"^stage(\d+)\.1\.layers\.(\d+)\.", None), (r"^stage(\d+)\.0\.", (0,))]

    def stage_parts(self) -> common.Parts:
        stages = [getattr(self, f"stage{stage}") for stage in range(len(self.stage_ends))]
        return [(embed, list(blocks.layers)) for embed, blocks in stages]


def initialize(module: nn.Module) -> None:
    """Initialize linear layers and pointwise convolutions: truncated normal with std 0.02, zero biases.

    Spatial convolutions keep torch's initialization: a norm follows each, so their scale does not matter.
    """
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)):
        common.small_normal(module)


default_cfgs = {"cvt_tiny_w7": common.timm_cfg(first_conv="stage0.0.proj")}


@register_model
def cvt_tiny_w7(pretrained: bool = False, **keywords) -> WindowedCvT:
    """CvT-T, W=7, of EsViT."""
    return common.build(WindowedCvT, "cvt_tiny_w7", 4, pretrained, {"drop_path_rate": 0.1, **keywords})
