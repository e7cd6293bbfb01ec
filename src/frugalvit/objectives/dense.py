"""The "very dense" form of Drloc: the loss in every block of the network (paper, supplement section 2, Eq. 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives.localization import Form, Precision, RelativeLocalization, Variant


class DenseLocalization(nn.Module):
    """Eq. 7: the sum of the loss over every block (or stage) l, each with an MLP of its own.

    dims:       channels of each grid, in the order they are given to ``forward``
    grid_sizes: per grid what ``grid_size`` is to :class:`RelativeLocalization`; ``None``, as in the paper, keeps the
                native grids. The other options are those of :class:`RelativeLocalization`.
    """

    def __init__(
        self,
        dims: Sequence[int],
        variant: Variant = "l1",
        pairs: int | Literal["all"] = 64,
        hidden: int = 512,
        grid_sizes: Sequence[int | tuple[int, int] | None] | None = None,
        form: Form = "paper",
        *,
        absolute: bool | None = None,
        normalize: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        sizes = [None] * len(dims) if grid_sizes is None else list(grid_sizes)
        if not dims or len(sizes) != len(dims):
            raise UserError(f"{len(dims)} dims and {len(sizes)} grid_sizes: give one of each per grid, at least one.")
        more: dict[str, Any] = {"absolute": absolute, "normalize": normalize, "precision": precision}
        self.levels = nn.ModuleList(
            RelativeLocalization(dim, variant, pairs, hidden, size, form, **more)
            for dim, size in zip(dims, sizes, strict=True)
        )

    def forward(self, grids: Sequence[Tensor], generator: torch.Generator | None = None) -> Tensor:
        """The summed loss of the grids (B, C_l, h_l, w_l)."""
        return self.measure(grids, generator)[0]

    def measure(self, grids: Sequence[Tensor], generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The summed loss, and the mean absolute error in cells of the last grid: comparable with the plain loss."""
        return self.judged(grids, lambda level, grid: level.measure(grid, generator))

    def judged(
        self, grids: Sequence[Tensor], judge: Callable[[RelativeLocalization, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The same with loss and error of every grid as ``judge`` has them, for instance at pairs drawn elsewhere."""
        if isinstance(grids, Features | Tensor):
            raise UserError(
                "dense localization asks about several grids: give a list, such as backbone.blocks(images)."
            )
        if len(grids) != len(self.levels):
            raise UserError(f"{len(grids)} grids for {len(self.levels)} localization heads: give one grid per head.")
        losses, errors = [], []
        for level, grid in zip(self.levels, grids, strict=True):
            assert isinstance(level, RelativeLocalization)
            loss, error = judge(level, grid)
            losses.append(loss)
            errors.append(error)
        return torch.stack(losses).sum(), errors[-1]

    def compile(self, *args: Any, **how: Any) -> None:
        """Every level's own."""
        for level in self.levels:
            level.compile(*args, **how)
