"""Labels spread over the graph of nearest neighbours."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.probing.logistic import LogisticRegression, with_unlabelled
from frugalvit.probing.propagation import NEIGHBOURS, POWER, SPREAD, UNKNOWN, propagate_labels


def clusters(count: int, classes: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centers, labels = torch.randn(classes, 16, generator=generator), torch.arange(count) % classes
    return centers[labels] + noise * torch.randn(count, 16, generator=generator), labels


def spread_by_loops(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The definition: a dense graph, edge by edge, and a linear system."""
    count, unit = len(features), F.normalize(features - features.mean(0), dim=1).double()
    weight = torch.zeros(count, count, dtype=torch.float64)
    for one in range(count):
        cosines = unit @ unit[one]
        cosines[one] = -1
        for other in cosines.argsort(descending=True)[:NEIGHBOURS].tolist():
            edge = max(float(cosines[other]), 0.0) ** POWER
            weight[one, other] += edge
            weight[other, one] += edge
    degree = weight.sum(1)
    graph = weight / (degree[:, None] * degree[None]).sqrt()
    given = torch.zeros(count, classes, dtype=torch.float64)
    for row, label in enumerate(labels.tolist()):
        if label != UNKNOWN:
            given[row, label] = 1
    spread = torch.linalg.solve(torch.eye(count, dtype=torch.float64) - SPREAD * graph, given)
    shares = spread / spread.sum(0) * given.sum(0)
    shares = shares / shares.sum(1, keepdim=True)
    shares[labels != UNKNOWN] = given[labels != UNKNOWN]
    return shares


def hide(labels: Tensor, known: int) -> Tensor:
    return torch.where(torch.arange(len(labels)) < known, labels, UNKNOWN)


def test_propagation_equals_the_linear_system():
    features, labels = clusters(60, 3, noise=0.5)
    partly = hide(labels, 9)
    shares = propagate_labels(features, partly, 3)
    torch.testing.assert_close(shares.double(), spread_by_loops(features, partly, 3), atol=5e-3, rtol=0)
    torch.testing.assert_close(shares.sum(1), torch.ones(60))
    assert torch.equal(shares[:9].argmax(1), labels[:9])


def test_chunks_of_rows_change_nothing(monkeypatch):
    features, labels = clusters(50, 3, noise=0.5)
    whole = propagate_labels(features, hide(labels, 6), 3)
    monkeypatch.setattr("frugalvit.probing.propagation._ROWS", 7)
    torch.testing.assert_close(propagate_labels(features, hide(labels, 6), 3), whole)


def test_images_out_of_reach_get_the_shares_of_the_labels():
    features = torch.cat([torch.randn(40, 4), -100 * torch.ones(2, 4)])
    features[40:, 0] += torch.tensor([0.0, 0.001])
    labels = torch.full((42,), UNKNOWN)
    labels[:3] = torch.tensor([0, 0, 1])
    shares = propagate_labels(features, labels, 2)
    assert shares.isfinite().all()
    torch.testing.assert_close(shares.sum(1), torch.ones(42))


@pytest.mark.parametrize("classes", [2, 5])
def test_unlabelled_images_help_logistic_regression(classes):
    features, labels = clusters(300, classes, noise=0.9)
    few, rest = slice(0, 2 * classes), slice(2 * classes, None)

    def accuracy(others: Tensor | None) -> float:
        problem = LogisticRegression(*with_unlabelled(features[few], labels[few], others), classes)
        return float((problem.fit(1.0).scores(features[rest]).argmax(1) == labels[rest]).float().mean())

    assert accuracy(features[rest]) > accuracy(None)


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_learns_weighted_guesses(classes):
    """At the minimum of the weighted loss the gradient is zero; autograd computes it."""
    features, labels = clusters(80, classes, noise=1.0)
    partly, features = hide(labels, 12), features.double()
    fit = LogisticRegression(features, partly, classes).fit(0.5, tolerance=1e-5)
    weight, bias = (part.double().requires_grad_() for part in (fit.weight, fit.bias))
    shares, logits = propagate_labels(features, partly, classes), features @ weight + bias
    if classes == 2:
        logits = torch.cat([torch.zeros(80, 1), logits], dim=1)
    loss = 0.25 * weight.square().sum()
    for row in range(80):
        guess = int(shares[row].argmax()) if row >= 12 else int(labels[row])
        certainty = float(shares[row].max()) ** 2 if row >= 12 else 1.0
        loss = loss - certainty * logits[row].log_softmax(0)[guess]
    loss.backward()
    assert weight.grad is not None and bias.grad is not None
    assert weight.grad.norm() < 1e-3 * (0.5 * weight.detach()).norm() and bias.grad.norm() < 1e-3
