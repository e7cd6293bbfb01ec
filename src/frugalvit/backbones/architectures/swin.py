"""Swin Transformer (Liu et al., 2021, arXiv:2103.14030) for maps of any size, for EsViT and Drloc.

timm has a Swin too. This one has three reasons. (1) The released EsViT pads before it shifts, timm shifts before it
pads: they differ at every size that windows do not divide. (2) New training should mask the padding. (3) One object
takes every crop size without rebuilding masks in each call. Parameter names are timm's, so weights can be exchanged. At
sizes that windows divide, both compute the same.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from timm.layers.classifier import ClassifierHead
from timm.layers.mlp import Mlp
from timm.models import generate_default_cfgs, swin_transformer
from torch import Tensor, nn
from torch.nn import functional

from frugalvit.backbones.architectures import common
from frugalvit.backbones.architectures.windows import (
    Size,
    WindowPlan,
    map_attention,
    plan_windows,
    relative_bias,
    score_bias,
    window_partition,
    window_reverse,
)
from frugalvit.backbones.timm_features import quiet_tables
from frugalvit.errors import UserError
from frugalvit.utils.triton import TRITON_AVAILABLE

if TRITON_AVAILABLE:
    from frugalvit.backbones.architectures.window_kernel import fits, window_attention

Padding = Literal["masked", "zeros"]


class PatchEmbed(nn.Module):
    """Turn patches into tokens, with zero padding to full patches: (B, C, H, W) -> (B, H/p, W/p, D)."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj: nn.Module = nn.Conv2d(in_chans, dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        patch = self.patch_size
        if height % patch or width % patch:
            images = functional.pad(images, (0, -width % patch, 0, -height % patch))
            height, width = images.shape[2:]
        if not isinstance(self.proj, nn.Conv2d):  # --stem conv
            return self.norm(self.proj(images).permute(0, 2, 3, 1))
        # The convolution as a matrix product: tokens are channels-last, and pixels are copied instead of tokens.
        patches = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.norm(functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias))


class PatchMerging(swin_transformer.PatchMerging):
    """Merge four neighbours into one token: (B, C, h, w) -> (B, ceil(h/2), ceil(w/2), D)."""

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid.permute(0, 2, 3, 1))


