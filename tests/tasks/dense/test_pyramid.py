"""Pyramids of any backbone: shapes, strides and gradients."""

import pytest
import torch

from frugalvit import create_backbone
from frugalvit.tasks.dense.pyramid import FeaturePyramid, Pyramid

TINY_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
CASES = {
    "swin_nano": ({"embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4]}, 64),
    "vit_tiny_patch16_224": (TINY_VIT, 64),
    "resnet10t": ({}, 64),
}


@pytest.mark.parametrize("name", CASES)
def test_maps_have_the_stated_channels_and_strides(name: str) -> None:
    keywords, size = CASES[name]
    pyramid = Pyramid(create_backbone(name, img_size=size, **keywords))
    images = torch.rand(2, 3, 96, 128)
    maps = pyramid(images)
    for grid, channels, stride in zip(maps, pyramid.channels, pyramid.strides, strict=True):
        assert tuple(grid.shape) == (2, channels, round(96 / stride), round(128 / stride))
    assert pyramid.strides == sorted(pyramid.strides)
    assert len(maps) >= 3
    levels = FeaturePyramid(pyramid, 16)
    for (_, grid), stride in zip(levels(images).items(), levels.strides, strict=True):
        assert grid.shape[1] == 16 and grid.shape[2] == -(-96 // stride)


@pytest.mark.parametrize("name", CASES)
def test_every_trainable_parameter_gets_a_gradient(name: str) -> None:
    keywords, size = CASES[name]
    pyramid = Pyramid(create_backbone(name, img_size=size, num_classes=5, **keywords))
    assert all(parameter.grad is None for parameter in pyramid.parameters())
    sum(grid.square().sum() for grid in pyramid(torch.rand(2, 3, 64, 64))).backward()  # type: ignore[union-attr]
    waiting = [name for name, p in pyramid.named_parameters() if p.requires_grad and p.grad is None]
    assert waiting == []
    assert not all(parameter.requires_grad for parameter in pyramid.parameters()), "the classifier is frozen"


@pytest.mark.parametrize(
    ("name", "keywords", "size", "strides"),
    [
        ("vit_tiny_patch16_224", TINY_VIT, 96, [3, 6, 12, 24]),  # patches of 12 pixels
        ("vit_tiny_patch16_224", TINY_VIT | {"patch_size": 14}, 126, [3.5, 7, 14, 28]),
        ("vit_tiny_r_s16_p8_224", {"depth": 1}, 224, [8, 16, 32, 64]),  # patches of 8 cells of 4 pixels
        ("t2t_vit_14", {"depth": 1, "patch_size": 3}, 96, [3, 6, 12, 24]),
        ("swin_nano", CASES["swin_nano"][0] | {"patch_size": 3}, 96, [3, 6, 12]),
        ("swin_nano", CASES["swin_nano"][0] | {"patch_size": 4}, 128, [4, 8, 16]),
        ("inception_v3", {}, 224, [4, 8, 16, 32]),  # convolutions that lose their borders
        ("resnet10t", {}, 64, [2, 4, 8, 16]),  # a finer stem than usual
    ],
)
def test_strides_of_patches_that_do_not_divide_the_image(
    name: str, keywords: dict, size: int, strides: list[float]
) -> None:
    backbone = create_backbone(name, img_size=size, **keywords)
    assert Pyramid(backbone).strides == strides
