"""What a network of our own offers besides being a timm model.

A network written here (swin.py, cvt.py, cvt_windowed.py, t2t.py, vil.py) is first of all an ordinary timm model:
``@register_model``, ``forward_features``, ``forward_head(x, pre_logits)``, ``get_classifier``, ``reset_classifier``,
``set_grad_checkpointing``, ``num_features``, ``num_classes``, ``feature_info``; ``forward(x)`` is
``forward_head(forward_features(x))``. Its constructor takes at least ``img_size``, ``in_chans``, ``num_classes``,
``drop_path_rate`` and ``patch_size``: the pixels between two neighbouring tokens of the first stage (the stride of the
first embedding; a kernel wider than the stride keeps its width, so that weights still fit).

It further fulfils :class:`GridModel`, because the final grid, every block and the attention are then exact instead of
recovered by looking at module names.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class GridModel(Protocol):
    """A network that says itself where its tokens lie. B images, D = ``num_features``, final grid h x w."""

    family: str
    """The key under which recipes look the network up: "swin", "cvt", "t2t", "vil"."""

    num_features: int

    stage_ends: tuple[int, ...]
    """For every stage, fine to coarse, the index of its last block in ``forward_grid_blocks``."""

    def forward_grid(self, images: Tensor, norm: bool = True) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> final tokens (B, D, h, w) and pooled (B, D).

        ``norm=False`` gives the tokens before the final norm. ``pooled`` is in both cases what the classifier sees:
        ``get_classifier()(pooled)`` equals ``forward(images)`` in eval mode.
        """
        ...

    def forward_grid_blocks(self, images: Tensor) -> list[Tensor]:
        """Every block's output as (B, C_i, h_i, w_i), in order, without the final norm, without class tokens."""
        ...

    def final_norm(self, grid: Tensor) -> Tensor:
        """The final norm on a grid (B, D, h, w); the grid itself where a network has none."""
        ...

    def last_attention(self, images: Tensor) -> Tensor:
        """Softmax attention of the last block, (B, heads, T, T), rows sum to 1.

        T counts the real tokens: class or global tokens first, then the grid row by row. Windowed attention is
        scattered into the full T x T (zero between windows); padding attended to is left out and the row rescaled.
        A network whose last block is not an attention raises UserError.
        """
        ...

    def get_classifier(self) -> nn.Module: ...