class WindowAttention(nn.Module):
    """softmax(q kᵀ / √d + B) v within windows; B comes from a table of relative offsets (Swin Eq. 4)."""

    def __init__(self, dim: int, num_heads: int, window_size: Size) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        table = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(table, num_heads))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, plan: WindowPlan) -> Tensor:
        """(B, h, w, C) -> the same shape; uses the kernel if it supports the plan, else plain torch."""
        if self._can_use_kernel(tokens, plan):
            bias = relative_bias(self.relative_position_bias_table, plan).permute(2, 0, 1)
            return self.proj(window_attention(self.qkv(tokens), bias, plan))
        query, key, value = common.split_heads(self.qkv(window_partition(tokens, plan)), self.num_heads)
        bias = score_bias(self.relative_position_bias_table, plan, query)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return window_reverse(self.proj(common.join_heads(attended)), plan)

    def _can_use_kernel(self, tokens: Tensor, plan: WindowPlan) -> bool:
        # Models are exported from the CPU, so an export never contains a kernel.
        if not TRITON_AVAILABLE or not tokens.is_cuda:
            return False
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else tokens.dtype
        return fits(plan, tokens.shape[-1] // self.num_heads, dtype) and _has_bf16_units(tokens.device)

    def weights(self, windows: Tensor, plan: WindowPlan) -> Tensor:
        """Return the softmax, (B * windows, heads, N, N)."""
        query, key, _ = common.split_heads(self.qkv(windows), self.num_heads)
        return common.attention_weights(query, key, score_bias(self.relative_position_bias_table, plan, query))


@torch.compiler.assume_constant_result
def _has_bf16_units(device: torch.device) -> bool:
    """Whether the GPU has matrix units for bfloat16: Ampere or later."""
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
        self.drop_path1 = common.stochastic_depth(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path2 = common.stochastic_depth(drop_path)

    def plan(self, tokens: Tensor) -> WindowPlan:
        size = (tokens.shape[1], tokens.shape[2])
        return plan_windows(size, self.attn.window_size, self.shift, self.mask_padding)

    def forward(self, tokens: Tensor) -> Tensor:
        plan = self.plan(tokens)
        tokens = tokens + self.drop_path1(self.attn(self.norm1(tokens), plan))
        return tokens + self.drop_path2(self.mlp(self.norm2(tokens)))

    def window_attention(self, tokens: Tensor) -> tuple[Tensor, WindowPlan]:
        """Return the softmax, (B * windows, heads, N, N) with padded positions, and the plan."""
        plan = self.plan(tokens)
        return self.attn.weights(window_partition(self.norm1(tokens), plan), plan), plan

    def attention(self, tokens: Tensor) -> Tensor:
        """Return the softmax over all tokens of the map, (B, heads, h * w, h * w), zero between windows."""
        return map_attention(*self.window_attention(tokens))


class SwinTransformer(common.StagedModel):
    """Images of any size to a grid of tokens at ``patch_size * 2 ** (stages - 1)`` pixels.

    ``img_size`` sets window and shift of every stage. If the map of a stage fits into the window, the window gets the
    size of the map, without shift. Images of other sizes use the same windows, as in the released code.

    padding   "masked" (default) never attends to padding; "zeros" is the form of released EsViT weights. Both are equal
              if windows divide every map.
    norm_eps  1e-6 as EsViT; Microsoft's and timm's Swin have 1e-5.
    """

    family = "swin"
    stem_names = r"^patch_embed"
    layer_names = ((r"^layers\.(\d+).downsample", (0,)), (r"^layers\.(\d+)\.\w+\.(\d+)", None))
    output_fmt = "NHWC"

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int | Sequence[int] = 7,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        padding: Padding = "masked",
        norm_eps: float = 1e-6,
    ) -> None:
        if padding not in ("masked", "zeros"):
            raise UserError(f"padding={padding!r} is unknown; use 'masked' or 'zeros' (as released EsViT)")
        dims = common.stage_widths(embed_dim, [2**stage for stage in range(len(depths))], depths, num_heads)
        super().__init__(dims, depths, patch_size, in_chans, num_classes, drop_rate=None)
        self.embed_dim = embed_dim
        self.window_size = pair(window_size)
        self.padding = padding
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, norm_eps)
        rates = common.drop_path_rates(drop_path_rate, depths)
        size = pair(img_size)
        stages: list[nn.Module] = []
        norm: Any = functools.partial(nn.LayerNorm, eps=norm_eps)
        for index, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
            common.check_heads(dim, heads)
            reduction = patch_size * 2**index
            window, shift = _window_and_shift((-(-size[0] // reduction), -(-size[1] // reduction)), pair(window_size))
            blocks = [  # every second one with shifted windows
                Block(
                    dim, heads, window, shift if number % 2 else (0, 0), mlp_ratio, rate, padding == "masked", norm_eps
                )
                for number, rate in enumerate(rates[index])
            ]
            merging = PatchMerging(dims[index - 1], dim, norm) if index else nn.Identity()
            stages.append(nn.Sequential(OrderedDict(downsample=merging, blocks=nn.Sequential(*blocks))))
        self.layers = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(self.num_features, eps=norm_eps)
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate, input_fmt="NHWC"
        )
        self.apply(_initialize)

    def stage_parts(self) -> common.Parts:
        stages: list[Any] = list(self.layers)
        embeds = [self.patch_embed, *(stage.downsample for stage in stages[1:])]
        return [(embed, [[block] for block in stage.blocks]) for embed, stage in zip(embeds, stages, strict=True)]

    def to_grid(self, state: Tensor) -> Tensor:
        return state.permute(0, 3, 1, 2)

    def forward_features(self, images: Tensor) -> Tensor:
        return self.norm(self.run_blocks(images))

    def forward_grid(self, images: Tensor, norm: bool = True) -> tuple[Tensor, Tensor]:
        tokens = self.run_blocks(images)
        normed = self.norm(tokens)
        return self.to_grid(normed if norm else tokens), self.forward_head(normed, pre_logits=True)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(features, pre_logits=pre_logits)

    def get_classifier(self) -> nn.Module:
        return self.head.fc  # type: ignore[return-value]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)  # type: ignore[operator]


def pair(value: int | Sequence[int]) -> Size:
    """Return one number or two as (height, width)."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _window_and_shift(size: Size, window: Size) -> tuple[Size, Size]:
    """Return window and shift of a stage with a map of ``size``. A map within the window needs no shift."""
    shift = tuple(extent // 2 if length > extent else 0 for length, extent in zip(size, window, strict=True))
    return (min(size[0], window[0]), min(size[1], window[1])), (shift[0], shift[1])


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Apply timm's filter, but leave tables of the right shape unchanged.

    timm treats the table of a non-square window as one of a square window, and resamples or refuses it.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name.endswith("bias_table")}
    fitting = {
        name: state_dict[name] for name in shapes if name in state_dict and state_dict[name].shape == shapes[name]
    }
    others = {name: value for name, value in state_dict.items() if name not in fitting}
    with quiet_tables():
        return {**swin_transformer.checkpoint_filter_fn(others, model), **fitting}


def _initialize(module: nn.Module) -> None:
    # torch's truncated normal, not timm's as in the other networks: they draw other numbers from one seed.
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, WindowAttention):
        nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)


# EsViT, Table 6, with the drop path of its released configurations.
TINY = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.1}
SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.2}
BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.2}
# For demos and CPUs: three stages, and patches of 8 at 224 px, so that the grid is 7 x 7 as in the larger networks.
NANO = {
    "patch_size": 8,
    "embed_dim": 32,
    "depths": (2, 2, 2),
    "num_heads": (1, 2, 4),
    "mlp_ratio": 2.0,
    "drop_path_rate": 0.0,
    "norm_eps": 1e-5,
}
# For images of 32 to 64 px on a GPU, in the shape of Gani et al. 2022 ("How to train vision transformer on small-scale
# datasets?"): 7 M parameters, windows of 4. They publish its accuracies on CIFAR, pre-trained and fine-tuned.
MINI = NANO | {"embed_dim": 96, "depths": (2, 6, 4), "num_heads": (3, 6, 12), "drop_path_rate": 0.1}


VARIANTS: dict[str, tuple[dict[str, Any], int]] = {  # shape, window size
    "swin_nano": (NANO, 7),
    "swin_mini": (MINI, 4),
    "swin_tiny_w7": (TINY, 7),
    "swin_small_w7": (SMALL, 7),
    "swin_base_w7": (BASE, 7),
    "swin_tiny_w14": (TINY, 14),
    "swin_small_w14": (SMALL, 14),
    "swin_base_w14": (BASE, 14),
}
_CFG = {"first_conv": "patch_embed.proj", "classifier": "head.fc", "crop_pct": 0.9, "fixed_input_size": True}
# timm publishes weights of the same shape (Microsoft's, ImageNet-1k), but none for W=14, nano and mini.
_PUBLISHED = {
    f"swin_{size}_w7": {"hf_hub_id": f"timm/swin_{size}_patch4_window7_224.ms_in1k"}
    for size in ("tiny", "small", "base")
}
default_cfgs = generate_default_cfgs({name: _CFG | _PUBLISHED.get(name, {}) for name in VARIANTS})
for _name, (_shape, _window) in VARIANTS.items():
    common.register(SwinTransformer, _name, window_size=_window, pretrained_filter_fn=checkpoint_filter_fn, **_shape)
