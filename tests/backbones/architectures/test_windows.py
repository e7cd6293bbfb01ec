"""Relative biases: our gradient equals that of plain indexing."""

import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.backbones.architectures.windows import WindowPlan, offsets, plan_windows, relative_bias

SIZES = [((14, 14), (7, 7)), ((6, 9), (7, 7)), ((3, 5), (7, 7)), ((8, 8), (4, 2)), ((1, 1), (7, 7))]


def plans() -> list[WindowPlan]:
    return [plan_windows(size, table, (0, 0), True) for size, table in SIZES]


@pytest.mark.parametrize("plan", plans(), ids=str)
def test_relative_bias_equals_indexing(plan: WindowPlan) -> None:
    rows = (2 * plan.table[0] - 1) * (2 * plan.table[1] - 1)
    table = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    index = offsets(plan, table)
    ours, theirs = relative_bias(table, plan), table[index]
    assert torch.equal(ours, theirs)
    weight = torch.randn_like(theirs)
    gradients = [torch.autograd.grad((bias * weight).sum(), table)[0] for bias in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        assert torch.equal(relative_bias(table, plan), theirs)


@pytest.mark.slow
def test_compiled_network_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    backbone = create_backbone("swin_nano", img_size=32, embed_dim=8, depths=(2, 2), num_heads=(1, 2), drop_path=0.0)
    images = torch.randn(2, 3, 32, 32)

    def gradients() -> dict[str, torch.Tensor]:
        backbone.zero_grad()
        backbone(images).grid.square().sum().backward()
        return {name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None}

    plain = gradients()
    assert any("relative_position_bias_table" in name for name in plain)
    backbone.compile(fullgraph=True, dynamic=False)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-4, rtol=1e-3, msg=name)
