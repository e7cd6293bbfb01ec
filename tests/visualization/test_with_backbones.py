"""Visualizations of real, small networks: the attention is that of the last block."""

from typing import Any

import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.errors import UserError
from frugalvit.visualization.explorer_data import Picture, gather
from frugalvit.visualization.model_views import model_input
from helpers.fake_backbones import attend, coordinate_images


@pytest.mark.parametrize(("block", "grid", "edges", "reach"), [(1, 8, [3], 16), (2, 8, [1, 5], 16), (3, 4, [], 16)])
def test_windows_shifts_and_merging_of_a_swin(block: int, grid: int, edges: list[int], reach: int) -> None:
    """Windows of 4 regions, shifted by 2 in the second block; then merging halves the grid, which is one window."""
    sizes: dict[str, Any] = {"embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4, "patch_size": 4}
    view = attend(create_backbone("swin_nano", img_size=32, **sizes), torch.rand(3, 32, 32), (2, 2), block=block)
    across, down = view.borders
    expected = torch.zeros(grid, grid - 1, dtype=torch.bool)
    expected[:, edges] = True
    assert torch.equal(across, expected) and torch.equal(down, expected.T) and view.reach == reach


@pytest.mark.parametrize("name", ["swin_nano", "vit_tiny_patch16_224", "t2t_vit_14"])
def test_the_last_block_by_number(name: str) -> None:
    backbone = create_backbone(name, img_size=64).eval()
    count, images = len(backbone.block_dims()), torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        attention, grid = backbone.block_attention(images, count)
        assert torch.equal(attention, backbone.attention(images)) and grid == backbone.grid_size(64)
        first, finer = backbone.block_attention(images, 1)
        assert finer[0] >= grid[0] and torch.allclose(first.sum(-1), torch.ones(()), atol=1e-5)
        assert first.shape[-1] - finer[0] * finer[1] == (0 if "swin" in name else 1)
    for block in (0, count + 1):
        with pytest.raises(UserError, match=f"--block {block}: .* 1 to {count}"):
            backbone.block_attention(images, block)


def small_swin(depth, img_size=(64, 96)):
    sizes = {"embed_dim": 24, "depths": (1, depth), "num_heads": (2, 4), "window_size": 4, "patch_size": 4}
    return create_backbone("swin_tiny_w7", img_size=img_size, **sizes).eval()


def small_vit(img_size=(64, 96)):
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 16}
    return create_backbone("vit_tiny_patch16_224", img_size=img_size, **sizes).eval()


def randomize(backbone):
    """Set large random weights: small ones would make all attention uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return backbone


def record_module(module, backbone, images):
    """Return the input and the output of a module."""
    calls = []
    handle = module.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    with torch.no_grad():
        backbone(images)
    handle.remove()
    return calls[0]


def weigh(attention, values, heads):
    """Weigh values (T, C) by attention (heads, queries, T): (queries, C)."""
    split = values.view(len(values), heads, -1).permute(1, 0, 2)
    return (attention @ split).permute(1, 0, 2).flatten(1)


@pytest.mark.parametrize(
    ("name", "small"),
    [("mobilenetv3_small_050", {}), ("deit_tiny_distilled_patch16_224", {"embed_dim": 24, "depth": 1, "num_heads": 2})],
)
def test_explorer_of_networks_with_another_pooled_width(name, small):
    backbone = create_backbone(name, img_size=(64, 64), num_classes=3, **small).eval()
    assert backbone.pooled_dim != backbone.dim
    picture = Picture.of("one", (255 * coordinate_images(1, 64, 64)[0]).byte().permute(1, 2, 0).numpy())
    data = gather([(name, backbone)], [picture], second_views=True)
    assert len(data["models"][0]["global"]) == 2


@pytest.mark.parametrize("depth", [1, 2], ids=["not shifted", "shifted"])
@pytest.mark.parametrize("size", [(64, 96), (56, 56)], ids=["wide", "padded"])
def test_swin_attention_reproduces_the_block(depth, size):
    backbone = randomize(small_swin(depth, size))
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(1))
    images = model_input(backbone, image[None])
    block = backbone.model.layers[-1].blocks[-1]
    assert (block.shift != (0, 0)) == (depth == 2)
    tokens, output = record_module(block, backbone, images)
    height, width = tokens.shape[1:3]
    maps = [[attend(backbone, image, (row, column)).maps for column in range(width)] for row in range(height)]
    attention = torch.stack([torch.stack(line) for line in maps]).flatten(0, 1).flatten(2).transpose(0, 1)
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:2]))
    with torch.no_grad():
        values = block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)[2].flatten(0, 2)
        gathered = block.attn.proj(weigh(attention, values, 4)).view(tokens.shape)
        middle = tokens + gathered
        expected = middle + block.mlp(block.norm2(middle))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_vit_attention_reproduces_the_block():
    backbone = randomize(small_vit())
    image = torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(1))
    layer = backbone.model.blocks[-1].attn
    tokens, output = record_module(layer, backbone, model_input(backbone, image[None]))
    for line, query in ((0, None), (1, (0, 0)), (1 + 2 * 6 + 5, (2, 5))):
        view = attend(backbone, image, query)
        weights = torch.cat([view.elsewhere[:, None], view.maps.flatten(1)], dim=1)
        with torch.no_grad():
            values = layer.qkv(tokens[0]).chunk(3, dim=-1)[2]
            gathered = layer.proj(weigh(weights[:, None], values, 2))[0]
        torch.testing.assert_close(output[0, line], gathered, rtol=1e-4, atol=1e-4)


SMALL_STAGES = {"embed_dim": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "patch_size": 4}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cvt_13", SMALL_STAGES),
        ("cvt_tiny_w7", SMALL_STAGES),
        ("vil_tiny_w7", SMALL_STAGES | {"sparse_stages": 1}),
        ("t2t_vit_14", {"embed_dim": 24, "depth": 1, "num_heads": 2}),
    ],
)
def test_attention_of_every_architecture(name, sizes):
    backbone = create_backbone(name, img_size=64, **sizes).eval()
    grid = backbone.grid_size((64, 64))
    view = attend(backbone, torch.rand(3, 64, 64), (grid[0] - 1, 0))
    assert view.maps.shape[1:] == grid
    assert (view.maps.sum(dim=(1, 2)) + view.elsewhere).tolist() == pytest.approx([1] * len(view.maps), abs=1e-4)
    assert view.masks.any(dim=2).any(dim=1).all()


def test_networks_without_attention_can_be_explored():
    backbone = create_backbone("resnet10t", img_size=64).eval()
    image = torch.rand(3, 64, 64)
    with pytest.raises(UserError):
        attend(backbone, image, (0, 0))
    pixels = (image.permute(1, 2, 0) * 255).byte().numpy()
    model = gather([("resnet", backbone)], [Picture("a", pixels), Picture("b", pixels[:, ::-1].copy())])["models"][0]
    assert model["heads"] == [] and model["notes"]
