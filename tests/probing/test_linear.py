"""The linear probe against torch.optim.SGD with one nn.Linear per setting."""

import math

import pytest
import torch
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.probing.linear import fit_linear, linear_probe


def blobs(images: int, seed: int = 0, classes: int = 4, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(9))
    return centres[labels] + 0.3 * torch.randn(images, width, generator=generator), labels


def one_by_one(views: Tensor, labels: Tensor, classes: int, lr: float, epochs: int, batch: int) -> nn.Linear:
    """The protocol with torch.optim, one setting at a time, with the same random draws."""
    generator = torch.Generator().manual_seed(5)
    linear = nn.Linear(views.shape[-1], classes)
    with torch.no_grad():
        linear.weight.copy_(0.01 * torch.randn(views.shape[-1], 1, classes, generator=generator)[:, 0].T)
        linear.bias.zero_()
    optimizer = torch.optim.SGD(linear.parameters(), lr=lr * batch / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        view = torch.randint(len(views), (len(labels),), generator=generator)
        for rows in order.split(batch):
            optimizer.zero_grad()
            features = views[view[rows], rows]
            nn.functional.cross_entropy(linear(features), labels[rows]).backward()
            optimizer.step()
        schedule.step()
    return linear


@pytest.mark.parametrize("views", [1, 3])
def test_joint_fits_equal_separate_fits(views: int) -> None:
    features, labels = blobs(22)
    features = torch.stack([features + 0.1 * v for v in range(views)])
    inputs = features if views > 1 else features[0]
    fit = fit_linear(inputs, labels, 4, lrs=(0.5, 4.0), epochs=5, batch=8, seed=5)
    for i, lr in enumerate((0.5, 4.0)):
        expected = one_by_one(features, labels, 4, lr, epochs=5, batch=8)
        torch.testing.assert_close(fit.weight[:, i].T, expected.weight.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fit.bias[i], expected.bias.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fit.scores(features[0])[i], expected(features[0]).detach(), rtol=1e-4, atol=1e-5)


def test_probe_chooses_the_best_on_validation() -> None:
    (train, train_labels), (val, val_labels), (test, test_labels) = blobs(80, 0), blobs(40, 1), blobs(40, 2)
    result = linear_probe(train, train_labels, val, val_labels, test, lrs=(1e-6, 1.0), epochs=20, batch=16)
    assert (result.scores.argmax(1) == test_labels).float().mean() > 0.9
    assert result.learning_rate == 1.0
    assert result.validation == max(entry["validation"] for entry in result.tried)


@pytest.mark.parametrize("views", [1, 3])
def test_final_fit_includes_held_out_images(views: int) -> None:
    """The scores are those of the chosen setting, trained on all images."""
    (train, train_labels), (val, val_labels), (test, _) = blobs(30, 0), blobs(12, 1), blobs(8, 2)
    stacked = torch.stack([train + 0.1 * v for v in range(views)])
    options = {"epochs": 4, "batch": 16, "seed": 5}
    inputs = stacked if views > 1 else train
    back = torch.stack([val + 0.2 * v for v in range(views)])
    more = {"held_out": back if views > 1 else val}
    result = linear_probe(inputs, train_labels, val, val_labels, test, lrs=(1e-6, 1.0), **more, **options)
    both = torch.cat([stacked, back], dim=1)
    labels = torch.cat([train_labels, val_labels])
    expected = one_by_one(both, labels, 4, result.learning_rate, epochs=4, batch=16)
    torch.testing.assert_close(result.scores, expected(test).detach(), rtol=1e-4, atol=1e-5)
    without = linear_probe(inputs, train_labels, val, val_labels, test, lrs=(1e-6, 1.0), **options)
    assert not torch.equal(without.scores, result.scores) and without.tried == result.tried


def test_diverging_rates_are_not_chosen() -> None:
    (train, train_labels), (val, val_labels) = blobs(40, 0), blobs(20, 1)
    result = linear_probe(
        train * 1e18, train_labels, val * 1e18, val_labels, val * 1e18, lrs=(1e-36, 1e25), epochs=3, batch=16
    )
    assert result.learning_rate == 1e-36
    assert math.isnan(result.tried[1]["validation"])
    with pytest.raises(UserError, match="diverged"):
        linear_probe(train * 1e18, train_labels, val, val_labels, val, lrs=(1e25,), epochs=3, batch=16)
    with pytest.raises(UserError, match="diverged with all training images"):
        linear_probe(train, train_labels, val, val_labels, val, lrs=(0.1,), epochs=2, held_out=val * 1e30)
