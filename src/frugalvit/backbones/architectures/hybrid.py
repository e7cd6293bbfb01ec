"""Hybrid: convolutions on the fine maps, attention on the coarse ones. The default network of ``frugalvit train``.

A transformer must learn from the images that neighbouring pixels belong together; a convolution has this built in. With
few images the first two stages are therefore those of a ResNet, and only the last two attend. CoAtNet and Visformer
have the same order. Two things differ:

* the convolutions are plain 3x3 ones with batch norm, which a GPU and a CPU compute fastest;
* a depthwise 3x3 convolution is the only position code, so that any image size fits.

At equal GPU time it was the best of eleven networks on photos, drawings, small images and digits: docs/FIRST_RUN.md.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.backbones.architectures import common
from frugalvit.errors import UserError

STEM_STRIDES = {1: (1, 1), 2: (2, 1), 4: (2, 2)}  # the strides of the stem's two convolutions


def conv_norm(dim: int, out_dim: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(dim, out_dim, 3, stride, 1, bias=False), nn.BatchNorm2d(out_dim))


class ConvBlock(nn.Module):
    """A ResNet's basic block: relu(x + norm(conv(relu(norm(conv(x))))))."""

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.first, self.second = conv_norm(dim, dim), conv_norm(dim, dim)
        self.drop_path = common.stochastic_depth(drop_path)
        nn.init.zeros_(self.second[1].weight)  # type: ignore[arg-type]  # the block starts as the identity

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.drop_path(self.second(F.relu(self.first(x)))))


class Attention(nn.Module):
    """x + conv(x), then x + attention(norm(x)) over all cells of the map (B, C, H, W)."""

    def __init__(self, dim: int, heads: int, drop_path: float) -> None:
        super().__init__()
        common.check_heads(dim, heads)
        self.heads = heads
        self.position = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.drop_path = common.stochastic_depth(drop_path)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, C, H, W) -> three of (B, heads, H * W, C / heads)."""
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        return common.split_heads(self.qkv(tokens), self.heads)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position(x)
        queries, keys, values = self.queries_keys_values(x)
        attended = common.join_heads(F.scaled_dot_product_attention(queries, keys, values))
        return x + self.drop_path(self.proj(attended)).transpose(1, 2).unflatten(2, x.shape[2:])

    def attention(self, x: Tensor) -> Tensor:
        queries, keys, _ = self.queries_keys_values(x + self.position(x))
        return common.attention_weights(queries, keys)


class Mlp(nn.Module):
    """x + mlp(norm(x)) in every cell of the map (B, C, H, W)."""

    def __init__(self, dim: int, hidden: int, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.drop_path = common.stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        return x + self.drop_path(self.fc2(F.gelu(self.fc1(tokens)))).transpose(1, 2).unflatten(2, x.shape[2:])


class Hybrid(common.StagedModel):
    """Images (B, C, H, W) -> map (B, 512, H/32, W/32). ``patch_size`` is the stride of the stem: 1, 2 or 4."""

    family = "hybrid"
    stem_names = r"^stem\."
    # A stage's downsampling belongs to the stage before it.
    layer_names = ((r"^layers\.(\d+)\.(\d+)\.", None), (r"^downsamples\.(\d+)\.", (99999,)))

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        patch_size: int = 4,
        embed_dim: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 4, 2),
        head_dim: int = 32,
        conv_stages: int = 2,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        dims = list(embed_dim)
        if len(dims) != len(depths):
            raise UserError(f"embed_dim has {len(dims)} stages and depths {len(depths)}; use one value per stage.")
        super().__init__(dims, depths, patch_size, in_chans, num_classes, drop_rate)
        half = dims[0] // 2
        if patch_size not in STEM_STRIDES:
            raise UserError(f"patch_size={patch_size}: the stem of a hybrid has a stride of 1, 2 or 4.")
        first, second = STEM_STRIDES[patch_size]
        self.stem = nn.Sequential(
            *conv_norm(in_chans, half, first), nn.ReLU(), *conv_norm(half, dims[0], second), nn.ReLU()
        )
        self.downsamples = nn.ModuleList(conv_norm(dim, after, 2) for dim, after in pairwise(dims))
        self.layers = nn.ModuleList()
        for stage, rates in enumerate(common.drop_path_rates(drop_path_rate, depths)):
            dim = dims[stage]
            blocks = [
                [ConvBlock(dim, rate)]
                if stage < conv_stages
                else [Attention(dim, max(1, dim // head_dim), rate), Mlp(dim, int(dim * mlp_ratio), rate)]
                for rate in rates
            ]
            self.layers.append(nn.ModuleList(nn.ModuleList(block) for block in blocks))
        self.norm = nn.LayerNorm(dims[-1])
        self.apply(common.initialize)

    def stage_parts(self) -> common.Parts:
        embeds = [self.embed_images, *self.downsamples]
        return list(zip(embeds, self.layers, strict=True))  # type: ignore[arg-type]

    def embed_images(self, images: Tensor) -> Tensor:
        # Convolutions are faster with the channels last on a GPU, and attention then needs no copies.
        return self.stem(images.contiguous(memory_format=torch.channels_last))


default_cfgs = {
    name: {"first_conv": "stem.0", "classifier": "head"} for name in ("hybrid_nano", "hybrid_tiny", "hybrid_small")
}
# 12 M and 7 M parameters for a GPU, 0.6 M for a CPU
common.register(Hybrid, "hybrid_small")
common.register(Hybrid, "hybrid_tiny", embed_dim=(64, 128, 192, 384))
common.register(Hybrid, "hybrid_nano", embed_dim=(32, 64, 128), depths=(1, 1, 2))
