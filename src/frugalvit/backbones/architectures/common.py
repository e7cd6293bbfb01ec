"""Shared parts of our networks: the run through the blocks, the classifier, timm's interface.

A network defines its embeddings and blocks (:meth:`StagedModel.stage_parts`) and how its running state becomes a grid
(:meth:`StagedModel.to_grid`). :class:`StagedModel` derives the rest of ``GridModel`` and of a timm model from these.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers.drop import DropPath
from timm.layers.weight_init import trunc_normal_
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from frugalvit.backbones.timm_features import is_exporting
from frugalvit.errors import UserError

Parts = Sequence[tuple[Callable[[Any], Any], Sequence[Sequence[nn.Module]]]]
"""For every stage its embedding (of the image or the previous grid) and its blocks.

A block is a sequence of modules that take and return the running state; the first contains the attention.
"""
LayerNames = Sequence[tuple[str, tuple[int, ...] | None]]


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """x + fn(norm(x)), with stochastic depth: fn is dropped per sample with probability ``drop_path``."""

    def __init__(self, norm: nn.Module, fn: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.fn = fn
        self.drop_path = stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.fn(self.norm(x)))

    def attention(self, x: Tensor) -> Tensor:
        return self.fn.attention(self.norm(x))  # type: ignore[operator]


class Blocks(nn.Module):
    """A stage's blocks, named as in both released CvTs: ``layers.N.0`` attends, ``layers.N.1`` is the MLP."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)


