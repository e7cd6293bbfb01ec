"""ViL-T of EsViT, window size 7: windows attend to their eight neighbours and to a global token.

Zhang et al., "Multi-Scale Vision Longformer" (2021), in the four-stage shape of EsViT (Li et al., 2022; 2.1, A.2,
Table 6, heads of 32 channels):

* widths 96-192-384-768, depths 2-2-6-2, heads 3-6-12-24, patches of 4 and then 2 x 2, LayerNorm eps 1e-6;
* stages 1 and 2: a position attends to its window of 7 x 7, to the eight windows around it and to one global token; the
  global token attends to everything. Stages 3 and 4: full attention;
* stages 1-3 each start with a new global token, stage 4 has none: the mean of its tokens is the pooled feature;
* relative position biases only, no absolute positions. 27.57 M parameters.

The bias tables cover the offsets at 224 px; offsets beyond them use their edge (``bias_resize="table"``, default). The
released code resizes the (tokens x tokens) bias like an image (``bias_resize="matrix"``), which mixes unrelated
offsets; released weights were trained so, at 96 px. The released training attends to one random neighbour window per
step; this code always attends to all eight.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers.mlp import Mlp
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from frugalvit.backbones.architectures import common
from frugalvit.backbones.architectures.windows import WindowPlan, plan_windows, window_partition, window_reverse
from frugalvit.errors import UserError

Tokens = tuple[Tensor, int, int]  # (B, global tokens + h * w, C), h, w
BiasResize = Literal["table", "matrix"]


class PatchEmbedding(nn.Module):
    """Patches of the previous grid (or of the image), a norm, and the stage's global tokens in front."""

    def __init__(self, in_dim: int, dim: int, patch: int, global_tokens: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(in_dim, dim, patch, patch)
        self.norm_embed = nn.LayerNorm(dim, eps=1e-6)
        self.cls_token = (
            nn.Parameter(trunc_normal_(torch.zeros(1, global_tokens, dim), std=0.02)) if global_tokens else None
        )

    def forward(self, maps: Tensor) -> Tokens:
        height, width = maps.shape[2:]
        maps = self.proj(F.pad(maps, (0, -width % self.patch, 0, -height % self.patch)))
        tokens = self.norm_embed(maps.flatten(2).transpose(1, 2))
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return tokens, maps.shape[2], maps.shape[3]


class RelativeBias(nn.Module):
    """Biases of attention scores: a table of offsets between positions, and biases of global tokens."""

    def __init__(self, heads: int, reach: int, global_tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.reach = reach  # offsets from -reach to reach
        table = torch.zeros((2 * reach + 1) ** 2, heads)
        self.local_relative_position_bias_table = nn.Parameter(trunc_normal_(table, std=0.02))
        if global_tokens:
            to_and_from = torch.zeros(2, heads, global_tokens)
            self.g2l_relative_position_bias = nn.Parameter(trunc_normal_(to_and_from, std=0.02))
            among = torch.zeros(heads, global_tokens, global_tokens)
            self.g2g_relative_position_bias = nn.Parameter(trunc_normal_(among, std=0.02))

    def local_bias(self, query_rows: Tensor, query_columns: Tensor, key_rows: Tensor, key_columns: Tensor) -> Tensor:
        """(heads, queries, keys) for positions by row and column; far offsets use the table's edge."""
        rows = self._table_index(query_rows[:, None] - key_rows)
        columns = self._table_index(query_columns[:, None] - key_columns)
        return self.local_relative_position_bias_table[rows * (2 * self.reach + 1) + columns].permute(2, 0, 1)

    def _table_index(self, offsets: Tensor) -> Tensor:
        """Map offsets to 0 … 2 · reach. It avoids ``clamp``, which torch 2.11 fails to compile for a GPU."""
        near = offsets.masked_fill(offsets > self.reach, self.reach)
        return near.masked_fill(near < -self.reach, -self.reach) + self.reach


def positions(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column of every cell of a grid, row by row."""
    rows = torch.arange(height, device=device)[:, None].expand(height, width).reshape(-1)
    return rows, torch.arange(width, device=device).repeat(height)


class FullAttention(RelativeBias):
    """Every token attends to every token: (B, G + h * w, C)."""

    def __init__(self, dim: int, heads: int, side: int, global_tokens: int, bias_resize: BiasResize) -> None:
        super().__init__(heads, side - 1, global_tokens)
        self.side = side
        self.global_tokens = global_tokens
        self.bias_resize = bias_resize
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def bias(self, height: int, width: int) -> Tensor:
        """(1, heads, G + h * w, G + h * w)."""
        device = self.local_relative_position_bias_table.device
        if self.bias_resize == "table":
            cells = positions(height, width, device)
            local = self.local_bias(*cells, *cells)
        else:
            cells = positions(self.side, self.side, device)
            local = self.local_bias(*cells, *cells)
            if height * width != local.shape[1]:
                local = F.interpolate(local[None], size=(height * width,) * 2, mode="bicubic")[0]
        if self.global_tokens:
            from_global, to_global = self.g2l_relative_position_bias
            shape = (-1, -1, local.shape[1])
            top = torch.cat([self.g2g_relative_position_bias, from_global[:, :, None].expand(shape)], dim=2)
            local = torch.cat([to_global[:, :, None].expand(shape).transpose(1, 2), local], dim=2)
            local = torch.cat([top, local], dim=1)
        return local[None]

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        queries, keys, values = common.split_heads(self.qkv(x), self.heads)
        bias = self.bias(height, width).to(queries.dtype)
        return self.proj(common.join_heads(F.scaled_dot_product_attention(queries, keys, values, bias)))

    def attention(self, x: Tensor, height: int, width: int) -> Tensor:
        queries, keys, _ = common.split_heads(self.qkv(x), self.heads)
        return common.attention_weights(queries, keys, self.bias(height, width))


class SparseAttention(RelativeBias):
    """A position attends to the global tokens, its window and the windows around it: (B, G + h * w, C).

    Positions outside the grid are masked. A window of W x W positions has N = W^2 queries.
    """

    def __init__(self, dim: int, heads: int, window: int, global_tokens: int) -> None:
        super().__init__(heads, 2 * window - 1, global_tokens)
        self.window = window
        self.global_tokens = global_tokens
        self.query = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        queries, keys_values = self.query(x), self.kv(x)
        local = self.attend_locally(queries, keys_values, height, width)
        if self.global_tokens:
            local = torch.cat([self.attend_globally(queries, keys_values), local], dim=1)
        return self.proj(local)

    def attend_globally(self, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Attend from the global tokens to all tokens: (B, G, C)."""
        count = self.global_tokens
        (queries,) = common.split_heads(queries[:, :count], self.heads, parts=1)
        keys, values = common.split_heads(keys_values, self.heads, parts=2)
        to_local = self.g2l_relative_position_bias[0][:, :, None].expand(-1, -1, keys.shape[2] - count)
        bias = torch.cat([self.g2g_relative_position_bias, to_local], dim=2)[None].to(queries.dtype)
        return common.join_heads(F.scaled_dot_product_attention(queries, keys, values, bias))

    def attend_locally(self, queries: Tensor, keys_values: Tensor, height: int, width: int) -> Tensor:
        """Attend from the grid's positions to their neighbourhoods: (B, h * w, C)."""
        batch, count, side = queries.shape[0], self.global_tokens, self.window
        plan = plan_windows((height, width), (side, side), (0, 0), False)
        grid = queries[:, count:].unflatten(1, plan.size)
        (windows,) = common.split_heads(window_partition(grid, plan), self.heads, parts=1)
        windows = windows.unflatten(0, (batch, -1)).flatten(1, 2)

        around = self.gather(keys_values[:, count:], plan).unflatten(1, (2, self.heads, -1))
        around = around.permute(1, 0, 5, 2, 4, 3).flatten(2, 3)  # (2, B, windows * heads, 9 W^2, d)
        outside = self.gather(queries.new_ones(1, height * width, 1), plan)[0, 0].mT == 0
        bias = self.neighbourhood_bias().masked_fill(outside[:, None, None], float("-inf"))
        if count:
            each = (plan.count, -1, side * side, -1)
            shared = torch.stack(common.split_heads(keys_values[:, :count], self.heads, parts=2))
            around = torch.cat([shared.repeat(1, 1, plan.count, 1, 1), around], dim=3)
            bias = torch.cat([self.g2l_relative_position_bias[1][None, :, None].expand(each), bias], dim=3)
        bias = bias.flatten(0, 1)[None].to(windows.dtype)

        # Windows and heads share one axis, so that the bias is not copied per image.
        out = F.scaled_dot_product_attention(windows, around[0], around[1], bias)
        out = common.join_heads(out.unflatten(1, (plan.count, -1)).flatten(0, 1))
        return window_reverse(out, plan).flatten(1, 2)

    def gather(self, tokens: Tensor, plan: WindowPlan) -> Tensor:
        """Gather the keys of every window, 0 outside the grid: (B, h * w, C) -> (B, C, 9 W^2, windows)."""
        side = self.window
        maps = tokens.transpose(1, 2).unflatten(2, plan.size)
        maps = F.pad(maps, (0, plan.padding[1], 0, plan.padding[0]))
        return F.unfold(maps, 3 * side, stride=side, padding=side).unflatten(1, (-1, 9 * side * side))

    def neighbourhood_bias(self) -> Tensor:
        """(heads, N, keys) in the order of :meth:`gather`."""
        side, device = self.window, self.local_relative_position_bias_table.device
        rows, columns = positions(side, side, device)
        key_rows, key_columns = positions(3 * side, 3 * side, device)
        return self.local_bias(rows, columns, key_rows - side, key_columns - side)


class AttentionHalf(nn.Module):
    """The first half of a block: tokens + attention(norm(tokens))."""

    def __init__(self, dim: int, attention: FullAttention | SparseAttention, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attention
        self.drop_path = common.stochastic_depth(drop_path)

    def forward(self, state: Tokens) -> Tokens:
        x, height, width = state
        return x + self.drop_path(self.attn(self.norm(x), height, width)), height, width

    def attention(self, state: Tokens) -> Tensor:
        x, height, width = state
        if isinstance(self.attn, SparseAttention):
            raise UserError("This ViL ends in sparse attention, which has no full map; use fewer sparse_stages.")
        return self.attn.attention(self.norm(x), height, width)


class MlpHalf(nn.Module):
    """The second half of a block: tokens + mlp(norm(tokens))."""

    def __init__(self, dim: int, hidden: int, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden)
        self.drop_path = common.stochastic_depth(drop_path)

    def forward(self, state: Tokens) -> Tokens:
        x, height, width = state
        return x + self.drop_path(self.mlp(self.norm(x))), height, width


class VisionLongformer(common.StagedModel):
    """Images (B, C, H, W) -> grid (B, 768, H/32, W/32). ``patch_size`` is the side of the first patches."""

    family = "vil"
    stem_names = r"^layer1\.0\."

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        patch_size: int = 4,
        window_size: int = 7,
        embed_dim: int | Sequence[int] = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        sparse_stages: int = 2,
        mlp_ratio: float = 4.0,
        bias_resize: BiasResize = "table",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if bias_resize not in ("table", "matrix"):
            raise UserError(f"bias_resize={bias_resize!r} is unknown; choose 'table' or 'matrix' (as released EsViT).")
        count = len(depths)
        dims = common.stage_widths(embed_dim, [2**stage for stage in range(count)], depths, num_heads)
        super().__init__(dims, depths, patch_size, in_chans, num_classes, drop_rate)
        rates = common.drop_path_rates(drop_path_rate, depths)
        for stage, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
            common.check_heads(dim, heads)
            global_tokens = 0 if stage == count - 1 else 1
            in_dim, patch = (dims[stage - 1], 2) if stage else (in_chans, patch_size)
            layer: list[nn.Module] = [PatchEmbedding(in_dim, dim, patch, global_tokens)]
            for rate in rates[stage]:
                if stage < sparse_stages:
                    attention = SparseAttention(dim, heads, window_size, global_tokens)
                else:
                    side = window_size * 2 ** (count - 1 - stage)  # the stage's grid at 224 px
                    attention = FullAttention(dim, heads, side, global_tokens, bias_resize)
                layer += [AttentionHalf(dim, attention, rate), MlpHalf(dim, int(dim * mlp_ratio), rate)]
            self.feature_info[stage]["module"] = f"layer{stage + 1}"
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layer))
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.apply(common.initialize)

    @property
    def layer_names(self) -> common.LayerNames:
        names: list[tuple[str, tuple[int, ...] | None]] = []
        for stage, depth in enumerate(self.depths, start=1):
            names.append((rf"^layer{stage}\.0\.", (stage, 0)))  # a later stage's embedding belongs to its first block
            # The two halves of a block have consecutive numbers.
            names += [(rf"^layer{stage}\.(?:{2 * i + 1}|{2 * i + 2})\.", (stage, i)) for i in range(depth)]
        return names

    def stage_parts(self) -> common.Parts:
        layers = [list(getattr(self, f"layer{stage + 1}")) for stage in range(len(self.stage_ends))]
        return [(embed, list(zip(halves[::2], halves[1::2], strict=True))) for embed, *halves in layers]

    def to_grid(self, state: Tokens) -> Tensor:
        tokens, height, width = state
        return tokens[:, tokens.shape[1] - height * width :].transpose(1, 2).unflatten(2, (height, width))


default_cfgs = {"vil_tiny_w7": {"first_conv": "layer1.0.proj", "classifier": "head"}}
common.register(VisionLongformer, "vil_tiny_w7", drop_path_rate=0.1)
