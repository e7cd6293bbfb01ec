"""T2T-ViT-14: tokens from overlapping patches in three steps, then a transformer with a class token.

Yuan et al., "Tokens-to-Token ViT" (2021), in the shape of the Drloc experiments:

* three soft splits (windows 7, 3, 3 with strides 4, 2, 2) concatenate the pixels or tokens of a window; after each of
  the first two a small performer of width 64 mixes the tokens in linear time;
* fixed sinusoids over the token number as position embedding, bicubically resampled for other sizes;
* 14 blocks of width 384, 6 heads, MLP ratio 3, no bias in the q, k, v projection, LayerNorm eps 1e-5.

21.55 M parameters with 1,000 classes. The grid is the final tokens after the last norm; ``pooled`` is the class token.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.weight_init import trunc_normal_
from timm.models import vision_transformer
from torch import Tensor, nn

from frugalvit.backbones.architectures import common

Tokens = tuple[Tensor, int, int]  # (B, 1 + h * w, D) with the class token first, h, w


class Performer(nn.Module):
    """One-headed attention in linear time, by positive random features (Choromanski et al., 2021).

    softmax(q k) v is approximated by phi(q) (phi(k)^T v) / (phi(q) sum_t phi(k_t)) with
    phi(x) = exp(w x - |x|^2 / 2) / sqrt(m) and m orthogonal rows w, drawn once and never trained. The residual
    connection starts at the values, since the width changes: (B, T, in) -> (B, T, dim).
    """

    def __init__(self, in_dim: int, dim: int, kernel_ratio: float = 0.5) -> None:
        super().__init__()
        self.features = int(dim * kernel_ratio)
        self.norm1 = nn.LayerNorm(in_dim)
        self.kqv = nn.Linear(in_dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        random_rows = nn.init.orthogonal_(torch.empty(self.features, dim)) * math.sqrt(self.features)
        self.w = nn.Parameter(random_rows, requires_grad=False)

    def phi(self, x: Tensor) -> Tensor:
        exponent = x @ self.w.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() / math.sqrt(self.features)

    def forward(self, x: Tensor) -> Tensor:
        keys, queries, values = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        # Exponents are too inaccurate in bf16 and exp overflows in fp16, so this part is at least float32.
        precise = torch.promote_types(values.dtype, torch.float32)
        shapes_only = x.device.type == "meta"  # it has no autocast
        with nullcontext() if shapes_only else torch.autocast(x.device.type, enabled=False):
            key_features, query_features = self.phi(keys.to(precise)), self.phi(queries.to(precise))
            total = query_features @ key_features.sum(1).unsqueeze(-1)
            mixed = query_features @ (key_features.transpose(1, 2) @ values.to(precise)) / (total + 1e-8)
        x = values + self.proj(mixed.to(values.dtype))
        return x + self.mlp(self.norm2(x))


class SoftSplit:
    """Concatenates each overlapping window to one token: (B, C, H, W) -> (B, h * w, C * kernel^2), h, w."""

    def __init__(self, kernel: int, stride: int) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, (kernel - stride + 1) // 2

    def steps(self, side: int) -> int:
        """Return the number of windows along a side."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1

    def __call__(self, maps: Tensor) -> Tokens:
        windows = F.unfold(maps, self.kernel, stride=self.stride, padding=self.padding)
        return windows.transpose(1, 2), self.steps(maps.shape[2]), self.steps(maps.shape[3])


class TokensToToken(nn.Module):
    """Images (B, C, H, W) -> tokens (B, h * w, embed_dim), h, w."""

    def __init__(self, in_chans: int, patch_size: int, token_dim: int, embed_dim: int) -> None:
        super().__init__()
        self.splits = (SoftSplit(7, patch_size), SoftSplit(3, 2), SoftSplit(3, 2))
        self.attention1 = Performer(in_chans * 7 * 7, token_dim)
        self.attention2 = Performer(token_dim * 3 * 3, token_dim)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    def steps(self, side: int) -> int:
        """Return the number of tokens along a side of an image."""
        for split in self.splits:
            side = split.steps(side)
        return side

    def forward(self, images: Tensor) -> Tokens:
        maps = images
        for split, mix in zip(self.splits, (self.attention1, self.attention2, self.project), strict=True):
            windows, height, width = split(maps)
            tokens = mix(windows)
            maps = tokens.transpose(1, 2).unflatten(2, (height, width))
        return tokens, height, width


