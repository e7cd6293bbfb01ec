"""Small images: what "auto" decides, pinned at several sizes."""

import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.errors import UserError

SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("name", "keywords", "pixels", "chosen", "grid"),
    [
        ("swin_tiny_w7", SWIN, 28, {"patch_size": 1}, 4),
        ("swin_tiny_w7", SWIN, 32, {"patch_size": 1, "window_size": 8}, 4),
        ("swin_tiny_w7", SWIN, 64, {"patch_size": 2, "window_size": 8}, 4),
        ("swin_tiny_w7", SWIN, 96, {"patch_size": 2, "window_size": 6}, 6),
        ("swin_tiny_w7", SWIN, 128, {"window_size": 8}, 4),
        ("swin_tiny_w7", SWIN, 224, {}, 7),
        ("swin_tiny_w14", SWIN, 32, {"patch_size": 1, "window_size": 16}, 4),
        ("swin_nano", {}, 28, {"patch_size": 2}, 4),
        ("swin_nano", {}, 32, {"patch_size": 2, "window_size": 8}, 4),
        ("swin_nano", {}, 64, {"patch_size": 4, "window_size": 8}, 4),
        ("swin_nano", {}, 224, {}, 7),
        ("swin_mini", {}, 32, {"patch_size": 2}, 4),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 28, {"patch_size": 4}, 7),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 32, {"patch_size": 4}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 96, {"patch_size": 12}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 128, {}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 94, {"patch_size": 13}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 97, {"patch_size": 13}, 8),
        ("vit_base", {"depth": 1, "embed_dim": 24, "num_heads": 2}, 100, {"patch_size": 10}, 10),
        ("test_resnet", {}, 32, {"stem_stride": 1}, 4),
        ("test_resnet", {}, 64, {"stem_stride": 2}, 4),
        ("test_resnet", {}, 128, {}, 4),
        ("test_convnext", {}, 32, {"stem_stride": 1}, 4),
        ("test_convnext", {}, 64, {"stem_stride": 2}, 4),
        ("test_convnext", {}, 96, {"stem_stride": 2}, 6),
        ("test_efficientnet", {}, 32, {"stem_stride": 1, "output_stride": 16}, 4),
    ],
)
def test_chosen(name: str, keywords: dict, pixels: int, chosen: dict, grid: int) -> None:
    backbone = create_backbone(name, img_size=pixels, **keywords)
    found = {key: value for key, value in backbone.keywords.items() if key not in keywords}
    assert found == chosen
    assert backbone.grid_size(pixels) == (grid, grid)
    assert bool(backbone.notes) == bool(chosen)
    for key, value in chosen.items():
        assert f"{key}={value}" in backbone.notes[0]


@pytest.mark.parametrize("name", ["cvt_13", "cvt_tiny_w7", "vil_tiny_w7", "t2t_vit_14"])
@pytest.mark.parametrize("pixels", [28])
def test_own_networks_end_in_a_grid(name: str, pixels: int) -> None:
    from frugalvit.backbones.factory import build_timm
    from frugalvit.backbones.small_images import adapt, final_grid

    def build(extra: dict, *, device: str = "meta") -> torch.nn.Module:
        with torch.device(device):
            return build_timm(name, name, {"num_classes": 0, **extra}, (pixels, pixels))

    chosen, _ = adapt(name, (pixels, pixels), {}, build)
    assert min(final_grid(build(chosen), (pixels, pixels))) >= 4


def test_explicit_keywords_win() -> None:
    backbone = create_backbone("swin_tiny_w7", img_size=32, patch_size=4, window_size=4, **SWIN)
    assert backbone.keywords["patch_size"] == 4 and backbone.keywords["window_size"] == 4
    assert backbone.grid_size(32) == (1, 1) and backbone.notes == []
    only_patch = create_backbone("swin_tiny_w7", img_size=64, patch_size=2, **SWIN)
    assert only_patch.keywords["window_size"] == 8
    assert create_backbone("test_resnet", img_size=32, stem_stride=4).grid_size(32) == (1, 1)


def test_not_square() -> None:
    backbone = create_backbone("swin_nano", img_size=(32, 64))
    assert backbone.grid_size((32, 64)) == (4, 8)


def test_sizes_with_few_divisors_are_padded_instead_of_cut_to_pixels() -> None:
    backbone = create_backbone("vit_base", img_size=(33, 70), depth=1, embed_dim=24, num_heads=2)
    assert backbone.grid_size((33, 70)) == (9, 18)
    assert "patch_size=4 (the published shape would end in 3x5 tokens, this one ends in 9x18)" in backbone.notes[0]


def test_a_slower_stem_keeps_the_weights() -> None:
    small = create_backbone("test_resnet", img_size=32)
    stock = create_backbone("test_resnet", img_size=224)
    assert not any(small.load_state_dict(stock.state_dict()))  # nothing missing, nothing unexpected


def test_impossible_stems_are_named() -> None:
    with pytest.raises(UserError, match="stem_stride=3"):
        create_backbone("test_resnet", img_size=64, stem_stride=3)


def test_what_cannot_be_finer_is_said() -> None:
    backbone = create_backbone("levit_128s", img_size=64)
    assert "stays at 1x1" in backbone.notes[0]
