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

The map is padded to full windows. ``padding="masked"`` (default) pads after the convolution and masks the padding in
attention. ``padding="zeros"``, as released, pads before the convolution and attends to the padding.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers.activations import QuickGELU
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from frugalvit.backbones.architectures import common
from frugalvit.backbones.architectures.windows import (
    WindowPlan,
    map_attention,
    plan_windows,
    score_bias,
    window_partition,
    window_reverse,
)
from frugalvit.errors import UserError

Padding = Literal["masked", "zeros"]


def embedding(in_dim: int, dim: int, kernel: int, stride: int) -> nn.Sequential:
    """Overlapping convolution, then a norm: (B, C, H, W) -> (B, D, H / stride, W / stride)."""
    convolution = nn.Conv2d(in_dim, dim, kernel, stride, (kernel - stride + 1) // 2)
    return nn.Sequential(OrderedDict(proj=convolution, norm=common.MapNorm(dim)))


def projection(dim: int) -> nn.Sequential:
    """(B, C, H, W) -> queries, keys and values together, (B, 3 C, H, W)."""
    depthwise = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
    return nn.Sequential(OrderedDict(dw=depthwise, bn=nn.BatchNorm2d(dim), pw=nn.Conv2d(dim, 3 * dim, 1)))


class WindowAttention(nn.Module):
    """softmax(q k^T / sqrt(C) + bias) v among the positions of each window of a map (B, C, H, W)."""

    def __init__(self, dim: int, heads: int, window: int, relative_bias: bool, padding: Padding) -> None:
        super().__init__()
        self.dim = dim
        self.heads = heads
        self.window = window
        self.window_size = (window, window)  # other windowed networks use this name
        self.padding = padding
        self.qkv = projection(dim)
        self.proj_out = nn.Conv2d(dim, dim, 1)
        # One entry per row and column offset in [-(window - 1), window - 1]; smaller windows use inner entries.
        table = torch.zeros((2 * window - 1) ** 2, heads) if relative_bias else None
        self.relative_position_bias_table = None if table is None else nn.Parameter(trunc_normal_(table, std=0.02))

    def plan(self, height: int, width: int) -> WindowPlan:
        if self.padding == "masked":
            return plan_windows((height, width), self.window_size, (0, 0), True)
        side = min(self.window, height, width)
        return plan_windows((height, width), (side, side), (0, 0), False)._replace(table=self.window_size)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, WindowPlan]:
        """Return q, k and v, each (B * windows, heads, N, d), the bias of the scores, and the windows."""
        plan = self.plan(x.shape[2], x.shape[3])
        if self.padding == "zeros":
            qkv = self.qkv(F.pad(x, (0, plan.padding[1], 0, plan.padding[0])))
            windows = window_partition(qkv.permute(0, 2, 3, 1), plan._replace(padding=(0, 0)))
        else:
            windows = window_partition(self.qkv(x).permute(0, 2, 3, 1), plan)
        queries, keys, values = common.split_heads(windows, self.heads)
        return queries, keys, values, score_bias(self.relative_position_bias_table, plan, queries), plan

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values, bias, plan = self.project(x)
        out = F.scaled_dot_product_attention(queries, keys, values, bias, scale=self.dim**-0.5)
        return self.proj_out(window_reverse(common.join_heads(out), plan).permute(0, 3, 1, 2))

    def attention(self, x: Tensor) -> Tensor:
        """(B, heads, T, T) over the T positions of the map: zero between windows, without padding."""
        queries, keys, _, bias, plan = self.project(x)
        return map_attention(common.attention_weights(queries, keys, bias, self.dim**-0.5), plan)


class WindowedCvT(common.StagedModel):
    """Images (B, C, H, W) -> map (B, 768, H/32, W/32). ``patch_size`` is the stride of the first embedding."""

    family = "cvt"
    stem_names = r"^stage0\.0\."
    # A later stage's embedding belongs to the stage's first block.
    layer_names = ((r"^stage(\d+)\.1\.layers\.(\d+)\.", None), (r"^stage(\d+)\.0\.", (0,)))

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
        super().__init__(dims, depths, patch_size, in_chans, num_classes, drop_rate)
        rates = common.drop_path_rates(drop_path_rate, depths)
        for stage, dim in enumerate(dims):
            common.check_heads(dim, num_heads[stage])
            embed = embedding(dims[stage - 1], dim, 3, 2) if stage else embedding(in_chans, dim, 7, patch_size)
            blocks: list[nn.Module] = []
            for rate in rates[stage]:
                attention = WindowAttention(dim, num_heads[stage], window_size, relative_bias, padding)
                hidden = int(dim * mlp_ratio)
                mlp = common.sequence(nn.Conv2d(dim, hidden, 1), QuickGELU(), nn.Conv2d(hidden, dim, 1))
                halves = [common.Residual(common.MapNorm(dim), half, rate) for half in (attention, mlp)]
                blocks.append(nn.Sequential(*halves))
            self.feature_info[stage]["module"] = f"stage{stage}"
            self.add_module(f"stage{stage}", nn.Sequential(embed, common.Blocks(blocks)))
        self.norm = nn.LayerNorm(dims[-1])
        self.apply(initialize)

    def stage_parts(self) -> common.Parts:
        stages = [getattr(self, f"stage{stage}") for stage in range(len(self.stage_ends))]
        return [(embed, list(blocks.layers)) for embed, blocks in stages]


def initialize(module: nn.Module) -> None:
    """Initialize linear layers and pointwise convolutions: truncated normal with std 0.02, zero biases.

    Spatial convolutions keep torch's initialization: a norm follows each, so their scale does not matter.
    """
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)):
        common.small_normal(module)


default_cfgs = {"cvt_tiny_w7": {"first_conv": "stage0.0.proj", "classifier": "head"}}
common.register(WindowedCvT, "cvt_tiny_w7", drop_path_rate=0.1)
