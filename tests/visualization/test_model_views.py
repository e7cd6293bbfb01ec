from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.data.decode import UnreadableImage
from frugalvit.errors import UserError
from frugalvit.visualization import model_views
from frugalvit.visualization.grid import Regions
from helpers.fake_backbones import PaddedPositions, PatchFeatures


@given(
    size=st.tuples(st.integers(1, 8000), st.integers(1, 8000)),
    shape=st.sampled_from([(224, 224), (96, 192), (160, 64)]),
    keep=st.sampled_from([0.875, 1.0]),
)
def test_centre_box_lies_inside_with_the_models_proportions(size, shape, keep):
    box = model_views.centre_box(size, shape, keep)
    assert box.left >= -1e-6 and box.top >= -1e-6
    assert box.left + box.width <= size[1] + 1e-6 and box.top + box.height <= size[0] + 1e-6
    assert box.width / box.height == pytest.approx(shape[1] / shape[0])
    assert max(box.width / size[1], box.height / size[0]) == pytest.approx(keep)
    assert box.left == pytest.approx(size[1] - box.left - box.width, abs=1e-6)


def test_whole_shape_keeps_proportions_and_area():
    assert model_views.uncropped_shape((300, 300), (224, 224), (32, 32)) == (224, 224)
    height, width = model_views.uncropped_shape((200, 800), (224, 224), (32, 32))
    assert (height, width) == (96, 448)  # 112 is half way between 3 and 4 cells
    assert model_views.uncropped_shape((10, 8000), (224, 224), (32, 32))[0] == 32


def test_cut_equals_a_plain_crop_at_native_size():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = model_views.cut(pixels, model_views.Box(10, 5, 24, 16), (16, 24))
    assert torch.equal((image * 255).round().byte(), torch.from_numpy(pixels[5:21, 10:34]).permute(2, 0, 1))


def test_second_view_mirrors_and_greys():
    images = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    seen = model_views.SecondView()(images, torch.Generator().manual_seed(0))
    assert torch.allclose(seen[:, 0], seen[:, 1]) and torch.allclose(seen[:, 1], seen[:, 2])
    assert seen.min() >= 0 and seen.max() <= 1
    plain = model_views.SecondView(jitter=0, grey=0)(images, torch.Generator())
    assert torch.equal(plain, images.flip(3))
    jittered = model_views.SecondView(flip=False, jitter=1, grey=0)(images, torch.Generator().manual_seed(1))
    assert (jittered - images).abs().mean() > 0.01


def test_second_views_are_jittered_as_in_the_paper(monkeypatch):
    """Four of five, by its ranges and in every order; grey is drawn for itself."""
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
    for wanted in (True, False):
        shares = [grey for grey, moved in zip(greys, jittered, strict=True) if moved is wanted]
        assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.12)
    ranges = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.8, 1.2), "hue": (-0.1, 0.1)}
    for name, (low, high) in ranges.items():
        drawn = [call[1] for one in calls for call in one if call[0] == f"adjust_{name}"]
        assert (min(drawn), max(drawn)) == pytest.approx((low, high), abs=0.01)


def test_the_right_match_is_the_mirror():
    regions = Regions((2, 3), (16, 24), (8, 8))
    down, across = model_views.SecondView().steps_off(regions)
    assert down.tolist() == [[0, 1], [1, 0]]
    assert across.tolist() == [[2, 1, 0], [1, 0, 1], [0, 1, 2]]
    assert model_views.SecondView(flip=False).steps_off(regions)[1].tolist() == [[0, 1, 2], [1, 0, 1], [2, 1, 0]]


def test_channels_a_picture_cannot_fill():
    backbone = PatchFeatures()
    backbone.in_chans = 5
    with pytest.raises(UserError, match="5 channels"):
        model_views.model_input(backbone, torch.rand(1, 3, 32, 32))
    backbone.in_chans, backbone.mean, backbone.std = 1, (0.5,), (0.25,)
    assert model_views.model_input(backbone, torch.rand(2, 3, 32, 32)).shape == (2, 1, 32, 32)


class FewExamples:
    names = ("0.png", "1.png", "2.png", "3.png", "4.png")

    def __init__(self, places=range(5)):
        self.places = list(places)

    def __len__(self):
        return len(self.places)

    def subset(self, places):
        return FewExamples([self.places[place] for place in places])

    def read(self, index, at_least=None):
        if self.places[index] == 2:
            raise UnreadableImage("2.png", "torn")
        return np.full((40, 60, 3), self.places[index], dtype=np.uint8)


def test_examples_are_spread_evenly_and_the_bad_left_out(capsys):
    assert model_views.spread_evenly(FewExamples(), 3).places == [0, 2, 4]
    assert model_views.spread_evenly(FewExamples(), 9).places == [0, 1, 2, 3, 4]
    batches = list(model_views.input_batches(FewExamples(), PatchFeatures((32, 32)), 3, "looking"))
    assert [tuple(batch.shape) for batch in batches] == [(3, 3, 32, 32), (1, 3, 32, 32)]
    assert (torch.cat(batches)[:, 0, 0, 0] * 255).round().tolist() == [0, 1, 3, 4]
    assert "left out: 2.png" in capsys.readouterr().err


def test_what_is_shown_covers_the_crop_or_the_whole():
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    image, box = model_views.shown(PatchFeatures((32, 32)), pixels, "crop", 0.875)
    assert image.shape == (3, 32, 32) and (box.width, box.height) == (35, 35)
    image, box = model_views.shown(PatchFeatures((32, 32)), pixels, "whole", 0.875)
    assert image.shape[2] > image.shape[1] and box == model_views.Box(0, 0, 60, 40)


def test_the_whole_of_a_picture_is_shown_in_whole_regions():
    """Also to a model whose own input ends with a part of one: 50 pixels are 4 regions of 16, and no four of 12."""
    image, _ = model_views.shown(PaddedPositions((50, 50), 16), np.zeros((40, 60, 3), dtype=np.uint8), "whole", 1.0)
    assert tuple(image.shape[1:]) == (48, 64)
