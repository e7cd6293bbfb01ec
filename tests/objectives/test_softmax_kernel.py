"""The softmax kernel equals PyTorch's softmax: interpreted on the CPU, and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the kernel is written in Triton, which is not installed")
from frugalvit.objectives.softmax_kernel import fused_softmax

CASES = [(3, 5, True), (2, 4096, False), (2, 5000, True), (4, 1, False)]


def check(rows: int, length: int, shifted: bool, device: str, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(rows * length)
    logits = (30 * torch.randn(rows, length, generator=generator)).to(device)
    shift = torch.randn(length, generator=generator).to(device) if shifted else None
    moved = logits.double() if shift is None else logits.double() - shift.double()
    normalizer, probabilities = fused_softmax(logits, shift, dtype)
    torch.testing.assert_close(normalizer.double(), moved.logsumexp(-1), atol=1e-4, rtol=1e-5)
    assert probabilities.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(probabilities.double(), moved.softmax(-1), atol=1e-5, rtol=1e-4 + rounding)


def test_interpreted() -> None:
    """Triton decides at import whether to interpret, so this runs in another process."""
    ran = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    if "only 0-dimensional arrays can be converted" in ran.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["right"] * len(CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "length", "shifted"), [*CASES, (300, 65536, True), (7, 65536, False)])
def test_on_a_gpu(rows: int, length: int, shifted: bool, dtype: torch.dtype) -> None:
    check(rows, length, shifted, "cuda", dtype)


if __name__ == "__main__":
    for case in CASES:
        check(*case, device="cpu")
        print("right")
