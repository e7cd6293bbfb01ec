"""The floor of a run: simple methods against obvious slow versions, and the alarm of a network below them."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from frugalvit.data.cache.store import CachedStore
from frugalvit.probing import floor
from frugalvit.probing.floor import check_floor, compute_floor, describe_floor, describe_images
from frugalvit.utils.intervals import wilson_interval


def make_store(images: int, classes: int, seed: int, side: tuple[int, int] = (12, 9)) -> CachedStore:
    """Noisy images whose colour hints at the class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, images)
    pixels = random.integers(0, 200, (images, 3, *side))
    pixels[np.arange(images), labels % 3] += 20
    return CachedStore.from_arrays(pixels.astype(np.uint8), labels)


def slow_vector(image: np.ndarray) -> np.ndarray:
    """Describe one image (3, 8 n, 8 m) with loops."""
    _, height, width = image.shape
    down, across = height // 8, width // 8
    values = image / 255
    thumbnail = [
        values[c, i * down : (i + 1) * down, j * across : (j + 1) * across].mean()
        for c in range(3)
        for i in range(8)
        for j in range(8)
    ]
    counts = np.zeros((4, 4, 4))
    for y in range(height):
        for x in range(width):
            counts[tuple(image[:, y, x] // 64)] += 1
    colours = [*values.mean((1, 2)), *values.std((1, 2)), *np.sqrt(counts.ravel() / (height * width))]
    return np.array([*thumbnail, *(5 * np.array(colours))])


@pytest.mark.parametrize("side", [(8, 8), (16, 24), (64, 32)])
def test_vectors_equal_the_slow_version(side: tuple[int, int]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 3, *side)).astype(np.uint8)
    images[0] = 0
    expected = np.stack([slow_vector(image) for image in images])
    np.testing.assert_allclose(describe_images(torch.from_numpy(images)).numpy(), expected, atol=1e-5)


def test_large_images_are_read_sparsely() -> None:
    """Every third pixel of 130 is read: at most 64 a side."""
    images = torch.randint(0, 256, (2, 3, 130, 130), dtype=torch.uint8)
    assert torch.equal(describe_images(images), describe_images(images[:, :, ::3, ::3]))


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_equal_those_of_slow_methods(classes: int) -> None:
    train, scored = make_store(90, classes, 1), make_store(300, classes, 2)
    found = compute_floor(train, scored, classes, seed=0)
    assert train.labels is not None and scored.labels is not None
    x, y = describe_images(train.images).double().numpy(), train.labels.numpy()
    q, truth = describe_images(scored.images).double().numpy(), scored.labels.numpy()
    assert found["majority"] == pytest.approx(100 * (truth == np.bincount(y).argmax()).mean())
    cosine = (q @ x.T) / np.linalg.norm(x, axis=1)
    assert found["nearest_neighbour"] == pytest.approx(100 * (y[cosine.argmax(1)] == truth).mean())
    oracle = LogisticRegression(C=1 / 3, max_iter=5000).fit(x, y)
    assert found["logistic"] == pytest.approx(100 * oracle.score(q, truth), abs=2)  # it stops earlier
    methods = ("majority", "nearest_neighbour", "logistic")
    assert found["best"] == max(found[name] for name in methods) == found[found["method"]]
    assert (found["fitted_images"], found["train_images"]) == (90, 90)


def test_a_seed_draws_a_part_of_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    train, scored = make_store(200, 4, 1), make_store(50, 4, 2)
    monkeypatch.setattr(floor, "MAX_IMAGES", 60)
    found = [compute_floor(train, scored, 4, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2] and found[0]["fitted_images"] == 60
    assert describe_floor(found[0]).endswith("which learned from 60 of 200 training images")
    monkeypatch.setattr(floor, "MAX_CELLS", 100)  # images × classes
    assert compute_floor(train, scored, 4, 0)["fitted_images"] == 25


def test_unreadable_images_do_not_count() -> None:
    """Their substitutes would be scored twice, and would be their own nearest neighbours."""
    whole, broken = make_store(40, 3, 1), make_store(40, 3, 1)
    assert broken.labels is not None
    readable = torch.arange(40)[torch.arange(40) % 5 != 0]
    broken = CachedStore(
        broken.images[readable], broken.sizes[readable], broken.labels, broken.names, readable, "cpu", [("a", "b")] * 8
    )
    assert compute_floor(whole, broken, 3, 0)["nearest_neighbour"] == 100
    found = compute_floor(broken, whole, 3, 0)
    assert found["fitted_images"] == 32 and 80 <= found["nearest_neighbour"] < 100


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 1, 2]])
def test_equal_images_and_a_single_class_are_no_error(labels: list[int]) -> None:
    store = CachedStore.from_arrays(np.zeros((4, 3, 8, 8), np.uint8), np.array(labels))
    found = compute_floor(store, store, 3, 0)
    assert found["logistic"] == found["majority"] == 100 * max(np.bincount(labels)) / 4


FLOOR: dict[str, Any] = {
    "majority": 10.0,
    "nearest_neighbour": 30.0,
    "logistic": 40.0,
    "best": 40.0,
    "method": "logistic",
    "fitted_images": 9,
    "train_images": 9,
    "scored_images": 100,
}
ONE_CLASS = FLOOR | {"majority": 100.0, "best": 100.0, "method": "majority"}


@pytest.mark.parametrize(
    ("top1", "stored", "sign"),
    [
        (41.0, FLOOR, None),
        (40.0, FLOOR, None),
        (32.0, FLOOR, None),
        (30.0, FLOOR, "below the floor: logistic regression on thumbnails and colours has 40.0 %"),
        (10.0, FLOOR, "not above the most frequent class"),
        (3.0, FLOOR, "not above the most frequent class"),
        (40.0, FLOOR | {"majority": 40.0, "method": "majority"}, "not above the most frequent class"),
        (100.0, ONE_CLASS, None),
        (0.0, {"skipped": "the training images are a stream"}, None),
    ],
)
def test_a_network_below_the_floor_is_an_alarm(top1: float, stored: dict[str, Any], sign: str | None) -> None:
    alarms = check_floor(top1, stored)
    assert len(alarms) == (sign is not None)
    if sign is not None:
        assert sign in alarms[0]
        assert all(word in alarms[0] for word in ("--pretrained", "frugalvit probe", "--epochs", "--backbone"))
        assert "--pretrained" not in check_floor(top1, stored, pretrained=True)[0]


@pytest.mark.parametrize(("top1", "about"), [(30.0, False), (31.0, True), (49.0, True), (51.0, False)])
def test_within_the_interval_a_network_is_as_good(top1: float, about: bool) -> None:
    low, high = wilson_interval(40, 100)
    assert about == (low <= top1 <= high)
    assert describe_floor(FLOOR, top1).endswith("not clearly better or worse") == about


def test_one_line_names_the_best_method() -> None:
    text = describe_floor(FLOOR | {"scored_images": 110})
    assert text == "40.0 % (95 %: 31.3 to 49.3) without a network, on the same images: logistic regression"
    assert describe_floor({"skipped": "a reason"}) == "not computed: a reason"
