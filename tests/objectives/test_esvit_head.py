"""The DINO head gives the released numbers, and its EMA is exact."""

from typing import Any

import numpy as np
import pytest
import torch

from frugalvit.objectives import ProjectionHead


def test_numbers_of_the_released_head(golden: Any) -> None:
    arrays = golden("b_dinohead")
    head = ProjectionHead(48, prototypes=64, hidden=40, bottleneck=16)
    state = {k.removeprefix("w."): torch.from_numpy(v.astype(np.float32)) for k, v in arrays.items() if k[:2] == "w."}
    head.load_state_dict(state)
    features = torch.from_numpy(arrays["x"])
    torch.testing.assert_close(head(features), torch.from_numpy(arrays["y"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.project(features) @ head.weight().T, head(features))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layout_and_initialization(layers: int) -> None:
    torch.manual_seed(0)
    head = ProjectionHead(6, prototypes=50, hidden=400, bottleneck=8, layers=layers)
    linears = [f"mlp.{2 * i}.{part}" for i in range(layers) for part in ("weight", "bias")]
    assert sorted(head.state_dict()) == sorted([*linears, "last_layer.weight_g", "last_layer.weight_v"])
    assert head.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.3) and not head.mlp[0].bias.any()
    assert head.prototypes == 50
    torch.testing.assert_close(head.weight().norm(dim=1), torch.ones(50))
    torch.testing.assert_close(head.project(torch.randn(3, 2, 6)).norm(dim=-1), torch.ones(3, 2))


def test_lengths_are_learned_without_norm_last() -> None:
    assert not ProjectionHead(6, 5, 4, 3).last_layer.weight_g.requires_grad
    free = ProjectionHead(6, 5, 4, 3, norm_last=False)
    free(torch.randn(2, 6)).square().sum().backward()
    assert free.last_layer.weight_g.grad is not None
