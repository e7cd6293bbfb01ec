"""The regions of a final grid in the image that a network sees.

If the stride does not divide the image, a network pads it at the bottom and the right, or ignores a part. Every region
is one stride wide; the last row and column may be cut at the border. Regions are never stretched.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from frugalvit.backbones import Backbone


@dataclass(frozen=True)
class Regions:
    """The regions of a grid (rows, columns) over a picture (height, width). ``cell`` is their size in pixels."""

    grid: tuple[int, int]
    picture: tuple[int, int]
    cell: tuple[float, float]

    @classmethod
    def of(cls, backbone: Backbone, picture: tuple[int, int]) -> Self:
        return cls(backbone.grid_size(picture), picture, backbone.cell_size(picture))

    def of_block(self, grid: tuple[int, int]) -> Self:
        """Return the regions of an earlier block, whose grid is finer by whole factors: merging halves each side."""
        down, across = (step / round(fine / own) for step, fine, own in zip(self.cell, grid, self.grid, strict=True))
        return replace(self, grid=grid, cell=(down, across))

    def averaged(self, grid: tuple[int, int]) -> Self:
        """Return the regions of a coarser grid that is averaged from this one."""
        down, across = (step * fine / coarse for step, fine, coarse in zip(self.cell, self.grid, grid, strict=True))
        return replace(self, grid=grid, cell=(down, across))

    @property
    def extent(self) -> tuple[float, float]:
        """Height and width of all regions together; larger than a padded picture, smaller than a cut one."""
        return self.grid[0] * self.cell[0], self.grid[1] * self.cell[1]

    def span(self, axis: int, index: int) -> tuple[float, float]:
        """Return start and end of a row (axis 0) or column (axis 1), cut at the picture's border."""
        side = self.picture[axis]
        return min(index * self.cell[axis], side), min((index + 1) * self.cell[axis], side)

    def centre(self, region: tuple[int, int]) -> tuple[float, float]:
        """Return the centre of a region (row, column) in pixels from the top and from the left."""
        (top, bottom), (left, right) = (self.span(axis, index) for axis, index in enumerate(region))
        return (top + bottom) / 2, (left + right) / 2

    def at(self, down: float, across: float) -> tuple[int, int]:
        """Return the region (row, column) at shares of the picture's height and width."""
        row, column = (
            min(int(share * (side / step)), count - 1)
            for share, side, step, count in zip((down, across), self.picture, self.cell, self.grid, strict=True)
        )
        return row, column

    def steps_off(self, axis: int) -> Tensor:
        """Return the error [i, j] of match j for region i, in rows (axis 0) or columns (axis 1): (n, n).

        The second view is mirrored: x moves to width - x. The right match of i shares most pixels with it. If two share
        the same number of pixels, both are right.
        """
        side, count = self.picture[axis], self.grid[axis]
        first = second = torch.tensor([self.span(axis, index) for index in range(count)], dtype=torch.float64)
        if axis == 1:
            first = side - first.flip(1)
        shared = torch.minimum(first[:, None, 1], second[:, 1]) - torch.maximum(first[:, None, 0], second[:, 0])
        right = shared >= shared.amax(dim=1, keepdim=True) - 1e-6 * self.cell[axis]
        index = torch.arange(count)
        off = (index[:, None] - index).abs()  # the distance of a match from each right one
        return torch.where(right[:, None], off, count).amin(dim=2)