class StagedModel(nn.Module):
    """Base of our networks: blocks in stages, a final grid, a linear classifier on the pooled features."""

    family: str
    norm: nn.Module  # the final norm; a network without one overrides ``final_norm``
    stem_names: str  # pattern of the parameter names before the first block
    layer_names: LayerNames  # patterns of the names after it, for timm's layer-wise learning rates

    def __init__(
        self,
        dims: Sequence[int],
        depths: Sequence[int],
        patch_size: int,
        in_chans: int,
        num_classes: int,
        drop_rate: float | None,
    ) -> None:
        """``drop_rate`` is the dropout before the linear classifier; None: the network adds its own ``head``."""
        super().__init__()
        self.in_chans = in_chans
        self.patch_size = patch_size
        self.depths = tuple(depths)
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = dims[-1]
        self.stage_ends = tuple(sum(depths[: i + 1]) - 1 for i in range(len(depths)))
        self.feature_info = [
            {"num_chs": dim, "reduction": patch_size * 2**i, "module": f"layers.{i}"} for i, dim in enumerate(dims)
        ]
        self.grad_checkpointing = False
        if drop_rate is not None:
            self.head_drop = nn.Dropout(drop_rate)
            self.head = self._new_head(num_classes)

    # Defined by each network

    def stage_parts(self) -> Parts:
        raise NotImplementedError

    def to_grid(self, state: Any) -> Tensor:
        """Return the running state as (B, C, h, w), without class or global tokens."""
        return state

    def final_norm(self, grid: Tensor) -> Tensor:
        """Apply ``norm`` over the channels of a grid (B, D, h, w)."""
        return self.norm(grid.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def regions(self) -> list[nn.Module]:
        """Return the modules to compile, each as one region: the embeddings and the parts of the blocks."""
        parts = [(embed, *itertools.chain(*blocks)) for embed, blocks in self.stage_parts()]
        return [
            module for module in itertools.chain(*parts) if isinstance(module, nn.Module) and [*module.parameters()]
        ]

    # GridModel

    def run_blocks(
        self, images: Tensor, visit: Callable[[Any], None] | None = None, stop_before: int | None = None
    ) -> Any:
        """Return the state after all blocks, or before block ``stop_before``. ``visit`` gets it after every block."""
        state: Any = None
        parts, passed = self.stage_parts(), 0
        recompute = self.grad_checkpointing and torch.is_grad_enabled()
        for stage, (embed, blocks) in enumerate(parts):
            state = embed(self.to_grid(state) if stage else images)
            for block in blocks:
                if passed == stop_before:
                    return state
                passed += 1
                for module in block:
                    state = checkpoint(module, state, use_reentrant=False) if recompute else module(state)
                if visit is not None:
                    visit(state)
        return state

    def forward_grid(self, images: Tensor, norm: bool = True) -> tuple[Tensor, Tensor]:
        grid = self.to_grid(self.run_blocks(images))
        normed = self.final_norm(grid)
        return normed if norm else grid, self.head_drop(normed.mean((2, 3)))

    def forward_grid_blocks(self, images: Tensor) -> list[Tensor]:
        states: list[Any] = []
        self.run_blocks(images, states.append)
        return [self.to_grid(state) for state in states]

    def last_attention(self, images: Tensor) -> Tensor:
        return self.block_attention(images, sum(self.depths))[0]

    def block_attention(self, images: Tensor, block: int) -> tuple[Tensor, tuple[int, int]]:
        """Return the softmax (B, heads, T, T) of a block, counted from 1, and the size of its grid."""
        module = [block for _, blocks in self.stage_parts() for block in blocks][block - 1][0]
        if not hasattr(module, "attention"):
            raise UserError(f"block {block} has no attention: it is a convolution; choose a later block.")
        state = self.run_blocks(images, stop_before=block - 1)
        grid = self.to_grid(state)
        return module.attention(state), (grid.shape[2], grid.shape[3])  # type: ignore[operator]

    # timm

    def forward_features(self, images: Tensor) -> Tensor:
        return self.final_norm(self.to_grid(self.run_blocks(images)))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = self.head_drop(self.pool(features))
        return pooled if pre_logits else self.head(pooled)

    def pool(self, features: Tensor) -> Tensor:
        """Pool the result of ``forward_features`` for the classifier: the mean over the grid."""
        return features.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        parameter = next(self.parameters())
        self.head = self._new_head(num_classes).to(parameter.device, parameter.dtype)

    def _new_head(self, num_classes: int) -> nn.Module:
        return nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the groups for layer-wise learning rates: a block is one layer."""
        return {"stem": self.stem_names, "blocks": [*self.layer_names, (r"^norm\.", (99999,))]}

    def no_weight_decay(self) -> set[str]:
        names = ("cls_token", "pos_embed", "relative_position_bias")
        return {name for name, _ in self.named_parameters() if any(part in name for part in names)}


def register(network: type[nn.Module], name: str, **defaults: Any) -> None:
    """Register a network with timm, which takes name and module from the function that builds it."""

    def create(pretrained: bool = False, **keywords: Any) -> nn.Module:
        return build_model_with_cfg(network, name, pretrained, **defaults | keywords)

    create.__name__ = create.__qualname__ = name
    create.__module__ = network.__module__
    register_model(create)


def stochastic_depth(rate: float) -> nn.Module:
    return DropPath(rate) if rate > 0 else nn.Identity()


def initialize(module: nn.Module) -> None:
    """Initialize linear layers as in all released code: truncated normal with std 0.02, zero biases."""
    if isinstance(module, nn.Linear):
        small_normal(module)


def small_normal(layer: nn.Linear | nn.Conv2d) -> None:
    trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Return the rates of every stage: linear from 0 at the first block to ``rate`` at the last."""
    count = sum(depths)
    rates = iter([rate * i / max(count - 1, 1) for i in range(count)])
    return [[next(rates) for _ in range(depth)] for depth in depths]


def stage_widths(
    embed_dim: int | Sequence[int], ratios: Sequence[int], depths: Sequence[int], num_heads: Sequence[int]
) -> list[int]:
    """Return the width of every stage: a list, or the first width times the published ratios."""
    widths = [embed_dim * ratio for ratio in ratios] if isinstance(embed_dim, int) else list(embed_dim)
    if not len(widths) == len(depths) == len(num_heads):
        raise UserError(
            f"embed_dim has {len(widths)} stages, depths {len(depths)} and num_heads {len(num_heads)}; "
            "use one value per stage."
        )
    return widths


def check_heads(dim: int, heads: int) -> None:
    if dim % heads:
        raise UserError(f"The width {dim} is not a multiple of {heads} heads; change embed_dim or num_heads.")


def sequence(*layers: nn.Module) -> nn.Sequential:
    """Return layers in sequence, with the parameter names ``net.*`` of both released CvTs."""
    return nn.Sequential(OrderedDict(net=nn.Sequential(*layers)))


def split_heads(tokens: Tensor, heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """(B, T, parts * C) -> ``parts`` tensors (B, heads, T, C / heads): queries, keys, values."""
    return tokens.unflatten(2, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def attention_weights(queries: Tensor, keys: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Return softmax(q kᵀ · scale + bias), at least in fp32, so that rows sum to 1; ``scale`` is 1 / √d by default."""
    scores = queries @ keys.transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * (scale or queries.shape[-1] ** -0.5)
    return (scores if bias is None else scores + bias).softmax(-1)


def join_heads(attended: Tensor) -> Tensor:
    """(B, heads, T, d) -> (B, T, heads * d)."""
    tokens = attended.transpose(1, 2)
    if is_exporting():
        # The memory layout of fused attention depends on gradients and the batch. An exported program must not rely on
        # it, because the ONNX exporter runs the program again under other conditions.
        tokens = tokens.clone(memory_format=torch.contiguous_format)
    return tokens.flatten(2)
