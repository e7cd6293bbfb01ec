"""The metrics against scikit-learn, and against small cases computed by hand."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score

from frugalvit.errors import UserError
from frugalvit.probing import metrics


@given(st.integers(0, 10**6), st.integers(6, 40), st.integers(3, 8))
def test_accuracies_equal_scikit_learn(seed: int, images: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(images, classes, generator=generator)
    labels = torch.randint(classes, (images,), generator=generator)
    ranked = metrics.rank_classes(scores)
    for k in (1, 2):
        expected = top_k_accuracy_score(labels, scores, k=k, labels=np.arange(classes))
        assert metrics.top_k_accuracy(ranked, labels, k) == pytest.approx(100 * expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class that is predicted but absent
        expected = balanced_accuracy_score(labels, ranked[:, 0])
    assert metrics.mean_per_class(ranked[:, 0], labels) == pytest.approx(100 * expected)


def test_eleven_points_by_hand() -> None:
    # ranked hits: + - + - -; precision at recall 1/2 is 1, at recall 1 it is 2/3: six levels at 1, five at 2/3
    scores = torch.tensor([0.9, 0.85, 0.8, 0.7, 0.6, 0.5])
    targets = torch.tensor([1, -1, 0, 1, 0, 0])  # -1: a difficult image, which does not count
    assert metrics.eleven_point_map(scores[:, None], targets[:, None]) == pytest.approx(100 * (6 + 5 * 2 / 3) / 11)


@pytest.mark.parametrize("positives", [10, 20, 30, 70, 90])
def test_recall_of_exactly_a_tenth_reaches_its_level(positives: int) -> None:
    """A negative follows every tenth of the positives: the precision at level k/10 is that at the k-th tenth."""
    tenth = positives // 10
    targets = torch.tensor(([1] * tenth + [0]) * 10)
    scores = torch.arange(len(targets), 0, -1).double()
    precisions = [1.0, *(k * tenth / (k * (tenth + 1) - 1) for k in range(1, 11))]
    assert metrics.eleven_point_map(scores[:, None], targets[:, None]) == pytest.approx(100 * sum(precisions) / 11)


@given(st.integers(0, 10**6), st.integers(3, 60), st.booleans())
def test_eleven_points_and_auc_equal_their_definitions(seed: int, images: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(images, generator=generator)
    scores = scores.round() if ties else scores
    targets = torch.randint(2, (images,), generator=generator)
    targets[0], targets[1] = 0, 1
    chosen = [targets[scores >= threshold] for threshold in scores.unique()]
    curve = [(int(part.sum()) / int(targets.sum()), int(part.sum()) / len(part)) for part in chosen]
    best = [max(precision for recall, precision in curve if recall >= level) for level in np.arange(11) / 10]
    assert metrics.eleven_point_map(scores[:, None], targets[:, None]) == pytest.approx(100 * np.mean(best))
    pairs = [(float(a), float(b)) for a in scores[targets == 1] for b in scores[targets == 0]]
    won = [(a > b) + (a == b) / 2 for a, b in pairs]
    assert metrics.roc_auc(scores, targets) == pytest.approx(100 * np.mean(won))


def test_map_is_the_mean_of_the_present_classes() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.3], [0.2, 0.8, 0.1]])
    targets = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert metrics.eleven_point_map(scores, targets) == pytest.approx((100 + 50) / 2)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: metrics.roc_auc(torch.rand(3), torch.zeros(3)), "both classes"),
        (lambda: metrics.score("roc_auc", torch.rand(3, 3), torch.arange(3)), "two classes"),
        (lambda: metrics.score("map11", torch.rand(3, 2), torch.zeros(3, 2)), "positive"),
        (lambda: metrics.top_k_accuracy(torch.zeros(0, 1), torch.zeros(0)), "no test images"),
    ],
)
def test_invalid_inputs_are_errors(call, word: str) -> None:
    with pytest.raises(UserError, match=word):
        call()
