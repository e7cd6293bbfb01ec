"""Weights of another image size, window, patch size or number of channels are resampled."""

import warnings

import numpy as np
import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.backbones.timm_features import quiet_tables
from frugalvit.backbones.weights.fit import inner_bias_table, resample_bias_table, resample_position_embedding
from frugalvit.backbones.weights.load import load_weights
from helpers.released_checkpoints import microsoft, swin, vit


def cubic(distance: float, a: float = -0.75) -> float:
    x = abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def slow_bicubic(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Textbook bicubic interpolation, one value at a time, with repeated edges."""
    old_height, old_width = picture.shape
    out = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            y, x = (row + 0.5) * old_height / height - 0.5, (column + 0.5) * old_width / width - 0.5
            for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
                for j in range(int(np.floor(x)) - 1, int(np.floor(x)) + 3):
                    value = picture[min(max(i, 0), old_height - 1), min(max(j, 0), old_width - 1)]
                    out[row, column] += value * cubic(y - i) * cubic(x - j)
    return out


@pytest.mark.parametrize(("old", "new"), [((3, 3), (7, 7)), ((13, 13), (5, 5)), ((5, 5), (3, 9)), ((3, 5), (5, 3))])
def test_bias_tables_are_resampled_per_head(old: tuple[int, int], new: tuple[int, int]):
    table = torch.randn(old[0] * old[1], 3, dtype=torch.float64)
    resized = resample_bias_table(table, new, old)
    for head in range(3):
        expected = slow_bicubic(table[:, head].reshape(old).numpy(), *new)
        np.testing.assert_allclose(resized[:, head].reshape(new).numpy(), expected, atol=1e-5)


def test_window_7_tables_are_resampled_to_window_14():
    torch.manual_seed(1)
    source, target = swin(), swin(window=14)
    report = load_weights(target, {"model": microsoft(source.state_dict())})
    assert report.missing == []
    # stage 4 is 7 x 7 at 224 pixels: its window, and so its table, stays
    assert "6 relative bias tables resampled 7 -> 14" in report.notes
    name = "layers.0.blocks.0.attn.relative_position_bias_table"
    table, mine = source.state_dict()[name], target.state_dict()[name]
    torch.testing.assert_close(mine, resample_bias_table(table, (27, 27)))


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_position_embeddings_keep_their_prefix(tokens: int):
    embedding = torch.randn(1, tokens + 49, 6)
    resized = resample_position_embedding(embedding, (5, 9), 1)
    assert resized is not None and resized.shape == (1, 46, 6)
    expected = embedding[:, 0] if tokens else torch.zeros(1, 6)
    torch.testing.assert_close(resized[:, 0], expected)
    assert resample_position_embedding(torch.randn(1, 44, 6), (5, 9), 1) is None


def test_vit_at_another_image_size():
    torch.manual_seed(1)
    source, target = vit(img_size=64), vit(img_size=96)
    report = load_weights(target, source.state_dict())
    assert report.missing == []
    assert "1 position embedding resampled to 6 x 6 tokens" in report.notes
    torch.testing.assert_close(target.pos_embed[:, 0], source.pos_embed[:, 0])
    resized = torch.nn.functional.interpolate(
        source.pos_embed[:, 1:].reshape(1, 4, 4, 48).permute(0, 3, 1, 2), (6, 6), mode="bicubic", antialias=True
    )
    torch.testing.assert_close(target.pos_embed[:, 1:], resized.flatten(2).transpose(1, 2))


def test_other_channels_and_patches():
    torch.manual_seed(1)
    source = swin()
    grey = swin(in_chans=1)
    load_weights(grey, source.state_dict())
    torch.testing.assert_close(grey.patch_embed.proj.weight[:, 0], source.patch_embed.proj.weight.sum(1))
    fine = swin(patch_size=2, img_size=112)
    report = load_weights(fine, source.state_dict())
    assert report.missing == []
    assert any("first convolution fitted from 24x3x4x4 to 24x3x2x2" in note for note in report.notes)


def test_inner_bias_table():
    table = torch.arange(13 * 13.0)[:, None]
    inner = inner_bias_table(table, (5, 3), (13, 13))
    assert torch.equal(inner[:, 0], table.reshape(13, 13)[4:9, 5:8].flatten())


def test_timm_warnings_about_tables_are_suppressed() -> None:
    before, after = create_backbone("swin_nano", 48, num_classes=5), create_backbone("swin_nano", 32, num_classes=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_weights(after, before.model.state_dict())  # a classifier is left over, so timm's filter runs
        with quiet_tables():
            warnings.warn("Using a non-tuple sequence elsewhere", UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["Using a non-tuple sequence elsewhere"]
