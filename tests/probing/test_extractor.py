"""Extracted features: equal to the forward pass, cached by content, resumable."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from frugalvit.data import open_data
from frugalvit.data.augmentation.transforms import EvalTransform
from frugalvit.data.decode import decode
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model
from frugalvit.probing import extractor as extract
from frugalvit.probing.extractor import FeatureExtractor, model_hash
from helpers import suite_layouts


def extract_one_by_one(model: Model, names: list[str], kind: str) -> Tensor:
    """One image at a time through the model's own preprocessing."""
    rows = []
    with torch.no_grad():
        for name in names:
            image = model.transform.image(decode(name))
            if kind == "last_blocks":
                rows.append(model.backbone.last_blocks(image, 3))
            else:
                rows.append(getattr(model.backbone(image), kind))
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["pooled", "grid", "last_blocks"])
def test_equals_a_plain_forward_pass(model: Model, squares: Path, kind: extract.Kind, cache: Path) -> None:
    examples = open_data(str(squares), split="given").splits["test"]
    features = FeatureExtractor(model, kind=kind, blocks=3, batch=5)(examples)
    torch.testing.assert_close(features.features, extract_one_by_one(model, examples.names, kind), rtol=1e-3, atol=1e-4)
    assert features.labels is not None and examples.labels is not None
    assert features.labels.tolist() == examples.labels.tolist() and features.names == examples.names


def test_second_call_reads_the_cache(model: Model, squares: Path, cache: Path, monkeypatch) -> None:
    examples = open_data(str(squares), split="given").splits["train"]
    first = FeatureExtractor(model)(examples)
    monkeypatch.setattr(FeatureExtractor, "images", lambda *_: pytest.fail("computed again"))
    again = FeatureExtractor(copy.copy(model))(examples)  # the weights count, not the object
    assert again.from_cache and not first.from_cache
    assert torch.equal(first.features, again.features)


def test_cache_depends_on_weights_images_and_settings(model: Model, squares: Path, cache: Path) -> None:
    examples = open_data(str(squares), split="given").splits["train"]
    base = FeatureExtractor(model)(examples)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.backbone.parameters()).view(-1)[0] += 1.0
    assert model_hash(other) != model_hash(model)
    assert not FeatureExtractor(other)(examples).from_cache
    assert not FeatureExtractor(model, precision="bf16")(examples).from_cache
    assert not FeatureExtractor(model, kind="last_blocks", blocks=2)(examples).from_cache
    assert not FeatureExtractor(model, kind="last_blocks", blocks=1)(examples).from_cache
    assert not FeatureExtractor(model)(examples, view=0).from_cache
    assert not FeatureExtractor(model)(examples.subset([1, 0])).from_cache
    relabelled = examples.subset(range(len(examples)))
    assert relabelled.labels is not None
    relabelled.labels = 1 - relabelled.labels
    assert FeatureExtractor(model)(relabelled).from_cache, "features do not depend on labels"
    for changed in ({"crop_pct": 0.7}, {"interpolation": "bilinear"}):
        transform = EvalTransform(**model.transform.spec() | changed)
        assert not FeatureExtractor(dataclasses.replace(model, transform=transform))(examples).from_cache
    assert FeatureExtractor(model, batch=3, workers=1)(examples).from_cache  # batch and workers do not count
    assert torch.equal(FeatureExtractor(model)(examples).features, base.features)


def test_changed_images_are_computed_again(model: Model, tmp_path: Path, cache: Path) -> None:
    folder = suite_layouts.folders(tmp_path / "data", {"train": 2})
    first = FeatureExtractor(model)(open_data(str(folder), split="given").splits["train"])
    suite_layouts.write(folder / "train" / "class0" / "0.png", 2, 99)
    second = FeatureExtractor(model)(open_data(str(folder), split="given").splits["train"])
    assert not second.from_cache
    changed = (first.features != second.features).any(dim=1)
    assert changed.tolist() == [name.endswith("class0/0.png") for name in first.names]


def test_interrupted_calls_resume(model: Model, squares: Path, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(extract, "CHUNK", 5)
    examples = open_data(str(squares), split="given").splits["train"]
    expected = FeatureExtractor(model, cache=False)(examples).features
    real, calls = FeatureExtractor.images, []

    def stops(self, images):
        calls.append(len(images))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, images)

    monkeypatch.setattr(FeatureExtractor, "images", stops)
    with pytest.raises(KeyboardInterrupt):
        FeatureExtractor(model)(examples)
    calls.clear()
    calls.extend([0] * 10)
    features = FeatureExtractor(model)(examples)
    assert sum(calls) == len(examples) - 15
    torch.testing.assert_close(features.features, expected, rtol=1e-5, atol=1e-6)


def test_damaged_cache_files_are_computed_again(model: Model, squares: Path, cache: Path, capsys) -> None:
    examples = open_data(str(squares), split="given").splits["val"]
    first = FeatureExtractor(model)(examples)
    (path,) = cache.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:200])
    again = FeatureExtractor(model)(examples)
    assert not again.from_cache and torch.equal(again.features, first.features)
    assert path.name in capsys.readouterr().err
    assert FeatureExtractor(model)(examples).from_cache


def test_views_differ_by_number_and_seed(model: Model, squares: Path, cache: Path) -> None:
    examples = open_data(str(squares), split="given").splits["val"]
    extractor = FeatureExtractor(model)
    views = {(seed, view): extractor(examples, view=view, seed=seed) for seed in (0, 1) for view in (None, 0, 1)}
    assert len({features.features.numpy().tobytes() for features in views.values()}) == 5
    assert views[1, None].from_cache, "the centre crop is not random"
    assert not any(features.from_cache for (_, view), features in views.items() if view is not None)
    again = FeatureExtractor(model, cache=False)(examples, view=1, seed=1)
    assert torch.equal(again.features, views[1, 1].features)


def test_some_unreadable_images_are_skipped(model: Model, tmp_path: Path, cache, capsys) -> None:
    folder = suite_layouts.folders(tmp_path / "data", {"train": 8})
    (folder / "train" / "class1" / "3.png").write_bytes(b"not an image")
    examples = open_data(str(folder), split="given").splits["train"]
    features = FeatureExtractor(model)(examples)
    assert len(features) == 23 and features.bad[0][0].endswith("class1/3.png")
    assert features.labels is not None and torch.bincount(features.labels).tolist() == [8, 7, 8]
    assert "class1/3.png" in capsys.readouterr().err
    (folder / "train" / "class2" / "3.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match="2 of 24 images are unreadable"):
        FeatureExtractor(model)(open_data(str(folder), split="given").splits["train"])


def test_non_finite_features_are_not_cached(model: Model, squares: Path, cache: Path) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in broken.backbone.parameters():
            parameter.fill_(torch.nan)
    examples = open_data(str(squares), split="given").splits["val"]
    with pytest.raises(UserError, match="NaN"):
        FeatureExtractor(broken)(examples)
    assert not list(cache.rglob("*.npz"))
