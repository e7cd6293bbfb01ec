"""Where each head of the last block looks from one place.

EsViT §4.3, Figures 7 and 10 to 12: heads ranked by the entropy of their attention, the full maps, and the masks that
hold 60 % of the attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import Box, at_rest, model_input

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone

MASS = 0.6
"""The share of a head's attention that the paper's masks hold."""


def entropy(weights: Tensor) -> Tensor:
    """-Σ p log2 p over the last dimension, in bits: (…, T) -> (…)."""
    share = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return -torch.special.xlogy(share, share).sum(dim=-1) / torch.log(torch.tensor(2.0, dtype=weights.dtype))


def mass_mask(weights: Tensor, mass: float = MASS) -> Tensor:
    """The fewest regions that hold ``mass`` of the attention, largest first: (…, T) -> bool (…, T)."""
    ordered = weights.sort(dim=-1, descending=True)
    share = ordered.values / weights.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    # A hair of slack: 0.3 + 0.3 is 0.6 on paper but not in floating point.
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, ordered.indices, before < mass - 1e-6)


def mean_entropy(backbone: Backbone, images: Iterable[Tensor]) -> float:
    """How widely the last block's heads look: bits, averaged over heads, queries and images.

    images: batches (B, 3, H, W) in [0, 1], as the model sees them but not yet normalised.
    """
    seen: list[Tensor] = []
    for batch in images:
        with at_rest(backbone):
            seen.append(entropy(backbone.attention(model_input(backbone, batch)).float()).mean(dim=(1, 2)).cpu())
    if not seen:
        raise UserError("There are no images to look at.")
    return torch.cat(seen).mean().item()


@dataclass(frozen=True)
class AttentionView:
    """The last block's attention from one query over a grid h x w.

    maps:     (heads, h, w), each head's weights over the regions, in the model's order of heads
    masks:    (heads, h, w), the regions that hold 60 % of a head's weights
    entropy:  (heads,), bits
    order:    heads ranked by entropy, lowest first
    elsewhere: (heads,), the weight that went to class or global tokens, which lie nowhere in the image
    query:    (row, column), or None where the class token asks
    extra:    how many class or global tokens there are
    """

    maps: Tensor
    masks: Tensor
    entropy: Tensor
    order: list[int]
    elsewhere: Tensor
    query: tuple[int, int] | None
    extra: int


def attend(backbone: Backbone, image: Tensor, query: tuple[int, int] | None, mass: float = MASS) -> AttentionView:
    """The attention of every head of the last block from region ``query`` (row, column) of one image (3, H, W).

    ``query=None`` asks from the class token, for models that have one.
    """
    grid_size = backbone.grid_size((image.shape[1], image.shape[2]))
    with at_rest(backbone):
        attention = backbone.attention(model_input(backbone, image[None]))[0].float().cpu()
    return view_attention(attention, grid_size, query, mass)


def view_attention(
    attention: Tensor, grid_size: tuple[int, int], query: tuple[int, int] | None, mass: float = MASS
) -> AttentionView:
    """Attention (heads, T, T) with class tokens first, then the grid row by row -> what one query sees."""
    rows, columns = grid_size
    extra = attention.shape[-1] - rows * columns
    if query is None and extra == 0:
        raise UserError("This model has no class token to ask from; give --query x,y.")
    if query is not None and not (0 <= query[0] < rows and 0 <= query[1] < columns):
        raise UserError(f"The query {query} lies outside the {rows}x{columns} grid.")
    line = 0 if query is None else extra + query[0] * columns + query[1]
    weights = attention[:, line, extra:]
    bits = entropy(weights)
    return AttentionView(
        maps=weights.view(-1, rows, columns),
        masks=mass_mask(weights, mass).view(-1, rows, columns),
        entropy=bits,
        order=bits.argsort(stable=True).tolist(),
        elsewhere=attention[:, line, :extra].sum(dim=-1),
        query=query,
        extra=extra,
    )


def parse_query(text: str, picture: tuple[int, int], box: Box, regions: Regions) -> tuple[int, int] | None:
    """``x,y`` -> (row, column) of the regions seen in ``box`` of a picture (height, width); ``class`` -> None.

    Whole numbers are pixels of the original picture; numbers with a point are shares of the view, 0.5,0.5 its centre.
    """
    if text.strip() == "class":
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        x, y = (float(part) for part in parts)
    except ValueError:
        raise UserError(
            f"--query {text}: give x,y in pixels of the picture (120,80) or as shares of the view (0.5,0.5)."
        ) from None
    if any("." in part for part in parts):
        across, down = x, y
        if not (0 <= across <= 1 and 0 <= down <= 1):
            raise UserError(f"--query {text}: shares of the view lie between 0 and 1; write pixels without a point.")
    else:
        across, down = (x + 0.5 - box.left) / box.width, (y + 0.5 - box.top) / box.height
        if not (0 <= x < picture[1] and 0 <= y < picture[0]):
            raise UserError(f"--query {text} lies outside the picture of {picture[1]}x{picture[0]} pixels.")
        if not (0 <= across <= 1 and 0 <= down <= 1):
            raise UserError(
                f"--query {text} lies in the part that is cropped away; pass --fit whole to see everything."
            )
    return regions.at(down, across)
