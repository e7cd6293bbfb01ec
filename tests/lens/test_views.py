from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.errors import UserError
from frugalvit.lens import views

from .stand_ins import PatchFeatures


@given(
    size=st.tuples(st.integers(1, 8000), st.integers(1, 8000)),
    shape=st.sampled_from([(224, 224), (96, 192), (160, 64)]),
    keep=st.sampled_from([0.875, 1.0]),
)
def test_centre_box_lies_inside_with_the_models_proportions(size, shape, keep):
    box = views.centre_box(size, shape, keep)
    assert box.left >= -1e-6 and box.top >= -1e-6
    assert box.left + box.width <= size[1] + 1e-6 and box.top + box.height <= size[0] + 1e-6
    assert box.width / box.height == pytest.approx(shape[1] / shape[0])
    assert max(box.width / size[1], box.height / size[0]) == pytest.approx(keep)
    assert box.left == pytest.approx(size[1] - box.left - box.width, abs=1e-6)


def test_whole_shape_keeps_proportions_and_area():
    assert views.whole_shape((300, 300), (224, 224), (32, 32)) == (224, 224)
    height, width = views.whole_shape((200, 800), (224, 224), (32, 32))
    assert (height, width) == (96, 448)  # 112 is half way between 3 and 4 cells
    assert views.whole_shape((10, 8000), (224, 224), (32, 32))[0] == 32


def test_cut_equals_a_plain_crop_at_native_size():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = views.cut(pixels, views.Box(10, 5, 24, 16), (16, 24))
    assert torch.equal((image * 255).round().byte(), torch.from_numpy(pixels[5:21, 10:34]).permute(2, 0, 1))


def test_second_view_mirrors_and_greys():
    images = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    seen = views.SecondView()(images, torch.Generator().manual_seed(0))
    assert torch.allclose(seen[:, 0], seen[:, 1]) and torch.allclose(seen[:, 1], seen[:, 2])
    assert seen.min() >= 0 and seen.max() <= 1
    plain = views.SecondView(jitter=0, grey=0)(images, torch.Generator())
    assert torch.equal(plain, images.flip(3))
    jittered = views.SecondView(flip=False, jitter=1, grey=0)(images, torch.Generator().manual_seed(1))
    assert (jittered - images).abs().mean() > 0.01


def test_truth_is_the_mirror():
    assert views.SecondView().truth((2, 3)).tolist() == [2, 1, 0, 5, 4, 3]
    assert views.SecondView(flip=False).truth((2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


def test_channels_a_picture_cannot_fill():
    backbone = PatchFeatures()
    backbone.in_chans = 5
    with pytest.raises(UserError, match="5 channels"):
        views.model_input(backbone, torch.rand(1, 3, 32, 32))
    backbone.in_chans, backbone.mean, backbone.std = 1, (0.5,), (0.25,)
    assert views.model_input(backbone, torch.rand(2, 3, 32, 32)).shape == (2, 1, 32, 32)
