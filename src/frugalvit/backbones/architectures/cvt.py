"""CvT-13 of the Drloc paper: convolutions in the embeddings and in the projections of attention.

Wu et al., "CvT: Introducing Convolutions to Vision Transformers" (2021), in the shape of the Drloc experiments:

* three stages, widths 64-192-384, depths 1-2-10, heads 1-3-6 of 64 channels each;
* no class token and no final norm: the classifier sees the mean of the last map;
* a norm over channels that divides by (standard deviation + 1e-5);
* queries from a depthwise 3x3 convolution of stride 1, keys and values from one of stride 2, so that a map of
  h x w positions attends to ceil(h/2) x ceil(w/2) keys.

19.94 M parameters with 1,000 classes. Inputs of any size, square or not.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.backbones.architectures import common


class ChannelNorm(nn.Module):
    """(x - mean) / (std + eps) * g + b over the channels of (B, C, H, W), with the population std."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1, dim, 1, 1))
        self.b = nn.Parameter(torch.zeros(1, dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        # At least float32, also under autocast: a variance in bf16 is too inaccurate.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        # The derivative of sqrt is infinite at 0 (a constant column of channels, as from a blank image).
        deviation = variance.clamp_min(torch.finfo(wide.dtype).tiny).sqrt()
        return (centred / (deviation + self.eps) * self.g + self.b).to(self.g.dtype)


class Pointwise(nn.Conv2d):
    """A convolution of 1x1, on a GPU as a matrix product: its gradients are faster. It reads maps channels-last."""

    def __init__(self, dim: int, out_dim: int, bias: bool = True) -> None:
        super().__init__(dim, out_dim, 1, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input) if input.is_cuda else super().forward(input)

    def multiply(self, maps: Tensor) -> Tensor:
        return F.linear(maps.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def projection(dim: int, out_dim: int, stride: int) -> nn.Sequential:
    """Depthwise convolution, batch norm, pointwise convolution: (B, C, H, W) -> (B, out, H/s, W/s)."""
    depthwise = nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False)
    return common.sequence(depthwise, nn.BatchNorm2d(dim), Pointwise(dim, out_dim, bias=False))


class ConvAttention(nn.Module):
    """Every position of the map attends to the keys of the map at half resolution."""

    def __init__(self, dim: int, heads: int, head_dim: int, key_stride: int, drop: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.key_stride = key_stride
        self.to_q = projection(dim, heads * head_dim, stride=1)
        self.to_kv = projection(dim, 2 * heads * head_dim, stride=key_stride)
        self.to_out = nn.Sequential(Pointwise(heads * head_dim, dim), nn.Dropout(drop))

    def split(self, maps: Tensor) -> Tensor:
        """(B, heads * d, h, w) -> (B, heads, h * w, d)."""
        return maps.unflatten(1, (self.heads, self.head_dim)).flatten(3).transpose(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.to_kv(x).chunk(2, dim=1)
        out = F.scaled_dot_product_attention(self.split(self.to_q(x)), self.split(keys), self.split(values))
        return self.to_out(out.transpose(2, 3).reshape(x.shape[0], -1, *x.shape[2:]))

    def attention(self, x: Tensor) -> Tensor:
        """Return (B, heads, T, T). The cells of a square with side ``key_stride`` share the weight of its key."""
        height, width = x.shape[2:]
        key_map = self.to_kv(x).chunk(2, dim=1)[0]
        weights = common.attention_weights(self.split(self.to_q(x)), self.split(key_map))
        rows = torch.arange(height, device=x.device) // self.key_stride
        columns = torch.arange(width, device=x.device) // self.key_stride
        key_of_cell = (rows[:, None] * key_map.shape[3] + columns).flatten()
        cells_of_key = torch.bincount(key_of_cell, minlength=weights.shape[3])
        return (weights / cells_of_key)[..., key_of_cell]


def mlp(dim: int, hidden: int, drop: float) -> nn.Sequential:
    """Two pointwise convolutions. With dropout they have the indices 0 and 3, as in the release."""
    expand, reduce = Pointwise(dim, hidden), Pointwise(hidden, dim)
    return common.sequence(expand, nn.GELU(), nn.Dropout(drop), reduce, nn.Dropout(drop))


class CvT(common.StagedModel):
    """Images (B, C, H, W) -> map (B, 384, H/16, W/16). ``patch_size`` is the stride of the first embedding."""

    family = "cvt"
    stem_names = r"^layers\.0\.[01]\."
    # A later stage's embedding belongs to the stage's first block.
    layer_names = ((r"^layers\.(\d+)\.2\.layers\.(\d+)\.", None), (r"^layers\.(\d+)\.[01]\.", (0,)))

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        patch_size: int = 4,
        embed_dim: int | Sequence[int] = 64,
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        head_dim: int = 64,
        mlp_ratio: float = 4.0,
        key_stride: int = 2,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        dims = common.stage_widths(embed_dim, (1, 3, 6), depths, num_heads)
        strides = (patch_size, *[2] * (len(dims) - 1))
        super().__init__(dims, depths, patch_size, in_chans, num_classes, drop_rate)
        layers: list[nn.Module] = []
        rates = common.drop_path_rates(drop_path_rate, depths)
        for stage, (dim, stride) in enumerate(zip(dims, strides, strict=True)):
            kernel = 7 if stage == 0 else 3
            blocks: list[nn.Module] = []
            for rate in rates[stage]:
                attention = ConvAttention(dim, num_heads[stage], head_dim, key_stride, proj_drop_rate)
                halves = [attention, mlp(dim, int(dim * mlp_ratio), proj_drop_rate)]
                blocks.append(nn.Sequential(*(common.Residual(ChannelNorm(dim), half, rate) for half in halves)))
            embed = nn.Conv2d(in_chans if stage == 0 else dims[stage - 1], dim, kernel, stride, kernel // 2)
            layers.append(nn.Sequential(embed, ChannelNorm(dim), common.Blocks(blocks)))
        self.layers = nn.Sequential(*layers)

    def stage_parts(self) -> common.Parts:
        return [(functools.partial(_embed, stage), list(stage[2].layers)) for stage in self.layers]  # type: ignore[index, misc]

    def regions(self) -> list[nn.Module]:
        return [*(stage[1] for stage in self.layers), *super().regions()]  # type: ignore[index]

    def final_norm(self, grid: Tensor) -> Tensor:
        return grid


def _embed(stage: Any, grid: Tensor) -> Tensor:
    # Channels-last, attention and pointwise convolutions need no copies on a GPU.
    return stage[1](stage[0](grid.contiguous(memory_format=torch.channels_last) if grid.is_cuda else grid))


default_cfgs = {"cvt_13": {"first_conv": "layers.0.0", "classifier": "head"}}
common.register(CvT, "cvt_13")
