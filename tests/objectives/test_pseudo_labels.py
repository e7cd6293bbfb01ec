"""Thresholds, weights and losses of pseudo-labels equal the papers' formulas as loops, gradients included."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frugalvit.engine.step import MOVED
from frugalvit.errors import UserError
from frugalvit.objectives import FlexMatch, SoftMatch, pseudo_label_loss
from frugalvit.objectives.pseudo_labels import PseudoLabels

CLASSES, IMAGES, TAU, M = 4, 11, 0.7, 0.8
Oracle = Callable[[list[list[float]], list[int]], list[float]]


class FlexOracle:
    """FlexMatch, image by image."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def __call__(self, probs: list[list[float]], index: list[int]) -> list[float]:
        sigma = [sum(label == c for label in self.last.values()) for c in range(CLASSES)]
        highest = max(*sigma, IMAGES - len(self.last))
        thresholds = [TAU * (s / highest) / (2 - s / highest) for s in sigma]
        weights = []
        for row, image in zip(probs, index, strict=True):
            label = row.index(max(row))
            weights.append(1.0 if max(row) > thresholds[label] else 0.0)
            if max(row) > TAU:
                self.last[image] = label
        return weights


class SoftOracle:
    """SoftMatch's weights, image by image."""

    def __init__(self) -> None:
        self.mean, self.variance, self.p = 1 / CLASSES, 1.0, [1 / CLASSES] * CLASSES

    def __call__(self, probs: list[list[float]], index: list[int]) -> list[float]:
        count = len(probs)
        for c in range(CLASSES):
            self.p[c] = M * self.p[c] + (1 - M) * sum(row[c] for row in probs) / count
        highest = []
        for row in probs:
            aligned = [q / CLASSES / p for q, p in zip(row, self.p, strict=True)]
            highest.append(max(aligned) / sum(aligned))
        mean = sum(highest) / count
        variance = sum((x - mean) ** 2 for x in highest) / (count - 1)
        self.mean = M * self.mean + (1 - M) * mean
        self.variance = M * self.variance + (1 - M) * variance
        return [math.exp(-((x - self.mean) ** 2) / (2 * self.variance / 4)) if x < self.mean else 1.0 for x in highest]


METHODS: dict[str, tuple[Callable[[], PseudoLabels], Callable[[], Any]]] = {
    "flexmatch": (lambda: FlexMatch(CLASSES, IMAGES, TAU), FlexOracle),
    "softmatch": (lambda: SoftMatch(CLASSES, M), SoftOracle),
}


def predictions(seed: int, count: int, sharpness: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = (sharpness * torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)).softmax(1)
    return probs, torch.randperm(IMAGES, generator=generator)[:count]


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 1000), count=st.integers(2, IMAGES), sharpness=st.floats(0.2, 5))
def test_weights_equal_the_loops(method: str, seed: int, count: int, sharpness: float) -> None:
    make, oracle = METHODS[method]
    labels, expected = make().double(), oracle()
    for step in range(4):
        probs, index = predictions(seed + step, count, sharpness)
        weights = labels(probs, index)
        torch.testing.assert_close(weights, weights.new_tensor(expected(probs.tolist(), index.tolist())))


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_and_a_copy_change_nothing(method: str) -> None:
    """In evaluation mode thresholds stay; a loaded state gives the same weights."""
    labels, other = METHODS[method][0](), METHODS[method][0]()
    for step in range(3):
        probs, index = predictions(step, 8, 3.0)
        labels(probs.float(), index)
    before = {name: value.clone() for name, value in labels.state_dict().items()}
    weights = labels.eval()(probs.float(), index)
    torch.testing.assert_close(labels.state_dict(), before, rtol=0, atol=0)
    other.load_state_dict(before)
    torch.testing.assert_close(other.eval()(probs.float(), index), weights, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_step_restores_every_buffer(method: str) -> None:
    assert {name for name, _ in METHODS[method][0]().named_buffers()} <= set(MOVED)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_loss_and_gradients_equal_the_loops(temperature: float) -> None:
    (probs, _), logits = predictions(0, 6, 2.0), torch.randn(6, CLASSES, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 0.3, 1.0, 0.0, 0.7], dtype=torch.float64)
    expected = torch.zeros((), dtype=torch.float64)
    for n in range(6):
        log_student = logits[n] - torch.log(sum(torch.exp(value) for value in logits[n]))  # type: ignore[arg-type]
        sharp = [float(q) ** (1 / temperature) for q in probs[n]] if temperature else []
        for c in range(CLASSES):
            target = sharp[c] / sum(sharp) if temperature else float(c == int(probs[n].argmax()))
            expected = expected - weights[n] * target * log_student[c] / 6
    loss = pseudo_label_loss(logits, probs, weights, temperature)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (got,), (want,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_flexmatch_lowers_the_threshold_of_a_hard_class() -> None:
    labels = FlexMatch(2, images=4, threshold=0.9)
    assert labels.thresholds().tolist() == [0, 0], "the warm-up starts at zero"
    labels(torch.tensor([[0.95, 0.05], [0.99, 0.01], [0.08, 0.92]]), torch.tensor([0, 1, 2]))
    assert labels.thresholds().tolist() == pytest.approx([0.9, 0.9 * 0.5 / 1.5])


def test_flexmatch_needs_the_number_of_images() -> None:
    with pytest.raises(UserError, match="FlexMatch"):
        FlexMatch(2, images=0)
