"""The splits of a probe: held-out parts, views, and some of the labels."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from frugalvit.config.probe import KnnConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.splits import subsample_labels
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.splits import assign_fifths, embed_splits, make_probe_splits, open_labelled


def numbered_features(images: int, first: int = 0, classes: int = 3) -> FeatureSet:
    """Features that are the number of the image."""
    numbers = torch.arange(first, first + images)
    names = [str(number) for number in numbers.tolist()]
    return FeatureSet(numbers.float()[:, None], numbers % classes, None, names, names)


def test_missing_splits_are_made_without_overlap() -> None:
    made = make_probe_splits({"train": numbered_features(60)}, 3, 0.2, seed=0)
    parts = [set(part.features[:, 0].tolist()) for part in (made.train, made.val, made.test)]
    assert [len(part) for part in parts] == [39, 9, 12] and len(set.union(*parts)) == 60
    assert torch.bincount(made.test.targets).tolist() == [4, 4, 4]
    assert len(made.notes) == 2
    again = make_probe_splits({"train": numbered_features(60)}, 3, 0.2, seed=0)
    assert torch.equal(again.train.features, made.train.features)
    other = make_probe_splits({"train": numbered_features(60)}, 3, 0.2, seed=5)
    for one, another in ((made.train, other.train), (made.val, other.val), (made.test, other.test)):
        assert not torch.equal(one.features, another.features)


def test_copies_stay_on_one_side() -> None:
    """Also through ``embed_splits``, which finds them: 12 pictures, three files each."""
    rng = np.random.default_rng(0)
    pictures = [PIL.Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(12)]
    with TemporaryDirectory() as folder:
        for number in range(36):
            (Path(folder) / f"{number % 3}").mkdir(exist_ok=True)
            pictures[number % 12].save(Path(folder) / f"{number % 3}/{number}.png")
        source = open_labelled(folder, None)
        images, rows = source.splits["train"], list(range(36))
        found = FeatureSet(
            torch.arange(36.0)[:, None], torch.tensor(images.labels), None, images.names, images.keys, positions=rows
        )
        parts = embed_splits(lambda *_: found, source)  # type: ignore[arg-type, return-value]
    made = make_probe_splits(parts, 3, 0.25, seed=0)
    assert "24 exact copies" in made.notes[0]
    sides = [
        {int(images.names[int(row)].split("/")[-1][:-4]) % 12 for row in part.features[:, 0]}
        for part in (made.train, made.val, made.test)
    ]
    assert sum(map(len, sides)) == 12 and all(sides)


def test_own_splits_are_used() -> None:
    train, val, test = numbered_features(30), numbered_features(12, 30), numbered_features(9, 42)
    val_is_test = make_probe_splits({"train": train, "val": val}, 3, 0.2, seed=0)
    assert len(val_is_test.test) == 12 and len(val_is_test.train) == 24
    own = make_probe_splits({"train": train, "val": val, "test": test}, 3, 0.2, seed=0)
    assert [len(part) for part in (own.train, own.val, own.test)] == [30, 12, 9] and not own.notes


def test_views_replace_the_training_features_only() -> None:
    views = torch.stack([torch.arange(30.0)[:, None] + 100 * v for v in (1, 2)])
    parts = {"train": numbered_features(30), "test": numbered_features(9)}
    made = make_probe_splits(parts, 3, 0.2, seed=0, views=views)
    plain = make_probe_splits(parts, 3, 0.2, seed=0)
    assert torch.equal(made.train.features[1], plain.train.features + 200)
    assert torch.equal(made.val.features, plain.val.features)


def test_too_few_images_to_hold_any_out() -> None:
    with pytest.raises(UserError, match="3 training images"):
        make_probe_splits({"train": numbered_features(3)}, 3, 0.2, seed=0)
    with pytest.raises(UserError, match=r"one image.*probe knn"):
        make_probe_splits({"train": numbered_features(3), "test": numbered_features(9)}, 3, 0.2, seed=0)


@pytest.mark.parametrize(
    ("part", "counts"), [(0.5, [5, 2, 1]), (0.01, [1, 1, 1]), (2.0, [2, 2, 1]), (8.0, [8, 4, 1]), (1.0, [10, 4, 1])]
)
def test_labels_are_a_share_or_a_number_of_each_class(part: float, counts: list[int]) -> None:
    labels = np.repeat([0, 1, 2], [10, 4, 1])
    rows = subsample_labels(labels, part, seed=3)
    assert np.bincount(labels[rows]).tolist() == counts and len(set(rows)) == len(rows)
    assert np.array_equal(rows, subsample_labels(labels, part, seed=3))
    if part == 0.5:
        assert not np.array_equal(rows, subsample_labels(labels, part, seed=4))


@pytest.mark.parametrize("kind", [TrainConfig, KnnConfig])
def test_labels_option_is_a_share_or_an_integer(kind: Any) -> None:
    options = {"model": "run", "data": "photos"} if kind is KnnConfig else {"data": "photos"}
    assert kind.parse(options | {"labels": "10"}).labels == 10 and kind.parse(options).labels == 1
    for wrong in (0, -1, 2.5):
        with pytest.raises(UserError, match="labels"):
            kind.parse(options | {"labels": wrong})


def test_settings_are_chosen_on_the_drawn_labels() -> None:
    parts = {"train": numbered_features(60), "val": numbered_features(30, 60), "test": numbered_features(9, 90)}
    made = make_probe_splits(parts, 3, 0.2, seed=0, labels=5.0)
    assert [len(part) for part in (made.train, made.val, made.test)] == [12, 3, 9]
    drawn = {*made.train.features[:, 0].tolist(), *made.val.features[:, 0].tolist()}
    assert len(drawn) == 15 and 60 <= max(drawn) < 90  # val's labels are among them
    some = make_probe_splits({"train": numbered_features(60)}, 3, 0.2, seed=0, labels=0.25)
    every = make_probe_splits({"train": numbered_features(60)}, 3, 0.2, seed=0)
    assert torch.equal(some.test.features, every.test.features)  # the test images do not depend on --labels
    assert len(some.train) + len(some.val) == 12
    with pytest.raises(UserError, match="--labels"):
        make_probe_splits(parts, 3, 0.2, seed=0, labels=0.001)


@pytest.mark.parametrize("counts", [[1, 1], [2, 3], [7, 1, 40, 5], [100]])
def test_fifths_spread_every_class(counts: list[int]) -> None:
    labels = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)))
    fifths = assign_fifths(labels, seed=3)
    for group in (labels >= 0, *(labels == label for label in range(len(counts)))):
        sizes = fifths[group].bincount(minlength=5)
        assert len(sizes) == 5 and sizes.max() - sizes.min() <= 1
    assert (fifths == assign_fifths(labels, seed=3)).all()
    assert len(labels) < 20 or (fifths != assign_fifths(labels, seed=4)).any()
