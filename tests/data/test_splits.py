"""Validation splits are deterministic, stratified, and independent of order and path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from frugalvit.data import duplicates as copies_module
from frugalvit.data import open_data
from frugalvit.data.dataset import ArrayExamples, DatasetSplits, FileExamples, ImageDataset, join
from frugalvit.data.duplicates import NEAR, find_copies, find_near_copies, group_copies
from frugalvit.data.save_data import save_data
from frugalvit.data.splits import add_missing_splits, check_trainable, hold_out
from frugalvit.errors import UserError


def make(labels: list[int] | None, count: int = 0, name: str = "a") -> ImageDataset:
    count = count or len(labels or [])
    images = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, 3)
    images[..., 0] = ord(name[0])  # no copies in other parts
    return ArrayExamples(images, None if labels is None else np.array(labels), name)


def source(classes: tuple[str, ...] | None = ("a", "b"), **splits: ImageDataset) -> DatasetSplits:
    return DatasetSplits("x", "x", "test", classes, splits)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_hold_out_is_stratified_and_independent_of_order(
    labels: list[int], fraction: float, seed: int, shuffler
) -> None:
    keys = [f"c{label}/{i}.jpg" for i, label in enumerate(labels)]
    held = hold_out(keys, np.array(labels), fraction, seed)
    for label in set(labels):
        total = labels.count(label)
        count = int(held[np.array(labels) == label].sum())
        assert count == (0 if total == 1 else min(max(round(fraction * total), 1), total - 1))
    order = list(range(len(labels)))
    shuffler.shuffle(order)
    again = hold_out([keys[i] for i in order], np.array([labels[i] for i in order]), fraction, seed)
    np.testing.assert_array_equal(again, held[order])


def test_seeds_differ_and_parts_do_not_overlap() -> None:
    examples = make([0, 1] * 50)
    picks = [tuple(np.flatnonzero(hold_out(examples.keys, examples.labels, 0.2, seed))) for seed in range(3)]
    assert len(set(picks)) == 3
    train, val = add_missing_splits(source(train=examples), val_fraction=0.2).splits.values()
    assert not set(train.names) & set(val.names) and len(train) == 80 and len(val) == 20


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=60),
    st.floats(0.05, 0.9),
    st.randoms(use_true_random=False),
)
def test_copies_stay_on_one_side(images: list[tuple[int, int]], fraction: float, shuffler) -> None:
    """Copies count as one image, whatever their labels and order; no class loses all its training images."""
    labels, copies = np.array(images).T
    keys = [f"{i}.jpg" for i in range(len(images))]
    held = hold_out(keys, labels, fraction, 0, copies)
    assert not set(copies[held]) & set(copies[~held])
    assert set(labels) == set(labels[~held])
    order = np.array(shuffler.sample(range(len(images)), len(images)))
    again = hold_out([keys[i] for i in order], labels[order], fraction, 0, copies[order])
    np.testing.assert_array_equal(again, held[order])
    if len(set(copies)) == len(copies):
        np.testing.assert_array_equal(held, hold_out(keys, labels, fraction, 0))
    elif len(set(labels)) == 1 and len(set(copies)) > 1:
        count = len(set(copies))
        assert len(set(copies[held])) == min(max(round(fraction * count), 1), count - 1)


@pytest.mark.parametrize("kind", ["files", "shards", "arrays"])
def test_made_splits_keep_copies_together(kind: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = np.concatenate([random.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)] * 2)
    labels = np.tile([0, 1], 12)
    data: DatasetSplits = source(train=ArrayExamples(pixels, labels, "a"))
    if kind == "files":
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            (tmp_path / str(label)).mkdir(exist_ok=True)
            Image.fromarray(image).save(tmp_path / str(label) / f"{number}.bmp")
        data = open_data(tmp_path, split="given")
    elif kind == "shards":
        save_data(tmp_path / "packed", (list(pixels), labels.tolist()))
        data = open_data(tmp_path / "packed", split="given")
    made = add_missing_splits(data, val_fraction=0.5)
    contents = {split: {part.read(i).tobytes() for i in range(len(part))} for split, part in made.splits.items()}
    assert len(made.splits["val"]) == 12 and len(contents["val"]) == 6 and not contents["val"] & contents["train"]
    assert "12 exact copies kept on the side of the original" in made.notes[-1]


def test_only_equal_files_are_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a": b"1" * 9000, "b": b"1" * 9000, "c": b"2" + b"1" * 8999, "d": b"1" * 8999 + b"2", "e": b"1" * 99}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    examples, opened = FileExamples([str(tmp_path / name) for name in (*contents, "missing")], None), []
    monkeypatch.setattr(examples, "raw", lambda i: opened.append(i) or FileExamples.raw(examples, i))
    assert find_copies(examples).tolist() == [0, 0, 2, 3, 4, 5] and sorted(opened) == [0, 1, 2]


def photo(number: int, side: int = 120) -> Image.Image:
    """Draw a scene of large shapes with some grain, as a photograph has."""
    random = np.random.default_rng(number)
    shapes = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((side + 40, side))
    return Image.fromarray((np.asarray(shapes) + random.normal(0, 6, (side, side + 40, 3))).clip(0, 255).astype("u1"))


def test_near_copies_stay_on_one_side(tmp_path: Path) -> None:
    """A photo encoded again, made smaller, or cut by a pixel goes to the side of the original."""
    for number in range(24):
        folder, image = tmp_path / f"class{number % 2}", photo(number)
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{number}.png")
        image.save(folder / f"{number}-again.jpg", quality=70)
        image.resize((100, 75)).save(folder / f"{number}-small.png")
        image.crop((1, 0, image.width, image.height - 1)).save(folder / f"{number}-cut.png")
    made = add_missing_splits(open_data(tmp_path, split="given"), val_fraction=0.5)
    sides = [{Path(name).stem.split("-")[0] for name in part.names} for part in made.splits.values()]
    assert not sides[0] & sides[1] and [len(side) for side in sides] == [12, 12]
    assert "72 near copies kept on the side of the original" in made.notes[-1]


def test_near_copies_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with loops over all pairs: chains are one group; empty and unreadable images match nothing."""
    monkeypatch.setattr(copies_module, "_CHUNK", 7)
    monkeypatch.setattr(copies_module, "_PAIRS", 3)
    random = np.random.default_rng(0)
    images = random.uniform(0, 255, (8, 3, 16, 16))[random.integers(0, 8, 40)]
    images += random.choice([1, 4, 5, 8], (40, 1, 1, 1)) * random.normal(0, 1, images.shape)
    images[[3, 9]], images[[4, 8]] = 200, np.nan
    groups = list(range(40))
    for i, a in enumerate(images):
        for j, b in enumerate(images):
            contrast = max(np.linalg.norm(x - x.mean((1, 2), keepdims=True)) for x in (a, b))
            if contrast > 1 and np.linalg.norm(a - b) <= NEAR * contrast:
                low, high = sorted((groups[i], groups[j]))
                groups = [low if group == high else group for group in groups]
    assert 12 < len(set(groups)) < 36
    assert find_near_copies(torch.from_numpy(images).float()).tolist() == groups


