"""The attention of each head of a block from one region.

EsViT §4.3, Figures 7 and 10 to 12: heads ranked by the entropy of their attention, the maps, and the masks that hold
60 % of the attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.errors import UserError
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import Box, model_input

MASS = 0.6  # the share of a head's attention in the paper's masks


def entropy(weights: Tensor) -> Tensor:
    """-Σ p log2 p over the last dimension, in bits: (…, T) -> (…)."""
    share = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return -torch.special.xlogy(share, share).sum(dim=-1) / torch.log(torch.tensor(2.0, dtype=weights.dtype))


def mass_mask(weights: Tensor) -> Tensor:
    """Mark the fewest regions that hold ``MASS`` of the attention: (…, T) -> bool (…, T)."""
    ordered = weights.sort(dim=-1, descending=True)
    share = ordered.values / weights.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    # A tolerance: 0.3 + 0.3 is not 0.6 in floating point.
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, ordered.indices, before < MASS - 1e-6)


@dataclass(frozen=True)
class AttentionView:
    """A block's attention from one query over a grid h x w.

    ``borders`` are (h, w - 1) and (h - 1, w): True between neighbours that no head connects, as at a window's edge.
    """

    maps: Tensor  # (heads, h, w), each head's weights over the regions, in the model's order of heads
    masks: Tensor  # (heads, h, w), the regions that hold 60 % of a head's weights
    entropy: Tensor  # (heads,), bits
    order: list[int]  # heads sorted by entropy, lowest first
    elsewhere: Tensor  # (heads,), the weight of class or global tokens, which have no region
    query: tuple[int, int] | None  # (row, column), or None for the class token
    extra: int  # the number of class or global tokens
    borders: tuple[Tensor, Tensor]

    @property
    def reach(self) -> int:
        """The number of regions that the query can attend to."""
        return int((self.maps > 0).any(0).sum())


def block_attention(backbone: Backbone, image: Tensor, block: int | None) -> tuple[Tensor, Regions]:
    """Return the attention (heads, T, T) of a block (from 1; None: the last), and the regions of the block's grid."""
    regions = Regions.of(backbone, (image.shape[1], image.shape[2]))
    with eval_no_grad(backbone):
        inputs = model_input(backbone, image[None])
        if block is None:
            return backbone.attention(inputs)[0].float().cpu(), regions
        attention, grid = backbone.block_attention(inputs, block)
    return attention[0].float().cpu(), regions.of_block(grid)


def view_attention(attention: Tensor, grid_size: tuple[int, int], query: tuple[int, int] | None) -> AttentionView:
    """Select one query of attention (heads, T, T), which has class tokens first, then the grid by rows.

    query: (row, column) on the block's grid; None: the class token
    """
    rows, columns = grid_size
    extra = attention.shape[-1] - rows * columns
    if query is None and extra == 0:
        raise UserError("--query class: this model has no class token; give --query x,y.")
    if query is not None and not (0 <= query[0] < rows and 0 <= query[1] < columns):
        raise UserError(f"The query {query} is outside the {rows}x{columns} grid.")
    token = 0 if query is None else extra + query[0] * columns + query[1]
    weights = attention[:, token, extra:]
    bits = entropy(weights)
    near = attention[:, extra:, extra:].view(-1, rows, columns, rows, columns).amax(0)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    across = near[row, column[:-1], row, column[:-1] + 1] == 0
    down = near[row[:-1], column, row[:-1] + 1, column] == 0
    return AttentionView(
        maps=weights.view(-1, rows, columns),
        masks=mass_mask(weights).view(-1, rows, columns),
        entropy=bits,
        order=bits.argsort(stable=True).tolist(),
        elsewhere=attention[:, token, :extra].sum(dim=-1),
        query=query,
        extra=extra,
        borders=(across, down),
    )


def parse_query(text: str, picture: tuple[int, int], box: Box, regions: Regions) -> tuple[int, int] | None:
    """Convert ``x,y`` to (row, column) in ``box`` of a picture (height, width), and ``class`` to None.

    Integers are pixels of the original picture. Numbers with a point are shares of the view; 0.5,0.5 is its centre.
    """
    if text.strip() == "class":
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        x, y = (float(part) for part in parts)
    except ValueError:
        raise UserError(f"--query {text} must be x,y in pixels (120,80), or in shares of the view (0.5,0.5).") from None
    if any("." in part for part in parts):
        across, down = x, y
    else:
        across, down = (x + 0.5 - box.left) / box.width, (y + 0.5 - box.top) / box.height
    if not (0 <= across <= 1 and 0 <= down <= 1):
        raise UserError(
            f"--query {text} is outside the centre crop that the model sees of the picture ({picture[1]}x{picture[0]} "
            "pixels). Use shares of the crop between 0 and 1, such as 0.5,0.5."
        )
    return regions.at(down, across)
