"""Instance classification equals its formula, written as loops; gradients included."""

import pytest
import torch

from frugalvit.features import Features
from frugalvit.objectives import InstanceClassification


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("batch", "dim", "images"), [(1, 3, 2), (5, 4, 7), (3, 8, 30)])
def test_loss_and_gradients(batch: int, dim: int, images: int, mixed: bool) -> None:
    torch.manual_seed(batch)
    head = InstanceClassification(dim, images).double()
    pooled = torch.randn(batch, dim, dtype=torch.float64, requires_grad=True)
    numbers = torch.randint(images, (batch,))
    targets = torch.rand(batch, images, dtype=torch.float64).softmax(1) if mixed else numbers
    loss = head(Features(torch.zeros(batch, dim, 1, 1), pooled), targets)
    gradients = torch.autograd.grad(loss, [pooled, head.classifier.weight])

    expected = torch.zeros((), dtype=torch.float64)
    for i in range(batch):
        logits = [pooled[i] @ head.classifier.weight[n] + head.classifier.bias[n] for n in range(images)]
        log_sum = sum(logit.exp() for logit in logits).log()
        for n in range(images):
            share = targets[i, n] if mixed else float(numbers[i] == n)
            expected = expected - share * (logits[n] - log_sum) / batch
    assert torch.allclose(loss.double(), expected, rtol=1e-5)  # cross-entropy is computed in float32
    for one, other in zip(gradients, torch.autograd.grad(expected, [pooled, head.classifier.weight]), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
