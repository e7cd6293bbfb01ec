"""The patch size, window size and stem stride chosen for small images."""

import pytest

from frugalvit.backbones import create_backbone
from frugalvit.errors import UserError

SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("name", "keywords", "pixels", "chosen", "grid"),
    [
        ("swin_tiny_w7", SWIN, 28, {"patch_size": 1}, 4),
        ("swin_tiny_w7", SWIN, 32, {"patch_size": 1, "window_size": 8}, 4),
        ("swin_tiny_w7", SWIN, 64, {"patch_size": 2, "window_size": 8}, 4),
        ("swin_tiny_w7", SWIN, 224, {}, 7),
        ("swin_tiny_w14", SWIN, 32, {"patch_size": 1, "window_size": 16}, 4),
        ("swin_nano", {}, 28, {"patch_size": 2}, 4),
        ("swin_nano", {}, 32, {"patch_size": 2, "window_size": 8}, 4),
        ("swin_mini", {}, 32, {"patch_size": 2}, 4),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 28, {"patch_size": 4}, 7),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 32, {"patch_size": 4}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 96, {"patch_size": 12}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 128, {}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 97, {"patch_size": 13}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 100, {"patch_size": 10}, 10),
        ("test_resnet", {}, 32, {"stem_stride": 1}, 4),
        ("test_convnext", {}, 32, {"stem_stride": 1}, 4),
        ("test_convnext", {}, 64, {"stem_stride": 2}, 4),
        ("test_efficientnet", {}, 32, {"stem_stride": 1, "output_stride": 16}, 4),
    ],
)
def test_shape_for_small_images(name: str, keywords: dict, pixels: int, chosen: dict, grid: int) -> None:
    backbone = create_backbone(name, img_size=pixels, **keywords)
    assert {key: value for key, value in backbone.keywords.items() if key not in keywords} == chosen
    assert backbone.grid_size(pixels) == (grid, grid)
    assert bool(backbone.notes) == bool(chosen)
    for key, value in chosen.items():
        assert f"{key}={value}" in backbone.notes[0]


@pytest.mark.parametrize("name", ["cvt_13", "cvt_tiny_w7", "vil_tiny_w7", "t2t_vit_14"])
def test_our_networks_end_in_a_grid(name: str) -> None:
    assert min(create_backbone(name, img_size=28).grid_size(28)) >= 4


def test_explicit_keywords_win() -> None:
    backbone = create_backbone("swin_tiny_w7", img_size=32, patch_size=4, window_size=4, **SWIN)
    assert backbone.keywords["patch_size"] == 4 and backbone.keywords["window_size"] == 4
    assert backbone.grid_size(32) == (1, 1) and backbone.notes == []
    only_patch = create_backbone("swin_tiny_w7", img_size=64, patch_size=2, **SWIN)
    assert only_patch.keywords["window_size"] == 8
    assert create_backbone("test_resnet", img_size=32, stem_stride=4).grid_size(32) == (1, 1)


def test_sizes_with_few_divisors_are_padded() -> None:
    backbone = create_backbone("vit_base", img_size=(33, 70), depth=1, embed_dim=24, num_heads=2)
    assert backbone.grid_size((33, 70)) == (9, 18)
    assert "patch_size=4 (the published shape would end in 3x5 tokens, this one ends in 9x18)" in backbone.notes[0]


def test_smaller_stem_stride_keeps_the_weights() -> None:
    small, published = create_backbone("test_resnet", img_size=32), create_backbone("test_resnet", img_size=224)
    assert not any(small.load_state_dict(published.state_dict()))  # nothing missing, nothing unexpected
    with pytest.raises(UserError, match="stem_stride=3"):
        create_backbone("test_resnet", img_size=64, stem_stride=3)


def test_note_about_a_grid_that_stays_small() -> None:
    assert "stays at 2x2" in create_backbone("efficientformerv2_s0", img_size=64).notes[0]
