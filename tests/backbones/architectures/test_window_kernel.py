"""The window kernels equal plain torch: interpreted on the CPU in full precision, and on a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from frugalvit.backbones.architectures.swin import SwinTransformer
from frugalvit.backbones.architectures.windows import WindowPlan, mask, plan_windows, window_partition, window_reverse

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")
from frugalvit.backbones.architectures import window_kernel

PLANS = {
    "whole": plan_windows((4, 6), (4, 3), (0, 0), True),
    "shifted": plan_windows((8, 8), (4, 4), (2, 2), True),
    "padded and shifted": plan_windows((7, 10), (4, 4), (2, 2), True),
    "shifted along one axis": plan_windows((3, 8), (4, 4), (2, 2), True),
    "one short window that the shift parts": plan_windows((3, 3), (7, 7), (2, 3), True),
    "zeros, where windows divide": plan_windows((14, 7), (7, 7), (3, 3), False),
}
INTERPRETED = ["padded and shifted", "one short window that the shift parts"]  # a GPU runs all


def plainly(qkv: Tensor, bias: Tensor, plan: WindowPlan) -> Tensor:
    """Partition, attend, reverse."""
    heads = len(bias)
    windows = window_partition(qkv, plan)
    query, key, value = windows.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    added = bias[None]
    forbidden = mask(plan, qkv)
    if forbidden is not None:
        added = (added + forbidden[:, None]).repeat(len(qkv), 1, 1, 1)
    seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=added.to(query.dtype))
    return window_reverse(seen.transpose(1, 2).flatten(2), plan)


def inputs(plan: WindowPlan, heads: int, width: int, images: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = plan.window[0] * plan.window[1]
    qkv = torch.randn(images, *plan.size, 3 * heads * width, generator=generator)
    bias = torch.randn(heads, count, count, generator=generator)
    grad = torch.randn(images, *plan.size, heads * width, generator=generator)
    return qkv, bias, grad


def interpret(plan: WindowPlan) -> None:
    """Run the source of the kernels on the CPU and compare with plain torch."""
    qkv, bias, grad = inputs(plan, 2, 16)
    expected = plainly(qkv.requires_grad_(), bias.requires_grad_(), plan)
    expected.backward(grad)

    numbers, shares = window_kernel.numbers_of(plan), 3
    values, table = qkv.detach(), bias.detach()
    out, grad_values = torch.full_like(grad, torch.nan), torch.full_like(values, torch.nan)
    parts = torch.full((shares, *bias.shape), torch.nan)
    window_kernel.launch(window_kernel.forward_kernel, [values, table, out], values, table, numbers, shares, 2, 2)
    both = [grad, values, table, grad_values, parts]
    window_kernel.launch(window_kernel.backward_kernel, both, values, table, numbers, shares, 4, 3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad_values, qkv.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts.sum(0), bias.grad, atol=1e-5, rtol=1e-5)


def test_interpreted_kernels_equal_plain_torch() -> None:
    """Triton decides at import whether to interpret, so this runs in another process."""
    ran = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    if "only 0-dimensional arrays can be converted" in ran.stderr:
        pytest.skip("this Triton's interpreter does not take this NumPy")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split("\n")[:-1] == INTERPRETED


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_are_as_exact_as_half_precision_allows(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name]
    qkv, bias, grad = (tensor.cuda() for tensor in inputs(plan, 3, 32, images=5))

    def run(attend, dtype: torch.dtype) -> list[Tensor]:
        values, table = qkv.to(dtype).requires_grad_(), bias.clone().requires_grad_()
        attend(values, table, plan).backward(grad.to(dtype))
        assert values.grad is not None and table.grad is not None
        return [attend(values, table, plan).double(), values.grad.double(), table.grad.double()]

    exact = run(plainly, torch.float64)
    rounded = run(plainly, dtype)
    for ours, plain, truth in zip(run(window_kernel.window_attention, dtype), rounded, exact, strict=True):
        assert (ours - truth).norm() <= 1.2 * (plain - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.gpu
def test_network_with_kernels_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also compiled, and on maps that windows do not divide; the same step gives the same bits."""
    torch.manual_seed(0)
    network = SwinTransformer(num_classes=10, drop_path_rate=0.0).cuda()
    images = torch.randn(8, 3, 224, 160, device="cuda")

    def run(model: Callable[[Tensor], Tensor], half: bool = True) -> list[Tensor]:
        network.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = model(images).float()
        out.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
        return [out.detach(), *gradients]

    launched: list[int] = []
    launch = window_kernel.launch
    monkeypatch.setattr(window_kernel, "launch", lambda *values: (launched.append(1), launch(*values)))
    first, again = run(network), run(network)
    assert len(launched) == 2 * 2 * 12
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    compiled = run(torch.compile(network, dynamic=False))
    assert len(launched) > 2 * 2 * 12  # traced through the kernels, not around them
    monkeypatch.setattr("frugalvit.backbones.architectures.swin.TRITON_AVAILABLE", False)
    plain, truth = run(network), run(network, half=False)
    for ours, fused, slow, exact in zip(first, compiled, plain, truth, strict=True):
        allowed = 1.5 * (slow - exact).norm() + 1e-3 * exact.norm()
        assert (ours - exact).norm() <= allowed
        assert (fused - exact).norm() <= allowed


def test_plans_without_kernel() -> None:
    small = plan_windows((14, 14), (7, 7), (0, 0), True)
    assert window_kernel.fits(small, 32, torch.bfloat16)
    assert not window_kernel.fits(small, 32, torch.float32)
    assert not window_kernel.fits(small, 24, torch.bfloat16)
    assert not window_kernel.fits(plan_windows((28, 28), (14, 14), (0, 0), True), 32, torch.bfloat16)
    assert not window_kernel.fits(plan_windows((9, 9), (7, 7), (0, 0), False), 32, torch.bfloat16)


if __name__ == "__main__":
    for each in INTERPRETED:
        interpret(PLANS[each])
        print(each)
