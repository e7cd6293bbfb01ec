"""Muon against loops over its published formulas, one matrix at a time."""

import math

import pytest
import torch
from torch import Tensor, nn

from frugalvit.engine.muon import MOMENTUM, STEP, Muon, orthogonal
from frugalvit.engine.param_groups import decay_groups


def orthogonal_by_loops(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    x = matrix / matrix.norm() if rows <= columns else matrix.T / matrix.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x if rows <= columns else x.T


def network() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(4))


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_steps_are_orthogonal(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrices)
    for one, matrix in zip(found, matrices, strict=True):
        assert torch.allclose(one, orthogonal_by_loops(matrix), atol=1e-4)
        values = torch.linalg.svdvals(one)
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert float((one * (u @ v)).sum() / one.norm() / (u @ v).norm()) > 0.95


def test_matrices_take_orthogonal_steps_and_vectors_those_of_adamw() -> None:
    model, other = network(), network()
    muon = Muon(decay_groups(model.named_parameters(), 0.1, 0.5), lr=0.01, fused=True)
    adamw = torch.optim.AdamW(decay_groups(other.named_parameters(), 0.1, 0.5), lr=0.01)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in range(3):
        for p, q, gradient in zip(model.parameters(), other.parameters(), gradients(model, step), strict=True):
            p.grad = gradient.clone(memory_format=torch.preserve_format)
            q.grad = gradient.clone()
        for (name, p), gradient in zip(expected.items(), gradients(model, step), strict=True):
            if p.ndim < 2:
                continue
            momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * gradient
            update = orthogonal_by_loops(((1 - MOMENTUM) * gradient + MOMENTUM * momenta[name]).flatten(1))
            length = 0.01 * STEP * math.sqrt(max(update.shape))
            expected[name] = p * (1 - 0.01 * 0.1) - length * update.view_as(p)
        muon.step()
        adamw.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, expected[name] if p.ndim > 1 else q, atol=1e-5), name


def test_a_skipped_step_changes_nothing() -> None:
    """On a GPU the optimizer itself reads that gradients are not finite."""
    model = network()
    muon = Muon(decay_groups(model.named_parameters(), 0.1), lr=0.01, fused=True)
    for step in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        momenta = [muon.state[p]["momentum"].clone() for p in model.parameters() if step and p.ndim > 1]
        for p, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            p.grad = gradient if step == 0 else torch.full_like(gradient, torch.nan)
        muon.grad_scale, muon.found_inf = None, torch.tensor(float(step))  # type: ignore[attr-defined]
        muon.step()
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) if step else not any(same)
        left = [muon.state[p]["momentum"] for p in model.parameters() if p.ndim > 1]
        assert all(torch.equal(one, other) for one, other in zip(momenta, left, strict=False))
