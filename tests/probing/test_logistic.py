"""The logistic probe against scikit-learn: same objective, same coefficients, same accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression as Theirs
from sklearn.multiclass import OneVsRestClassifier
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.probing import lbfgs
from frugalvit.probing.lbfgs import principal_axes
from frugalvit.probing.logistic import TOLERANCE, LogisticRegression, logistic_probe, search_strength


def blobs(images: int, width: int, classes: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian classes in a space whose axes differ a hundredfold in scale, away from the origin."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -2, width)
    centres = torch.randn(classes, width, generator=generator)
    labels = torch.arange(images) % classes
    noises = noise * torch.randn(images, width, generator=generator)
    return ((centres[labels] + noises) * scale + 1.0).double(), labels


def objective(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, strength: float) -> float:
    logits = features @ weight + bias
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return float(loss + strength / 2 * weight.square().sum())


@pytest.mark.parametrize("strength", [1e-3, 1e-1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize(("images", "width"), [(150, 12), (40, 60)])
def test_coefficients_equal_scikit_learn(strength: float, images: int, width: int) -> None:
    features, labels = blobs(images, width, 5, noise=2.0)
    ours = LogisticRegression(features, labels).fit([strength], tolerance=1e-8)
    theirs = Theirs(C=1 / strength, tol=1e-10, max_iter=20000).fit(features.numpy(), labels.numpy())
    np.testing.assert_allclose(ours.weight[0].T, theirs.coef_, rtol=1e-3, atol=2e-5 * np.abs(theirs.coef_).max())
    shift = theirs.intercept_ - theirs.intercept_.mean()
    np.testing.assert_allclose(ours.bias[0], shift, rtol=1e-3, atol=1e-3 * np.abs(shift).max())
    assert (ours.scores(features)[0].argmax(1).numpy() == theirs.predict(features.numpy())).all()


def test_a_common_shift_of_the_start_is_not_kept() -> None:
    """Softmax ignores it, so nothing in the search would take it away; scikit-learn's intercepts have none."""
    features, labels = blobs(150, 12, 5, noise=2.0)
    problem = LogisticRegression(features, labels)
    first = problem.fit([1.0], tolerance=1e-8)
    again = problem.fit([1.0], start=replace(first, bias=first.bias + 3), tolerance=1e-8)
    theirs = Theirs(tol=1e-10, max_iter=20000).fit(features.numpy(), labels.numpy()).intercept_
    np.testing.assert_allclose(again.bias[0], theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


@pytest.mark.parametrize("strength", [1e-2, 1.0, 100.0])
def test_two_classes_equal_scikit_learn(strength: float) -> None:
    features, labels = blobs(80, 6, 2, noise=2.0)
    labels = labels + 1  # class 0 does not occur
    ours = LogisticRegression(features, labels, classes=3).fit([strength], tolerance=1e-8)
    theirs = Theirs(C=1 / strength, tol=1e-10, max_iter=20000).fit(features.numpy(), labels.numpy())
    np.testing.assert_allclose(ours.weight[0].T, theirs.coef_, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ours.bias[0], theirs.intercept_, rtol=1e-3, atol=1e-4)
    scores = ours.scores(features)[0]
    assert (scores.argmax(1).numpy() == theirs.predict(features.numpy())).all()
    assert torch.isinf(scores[:, 0]).all()


def test_several_labels_equal_one_classifier_per_class_and_unknown_ones_do_not_count() -> None:
    features, labels = blobs(90, 6, 3, noise=2.0)
    targets = torch.stack([labels == 0, labels != 1], dim=1).long()
    ours = LogisticRegression(features, targets).fit([0.5], tolerance=1e-8)
    theirs = OneVsRestClassifier(Theirs(C=2.0, tol=1e-10, max_iter=20000)).fit(features.numpy(), targets.numpy())
    for column, single in enumerate(theirs.estimators_):
        np.testing.assert_allclose(ours.weight[0, :, column], single.coef_[0], rtol=1e-3, atol=1e-5)
    targets[:30, 0] = -1
    ours = LogisticRegression(features, targets).fit([0.5], tolerance=1e-8)
    single = Theirs(C=2.0, tol=1e-10, max_iter=20000).fit(features[30:].numpy(), targets[30:, 0].numpy())
    np.testing.assert_allclose(ours.weight[0, :, 0], single.coef_[0], rtol=1e-3, atol=1e-5)


@settings(max_examples=8)
@given(st.integers(0, 1000), st.integers(8, 40), st.integers(1, 30), st.integers(2, 6))
def test_strengths_together_equal_strengths_alone(seed: int, images: int, width: int, classes: int) -> None:
    features, labels = blobs(images, width, classes, noise=1.0, seed=seed)
    problem = LogisticRegression(features, labels)
    strengths = [1e-2, 1.0, 1e2]
    together = problem.fit(strengths, tolerance=1e-6)
    assert all(together.converged)
    for i, strength in enumerate(strengths):
        alone = problem.fit([strength], start=problem.fit([1.0]), tolerance=1e-6)
        torch.testing.assert_close(together.weight[i], alone.weight[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strength", [1e-6, 1e-3, 1.0, 1e6])
def test_single_precision_reaches_the_minimum_too(strength: float) -> None:
    features, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    features, labels = features[:400], labels[:400].long()
    exact = LogisticRegression(features, labels).fit([strength], tolerance=1e-4)
    single = LogisticRegression(features.float(), labels).fit([strength])
    lowest = objective(features, labels, exact.weight[0], exact.bias[0], strength)
    found = objective(features, labels, single.weight[0].double(), single.bias[0].double(), strength)
    assert exact.converged[0] and single.converged[0]
    assert found <= lowest * (1 + 2e-3)


def few(images: int, width: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Fewer images than dimensions, of many classes: any labels of them can be told apart without a mistake."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, width + 1) ** -0.5
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(images) % classes
    return (centres[labels] + 2.5 * torch.randn(images, width, generator=generator)) * scale, labels


@pytest.mark.filterwarnings("ignore:The number of unique classes")
@pytest.mark.parametrize(("strength", "size"), [(1e-4, 1e-2), (1e-4, 1.0), (1e-4, 1e2), (1e-6, 1e-2), (1e-6, 1.0)])
def test_weak_strengths_of_separable_images_are_soon_found(strength: float, size: float) -> None:
    """They ended in numbers that are none, or far from the minimum, after up to a thousand iterations."""
    features, labels = few(100, 384, 100)
    features = size * features
    found = LogisticRegression(features, labels).fit([strength])
    assert found.converged == [True] and found.iterations[0] < 60
    spanned = torch.linalg.qr(features.double().T)[1].T  # the same images in their own dimensions: quicker for theirs
    theirs = Theirs(C=1 / strength, tol=0.01 * strength, max_iter=20000, solver="newton-cg").fit(spanned, labels)
    weight, bias = torch.from_numpy(theirs.coef_.T), torch.from_numpy(theirs.intercept_)
    lowest = objective(spanned, labels, weight, bias, strength)
    ours = objective(features.double(), labels, found.weight[0].double(), found.bias[0].double(), strength)
    assert ours <= lowest * (1 + 1e-3)


def test_few_labels_take_few_iterations_and_end_where_convergence_does() -> None:
    """200 labels of 100 classes against the minimum itself, in doubles and each from zero."""
    (train, labels), (val, answers), (test, truth) = (
        few(count, 384, 100, i) for i, count in enumerate((200, 400, 500))
    )
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        step = lbfgs._Active.step
        patched.setattr(lbfgs._Active, "step", lambda going: (counted.append(1), step(going)))
        found = logistic_probe(train, labels, val, answers, test)
    assert found.converged and len(counted) < 250, "it was a thousand and more for the weakest alone"

    def right(scores: Tensor, wanted: Tensor) -> int:
        return int((scores.argmax(1) == wanted).sum())

    alone = LogisticRegression(train.double(), labels)
    exact = {}
    for strength in (1e-6, 1e-4, 1e-2, 1.0):
        fit = alone._fit_one(strength, None, 5000, 1e-5)
        exact[strength] = right(fit.scores(val)[0], answers)
        assert fit.converged == [True] and abs(found.tried[strength] / 100 * len(val) - exact[strength]) <= 2
    assert found.validation / 100 * len(val) >= max(exact.values()) - 1
    both = LogisticRegression(torch.cat([train, val]).double(), torch.cat([labels, answers]))
    final = both._fit_one(found.strength, None, 5000, 1e-5)
    assert abs(right(found.scores, truth) - right(final.scores(test)[0], truth)) <= 3


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_a_search_along_a_line_that_ends_early_goes_downhill(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no length that it has not tried; where it finds none it says so."""
    monkeypatch.setattr(lbfgs, "TRIALS", trials)
    features, labels = few(60, 96, 30)
    features = 100 * features.double()
    problem, start = LogisticRegression(features, labels), torch.zeros(96, 30).double()
    values = [objective(features, labels, start, start[0], 1e-4)]
    for limit in range(1, 12):
        fit = problem._fit_one(1e-4, None, limit, TOLERANCE)
        values.append(objective(features, labels, fit.weight[0], fit.bias[0], 1e-4))
        assert values[-1] <= values[-2] * (1 + 1e-9) and not fit.converged[0]


def test_strengths_between_lead_to_those_asked_for() -> None:
    """Neither their order nor what is known before changes where they end."""
    features, labels = few(60, 96, 30)
    problem = LogisticRegression(features.double(), labels)
    whole = problem.fit([1e-6, 1e2, 1e-2], tolerance=1e-6)
    again = problem.fit([1e-6, 1e2, 1e-2], start=problem.fit([1e4, 1e-1]), tolerance=1e-6)
    assert whole.strengths == again.strengths == [1e-6, 1e2, 1e-2]
    torch.testing.assert_close(whole.weight, again.weight, rtol=1e-4, atol=1e-5)


def test_the_line_through_two_strengths() -> None:
    features, labels = blobs(60, 5, 3, noise=1.0)
    fit = LogisticRegression(features, labels).fit([1.0, 1e-2])
    (stronger, weaker), line = fit.weight, lambda strength: fit.extrapolate(strength)[0][0]
    torch.testing.assert_close(line(1e-1), (stronger + weaker) / 2)
    torch.testing.assert_close(line(1e-4), 2 * weaker - stronger)
    torch.testing.assert_close(line(1e-9), 2 * weaker - stronger)  # as far again, no further
    torch.testing.assert_close(line(1.0), stronger)


def test_a_limit_of_iterations_is_kept_and_said() -> None:
    features, labels = blobs(60, 20, 4, noise=3.0)
    fit = LogisticRegression(features, labels).fit([1e-3, 1e6], max_iterations=3)
    assert fit.iterations[0] == 3 and fit.converged == [False, True]


def test_constant_features_give_the_class_frequencies() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2])
    fit = LogisticRegression(torch.ones(5, 3), labels).fit([1.0], tolerance=1e-6)
    chances = fit.scores(torch.ones(1, 3))[0].softmax(1)
    torch.testing.assert_close(chances, torch.tensor([[0.6, 0.2, 0.2]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("peak", [-6.0, -3.125, 0.0, 1.875, 5.9, 6.0])
def test_the_search_finds_the_peak_of_a_single_hill(peak: float) -> None:
    asked: list[float] = []

    def hill(strengths: list[float]) -> list[float]:
        asked.extend(strengths)
        return [-abs(np.log10(strength) - peak) for strength in strengths]

    best, tried = search_strength(hill)
    assert abs(np.log10(best) - peak) <= 1 / 16 + 1e-9
    assert len(asked) == len(set(asked)) == len(tried) <= 15
    np.testing.assert_allclose(sorted(asked[:7]), [1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6])


def test_of_a_plateau_the_middle_is_taken() -> None:
    best, tried = search_strength(lambda strengths: [float(1e-5 < strength < 1e3) for strength in strengths])
    assert tried[best] == 1.0 and 1e-2 <= best <= 10
    best, _ = search_strength(lambda strengths: [7.0 for _ in strengths])
    assert best == 1.0


def test_the_probe_equals_scikit_learn_at_the_strengths_it_tries_and_on_the_test_images() -> None:
    features, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    features, labels = features / 16, labels.long()
    train, val, test, both = slice(0, 150), slice(150, 300), slice(300, 700), slice(0, 300)
    found = logistic_probe(features[train], labels[train], features[val], labels[val], features[test], tolerance=1e-5)
    for strength in (1e-2, 1.0, 1e2, 1e4):
        theirs = Theirs(C=1 / strength, max_iter=1000, tol=1e-6).fit(features[train], labels[train])
        assert found.tried[strength] == pytest.approx(100 * theirs.score(features[val], labels[val]))
    assert found.validation == max(found.tried.values())
    theirs = Theirs(C=1 / found.strength, max_iter=5000, tol=1e-9).fit(features[both], labels[both])
    assert (found.scores.argmax(1).numpy() == theirs.predict(features[test])).all()


def test_few_images_and_classes_that_splits_lack() -> None:
    features, labels = blobs(12, 4, 3, noise=0.1)
    found = logistic_probe(features[:2], labels[:2], features[2:4], labels[2:4], features[4:7])
    assert found.scores.shape == (3, 3)  # class 2 comes with the validation images


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"train_targets": torch.zeros(6, dtype=torch.long)}, "at least two classes"),
        ({"train_targets": torch.zeros(5, dtype=torch.long)}, "5 labels"),
        ({"val": torch.zeros(0, 3), "val_targets": torch.zeros(0, dtype=torch.long)}, "validation images"),
        ({"train": torch.full((6, 3), torch.nan)}, "training features"),
        ({"val": torch.full((3, 3), torch.nan)}, "validation features"),
        ({"test": torch.full((3, 3), torch.inf)}, "test features"),
    ],
)
def test_bad_input_is_said(change: dict, word: str) -> None:
    usual = {
        "train": torch.rand(6, 3),
        "train_targets": torch.arange(6) % 2,
        "val": torch.rand(3, 3),
        "val_targets": torch.arange(3) % 2,
        "test": torch.rand(3, 3),
    }
    with pytest.raises(UserError, match=word):
        logistic_probe(**(usual | change))


@pytest.mark.parametrize("shape", [(50, 8), (8, 50), (20, 20)])
def test_axes_keep_the_logits(shape: tuple[int, int]) -> None:
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    axes = principal_axes(features)
    weight, bias = torch.randn(2, axes.rows.shape[1], 3).double(), torch.randn(2, 3).double()
    original, shifted = axes.back(weight, bias)
    torch.testing.assert_close(features @ original + shifted[:, None], axes.rows @ weight + bias[:, None])
    torch.testing.assert_close(original.norm(dim=1), weight.norm(dim=1))
    again, bias_again = axes.into(original, shifted)
    torch.testing.assert_close(again, weight)
    torch.testing.assert_close(bias_again, bias)


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu() -> None:
    features, labels = blobs(400, 20, 6, noise=2.0)
    cpu = LogisticRegression(features, labels).fit([1e-2, 1.0, 1e2], tolerance=1e-6)
    gpu = LogisticRegression(features, labels, device="cuda").fit([1e-2, 1.0, 1e2], tolerance=1e-6)
    torch.testing.assert_close(gpu.weight.cpu(), cpu.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strength", [1e4, 1e2, 1.0])
def test_strong_strengths_have_their_bias_too(strength: float) -> None:
    """W is so small there that a gradient small beside λ|W| left the bias where it was: 32.8 of 100 instead of 39.2."""
    images, labels = few(200, 384, 100)
    others, truth = few(1000, 384, 100, seed=5)
    right = []
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float64, 1e-8)):
        problem = LogisticRegression(images.to(dtype), labels, 100, torch.device("cpu"))
        scores = problem.fit([strength], max_iterations=20_000, tolerance=tolerance).scores(others.to(dtype))[0]
        right.append((scores.argmax(1) == truth).float().mean().item())
    assert right[0] == pytest.approx(right[1], abs=0.01)