def test_similar_images_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without near copies a split is as before; a class whose images all look alike is split; large sets say so."""
    digits: Any = load_digits()
    examples = ArrayExamples((digits.images[:600] * 15).astype(np.uint8), digits.target[:600], "digits")
    assert group_copies(examples, examples.labels)[0].tolist() == list(range(600))
    val = add_missing_splits(source(train=examples)).splits["val"]
    held_out = np.flatnonzero(hold_out(examples.keys, examples.labels, 0.1, 0))
    assert val.names == [examples.names[i] for i in held_out]

    camera = np.stack([np.asarray(photo(0), dtype=np.int16) + i for i in range(9)]).clip(0, 255).astype(np.uint8)
    groups, note = group_copies(ArrayExamples(camera, None, "camera"), None)
    assert groups.tolist() == list(range(9)) and "9 images are most of their class and look alike" in note
    twice = np.concatenate([camera[:2], np.stack([np.asarray(photo(i)) for i in range(1, 8)])])
    assert group_copies(ArrayExamples(twice, None, "twice"), None)[0].tolist() == [0, 0, *range(2, 9)]
    for limit, value in (("MAX_IMAGES", 8), ("MAX_MEGAPIXELS", 0.1)):
        with monkeypatch.context() as patch:
            patch.setattr(copies_module, limit, value)
            groups, note = group_copies(ArrayExamples(twice, None, "twice"), None)
        assert groups.tolist() == list(range(9)) and "near copies are not searched above" in note


def test_new_images_move_few_old_ones() -> None:
    before = [f"{i}.jpg" for i in range(200)]
    after = before + [f"new{i}.jpg" for i in range(20)]
    one, two = (hold_out(keys, None, 0.1, 0) for keys in (before, after))
    assert (one != two[:200]).sum() <= 8


def test_split_modes() -> None:
    given_splits = {"train": make([0, 1] * 20), "val": make([0, 1] * 5, name="v"), "test": make([0, 1], name="t")}
    stored = source(**given_splits)
    assert {k: len(v) for k, v in add_missing_splits(stored).splits.items()} == {"train": 40, "val": 10, "test": 2}
    joined = add_missing_splits(stored, "train+val")
    assert {k: len(v) for k, v in joined.splits.items()} == {"train": 50, "test": 2}
    assert "joined with train" in joined.notes[0]
    untested = source(train=given_splits["train"], val=given_splits["val"])
    assert list(add_missing_splits(untested, "train+val").splits) == ["train", "val"], "something must be scored"
    no_val = source(train=make([0, 1] * 20), test=make([0, 1]))
    made = add_missing_splits(no_val, val_fraction=0.25)
    assert list(made.splits) == ["train", "val", "test"] and len(made.splits["val"]) == 10
    assert "val is made from train: 10 of 40 images, stratified by class, seed 0." in made.notes
    assert list(add_missing_splits(no_val, "given").splits) == ["train", "test"]
    assert list(add_missing_splits(source(None, train=make(None, 5))).splits) == ["train"]
    for mode, fraction in (("auto", 0.0), ("auto", 1.0), ("random", 0.1)):
        with pytest.raises(UserError):
            add_missing_splits(no_val, mode, fraction)


def test_join() -> None:
    first, second = make([0, 1, 0]), make([1, 1], name="b")
    both = join(first, second)
    assert both.names == first.names + second.names
    assert both.labels is not None and both.labels.tolist() == [0, 1, 0, 1, 1]
    part = both.subset([4, 0])
    np.testing.assert_array_equal(part.read(0), second.read(1))
    np.testing.assert_array_equal(part.read(1), first.read(0))
    assert part.fingerprint() != both.fingerprint() and part.raw(0) == second.raw(1)
    assert part.header(0).width == 1 and part.stored_size(0) == 3
    assert join(first, make(None, 2)).labels is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (source(test=make([0, 1])), "no training images"),
        (source(None, train=make(None, 4)), "no labels"),
        (source(("cat",), train=make([0, 0])), "only the class 'cat'"),
        (source(("cat", "dog", "eel"), train=make([0, 1, 1])), "'eel'"),
    ],
)
def test_untrainable_datasets_are_errors(broken: DatasetSplits, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(broken)
