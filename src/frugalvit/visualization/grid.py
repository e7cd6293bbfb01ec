"""Where the regions of a final grid lie in the picture that a network sees.

A network whose stride does not divide the picture pads it at the bottom and at the right, or leaves some of it out: a
region is a stride wide wherever it lies, and the last row and column show what is left over. They are never
stretched to share the picture evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from frugalvit.backbones import Backbone


@dataclass(frozen=True)
class Regions:
    """The regions of a grid (rows, columns) over a picture (height, width), each ``cell`` (height, width) in pixels."""

    grid: tuple[int, int]
    picture: tuple[int, int]
    cell: tuple[float, float]

    @classmethod
    def of(cls, backbone: Backbone, picture: tuple[int, int]) -> Regions:
        """Those that a network sees in a picture of this size."""
        return cls(backbone.grid_size(picture), picture, backbone.cell_size(picture))

    def averaged(self, grid: tuple[int, int]) -> Regions:
        """The same over a coarser grid that was averaged from this one."""
        down, across = (step * fine / coarse for step, fine, coarse in zip(self.cell, self.grid, grid, strict=True))
        return replace(self, grid=grid, cell=(down, across))

    @property
    def extent(self) -> tuple[float, float]:
        """Height and width of all regions together: beyond the picture where it was padded, within where it was cut."""
        return self.grid[0] * self.cell[0], self.grid[1] * self.cell[1]

    def span(self, axis: int, index: int) -> tuple[float, float]:
        """From where to where a row (axis 0) or column (axis 1) reaches, cut at the picture's end."""
        side = self.picture[axis]
        return min(index * self.cell[axis], side), min((index + 1) * self.cell[axis], side)

    def centre(self, place: tuple[int, int]) -> tuple[float, float]:
        """The middle of what region (row, column) shows of the picture, in pixels from the top and from the left."""
        (top, bottom), (left, right) = (self.span(axis, index) for axis, index in enumerate(place))
        return (top + bottom) / 2, (left + right) / 2

    def at(self, down: float, across: float) -> tuple[int, int]:
        """The region (row, column) at a place of the picture, given as shares of its height and width."""
        row, column = (
            min(int(share * (side / step)), count - 1)
            for share, side, step, count in zip((down, across), self.picture, self.cell, self.grid, strict=True)
        )
        return row, column

    def steps_off(self, axis: int, mirrored: bool) -> Tensor:
        """How many rows (axis 0) or columns (axis 1) a match j of i lies off in a second view of the picture: (n, n).

        The right one shows most of what i shows, where ``mirrored`` puts that at side - x; of two that show as much of
        it, both are right.
        """
        side, count = self.picture[axis], self.grid[axis]
        first = second = torch.tensor([self.span(axis, index) for index in range(count)], dtype=torch.float64)
        if mirrored:
            first = side - first.flip(1)
        shared = torch.minimum(first[:, None, 1], second[:, 1]) - torch.maximum(first[:, None, 0], second[:, 0])
        right = shared >= shared.amax(dim=1, keepdim=True) - 1e-6 * self.cell[axis]
        index = torch.arange(count)
        off = (index[:, None] - index).abs()  # of a match from each that may be right
        return torch.where(right[:, None], off, count).amin(dim=2)