class Block(vision_transformer.Block):
    """timm's block; the state also contains the size of the grid."""

    def forward(self, state: Tokens) -> Tokens:  # type: ignore[override]
        tokens, height, width = state
        return super().forward(tokens), height, width

    def attention(self, state: Tokens) -> Tensor:
        attention: Any = self.attn
        queries, keys, _ = common.split_heads(attention.qkv(self.norm1(state[0])), attention.num_heads)
        return common.attention_weights(queries, keys)


def sinusoids(positions: int, dim: int) -> Tensor:
    """(1, positions, dim): sine (even c) or cosine (odd c) of position / 10000^(2 floor(c/2) / dim)."""
    channel = torch.arange(dim, dtype=torch.float64)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (2 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()[None]


class T2TViT(common.StagedModel):
    """Images (B, C, H, W) -> tokens, a class token first. ``patch_size`` is the first stride; two of 2 follow it."""

    family = "t2t"
    has_class_token = True
    stem_names = r"^cls_token|pos_embed|tokens_to_token"
    layer_names = ((r"^blocks\.(\d+)\.", None),)

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        patch_size: int = 4,
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        token_dim: int = 64,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        common.check_heads(embed_dim, num_heads)
        super().__init__([embed_dim], [depth], patch_size, in_chans, num_classes, drop_rate)
        self.feature_info[0] |= {"reduction": 4 * patch_size, "module": "blocks"}
        self.tokens_to_token = TokensToToken(in_chans, patch_size, token_dim, embed_dim)
        sides = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.grid_size = (self.tokens_to_token.steps(sides[0]), self.tokens_to_token.steps(sides[1]))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        positions = sinusoids(1 + self.grid_size[0] * self.grid_size[1], embed_dim)
        self.pos_embed = nn.Parameter(positions, requires_grad=False)
        (rates,) = common.drop_path_rates(drop_path_rate, [depth])
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, drop_path=rate, norm_layer=nn.LayerNorm) for rate in rates
        )
        self.norm = nn.LayerNorm(embed_dim)
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(common.initialize)

    def stage_parts(self) -> common.Parts:
        return [(self.embed, [[block] for block in self.blocks])]

    def regions(self) -> list[nn.Module]:
        # The soft splits between the performers stay uncompiled: compiled, their gradients are atomic additions.
        return [self.tokens_to_token.attention1, self.tokens_to_token.attention2, *super().regions()]

    def embed(self, images: Tensor) -> Tokens:
        tokens, height, width = self.tokens_to_token(images)
        tokens = torch.cat([self.cls_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)
        positions = resample_abs_pos_embed(self.pos_embed, [height, width], list(self.grid_size), antialias=False)
        return tokens + positions, height, width

    def to_grid(self, state: Tokens) -> Tensor:
        tokens, height, width = state
        return tokens[:, 1:].transpose(1, 2).unflatten(2, (height, width))

    def forward_grid(self, images: Tensor, norm: bool = True) -> tuple[Tensor, Tensor]:
        tokens, height, width = self.run_blocks(images)
        normed = self.norm(tokens)
        return self.to_grid((normed if norm else tokens, height, width)), self.head_drop(normed[:, 0])

    def forward_features(self, images: Tensor) -> Tensor:
        return self.norm(self.run_blocks(images)[0])

    def pool(self, features: Tensor) -> Tensor:
        return features[:, 0]


default_cfgs = {"t2t_vit_14": {"first_conv": "tokens_to_token.attention1.kqv", "classifier": "head"}}
common.register(T2TViT, "t2t_vit_14")
