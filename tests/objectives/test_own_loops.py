"""The losses in loops that other people write: compiled with batches that change, autocast around the network alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import frugalvit as fv
from frugalvit.features import Features


@pytest.mark.parametrize("variant", ["l1", "ce"])
def test_a_compiled_step_takes_a_smaller_last_batch(variant: Any) -> None:
    network, head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 10)
    localization = fv.RelativeLocalization(16, variant=variant)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(images: torch.Tensor) -> torch.Tensor:
        grid = network(images)
        return head(grid.mean((2, 3))).square().mean() + localization(grid)

    for batch in (4, 3, 2):
        loss = step(torch.randn(batch, 3, 32, 32))
        loss.backward()
        assert loss.isfinite()


@pytest.mark.parametrize("kind", [fv.ViewMatching, fv.RegionMatching])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_of_another_precision_than_the_heads(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    objective = kind(8, prototypes=16)
    grids = [torch.randn(4, 8, 2, 2, dtype=dtype, requires_grad=True) for _ in range(2)]
    seen = [Features(grid, grid.mean((2, 3))) for grid in grids]
    taught = [Features(grid.detach(), grid.detach().mean((2, 3))) for grid in grids]
    loss = objective(seen, taught)
    loss.backward()
    gradient = grids[0].grad
    assert gradient is not None and gradient.dtype == dtype and bool(gradient.abs().sum() > 0)
    same = objective(*([Features(f.grid.float(), f.pooled.float()) for f in views] for views in (seen, taught)))
    assert loss.dtype == same.dtype == torch.float32


@pytest.mark.parametrize("variant", ["l1", "signed", "ce", "reg"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_positions_of_any_whole_numbers(variant: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    localization = fv.RelativeLocalization(8, variant=variant)
    grid, first, second = torch.randn(2, 8, 7, 7), torch.randint(7, (2, 5, 2)), torch.randint(7, (2, 5, 2))
    wanted = localization.loss_at(grid, first, second)
    assert localization.loss_at(grid, first.to(dtype), second.to(dtype)) == wanted
