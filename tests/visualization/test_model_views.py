"""Crops, second views and batches, as the model sees them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.errors import UserError
from frugalvit.visualization import model_views
from helpers.fake_backbones import PatchFeatures


@given(
    size=st.tuples(st.integers(1, 8000), st.integers(1, 8000)),
    shape=st.sampled_from([(224, 224), (96, 192), (160, 64)]),
    keep=st.sampled_from([0.875, 1.0]),
)
def test_centre_box_is_inside_with_the_models_ratio(size, shape, keep):
    box = model_views.centre_box(size, shape, keep)
    assert box.left >= -1e-6 and box.top >= -1e-6
    assert box.left + box.width <= size[1] + 1e-6 and box.top + box.height <= size[0] + 1e-6
    assert box.width / box.height == pytest.approx(shape[1] / shape[0])
    assert max(box.width / size[1], box.height / size[0]) == pytest.approx(keep)
    assert box.left == pytest.approx(size[1] - box.left - box.width, abs=1e-6)


def test_crop_to_at_native_size():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = model_views.crop_to(pixels, model_views.Box(10, 5, 24, 16), (16, 24))
    assert torch.equal((image * 255).round().byte(), torch.from_numpy(pixels[5:21, 10:34]).permute(2, 0, 1))


def test_second_view_mirrors_and_greys():
    images = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    view = model_views.SecondView()(images, torch.Generator().manual_seed(0))
    assert torch.allclose(view[:, 0], view[:, 1]) and torch.allclose(view[:, 1], view[:, 2])
    assert view.min() >= 0 and view.max() <= 1
    plain = model_views.SecondView(jitter=0, grey=0)(images, torch.Generator())
    assert torch.equal(plain, images.flip(3))
    jittered = model_views.SecondView(jitter=1, grey=0)(images.flip(3), torch.Generator().manual_seed(1))
    assert (jittered - images).abs().mean() > 0.01


def test_second_views_have_the_papers_jitter(monkeypatch):
    """Four of five, with its ranges and in every order; grey is independent."""
    calls = []

    def recorded(name):
        return lambda image, *strength, **_: calls[-1].append((name, *strength)) or image

    for name in ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue", "rgb_to_grayscale"):
        monkeypatch.setattr(model_views.functional, name, recorded(name))
    generator, view = torch.Generator().manual_seed(0), model_views.SecondView(grey=0.5)
    for _ in range(600):
        calls.append([])
        view(torch.rand(1, 3, 4, 4), generator)
    orders, greys = zip(*([[c[0] for c in one if len(c) > 1], len(one) % 4] for one in calls), strict=True)
    jittered = [len(order) == 4 for order in orders]
    assert sum(jittered) / 600 == pytest.approx(0.8, abs=0.04)
    assert len({tuple(order) for order in orders if order}) == 24
    for expected in (True, False):
        shares = [grey for grey, moved in zip(greys, jittered, strict=True) if moved is expected]
        assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.12)
    ranges = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.8, 1.2), "hue": (-0.1, 0.1)}
    for name, (low, high) in ranges.items():
        drawn = [call[1] for one in calls for call in one if call[0] == f"adjust_{name}"]
        assert (min(drawn), max(drawn)) == pytest.approx((low, high), abs=0.01)


def test_models_need_three_channels_or_one():
    backbone = PatchFeatures()
    backbone.in_chans, backbone.mean, backbone.std = 5, (0.5,) * 5, (0.25,) * 5
    with pytest.raises(UserError, match="5 channels"):
        model_views.model_input(backbone, torch.rand(1, 3, 32, 32))
    backbone.in_chans, backbone.mean, backbone.std = 1, (0.5,), (0.25,)
    assert model_views.model_input(backbone, torch.rand(2, 3, 32, 32)).shape == (2, 1, 32, 32)


class FewExamples:
    names = ("0.png", "1.png", "2.png", "3.png", "4.png")

    def __init__(self, indices=range(5)):
        self.indices = list(indices)

    def __len__(self):
        return len(self.indices)

    def subset(self, indices):
        return FewExamples([self.indices[index] for index in indices])

    def read(self, index, at_least=None):
        if self.indices[index] == 2:
            raise UnreadableImage("2.png", "torn")
        return np.full((40, 60, 3), self.indices[index], dtype=np.uint8)


def test_examples_are_evenly_spaced_and_readable(capsys):
    assert model_views.spread_evenly(FewExamples(), 3).indices == [0, 2, 4]
    assert model_views.spread_evenly(FewExamples(), 9).indices == [0, 1, 2, 3, 4]
    batches = list(model_views.input_batches(FewExamples(), PatchFeatures((32, 32)), 3, "label"))
    assert [tuple(batch.shape) for batch in batches] == [(3, 3, 32, 32), (1, 3, 32, 32)]
    assert (torch.cat(batches)[:, 0, 0, 0] * 255).round().tolist() == [0, 1, 3, 4]
    assert "2.png" in capsys.readouterr().err


def test_model_view_is_a_crop():
    image, box = model_views.model_view(PatchFeatures((32, 32)), np.zeros((40, 60, 3), dtype=np.uint8))
    assert image.shape == (3, 32, 32) and (box.width, box.height) == (40, 40)
