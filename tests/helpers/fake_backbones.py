"""Small networks with known answers instead of a trained backbone."""

import torch
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.backbones.base import default_crop
from frugalvit.features import Features
from frugalvit.visualization.attention import AttentionView, block_attention, view_attention


def attend(backbone: Backbone, image: Tensor, query: tuple[int, int] | None, block: int | None = None) -> AttentionView:
    """Return the attention of a block's heads from one region (None: the class token) of an image (3, H, W)."""
    attention, regions = block_attention(backbone, image, block)
    return view_attention(attention, regions.grid, query)


class PatchFeatures(nn.Module):
    """Each cell's mean colour through a fixed random projection; attention of a class token and the cells."""

    name = "patch features"
    in_chans = 3
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

    def __init__(self, img_size: tuple[int, int] = (32, 32), cell: int = 8, dim: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.img_size, self.cell, self.dim, self.heads = img_size, cell, dim, heads
        self.eval_crop = default_crop(img_size)
        generator = torch.Generator().manual_seed(1)
        self.project = nn.Parameter(torch.randn(dim, 3 * cell * cell, generator=generator) / cell)
        self.query = nn.Parameter(torch.randn(heads, dim, dim, generator=generator))

    def grid_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        return img_size[0] // self.cell, img_size[1] // self.cell

    def cell_size(self, img_size: tuple[int, int]) -> tuple[float, float]:
        return self.cell, self.cell

    def forward(self, images: Tensor) -> Features:
        patches = nn.functional.unfold(images, self.cell, stride=self.cell)
        grid = (self.project @ patches).view(len(images), self.dim, *self.grid_size(tuple(images.shape[2:])))
        return Features(grid, grid.mean(dim=(2, 3)))

    def attention(self, images: Tensor) -> Tensor:
        features = self(images)
        tokens = torch.cat([features.pooled[:, :, None], features.grid.flatten(2)], dim=2)
        logits = torch.einsum("bdt,hde,beu->bhtu", tokens, self.query, tokens)
        return (logits / (4 * self.dim)).softmax(dim=-1)


class PositionFeatures(PatchFeatures):
    """The position itself: reads the coordinates that a picture carries in its red and green channel."""

    def forward(self, images: Tensor) -> Features:
        cells = nn.functional.avg_pool2d(images, self.cell)
        down, across = cells[:, 0], cells[:, 1]
        grid = torch.stack([(2 * down).cos(), (2 * down).sin(), (2 * across).cos(), (2 * across).sin()], dim=1)
        return Features(grid, grid.mean(dim=(2, 3)))


class PaddedPositions(PatchFeatures):
    """The positions of ``coordinate_images`` that a region covers; padding counts as no position."""

    def __init__(self, img_size: tuple[int, int], cell: int, heads: int = 3) -> None:
        super().__init__(img_size, cell, dim=64, heads=heads)

    def grid_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        return -(-img_size[0] // self.cell), -(-img_size[1] // self.cell)

    def forward(self, images: Tensor) -> Features:
        positions = torch.linspace(0, 1, 32).view(-1, 1, 1)
        pixels = 0.25 * images[:, :2, None] + 0.5  # back to [0, 1]
        near = torch.exp(-600 * (pixels - positions) ** 2).flatten(1, 2)
        (rows, columns), (height, width) = self.grid_size(tuple(images.shape[2:])), images.shape[2:]
        padded = nn.functional.pad(near, (0, columns * self.cell - width, 0, rows * self.cell - height))
        grid = nn.functional.avg_pool2d(padded, self.cell)
        return Features(grid, grid.mean(dim=(2, 3)))


class ConstantFeatures(PatchFeatures):
    """Every region looks the same."""

    def forward(self, images: Tensor) -> Features:
        rows, columns = self.grid_size(tuple(images.shape[2:]))
        grid = torch.ones(len(images), self.dim, rows, columns)
        return Features(grid, grid.mean(dim=(2, 3)))


def coordinate_images(count: int, height: int, width: int) -> Tensor:
    """Pictures whose red is the row and whose green is the column, in [0, 1]."""
    down = torch.linspace(0, 1, height).view(-1, 1).expand(height, width)
    across = torch.linspace(0, 1, width).expand(height, width)
    return torch.stack([down, across, torch.zeros(height, width)]).expand(count, 3, height, width)
