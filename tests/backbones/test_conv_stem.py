"""``stem="conv"``: convolutions in place of patches."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

from frugalvit.backbones import create_backbone
from frugalvit.backbones.conv_stem import ConvStem
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.utils.files import read_json
from helpers.tiny_runs import run_tiny, write_images

NETWORKS: list[tuple[str, int, dict[str, Any]]] = [
    ("swin_nano", 32, {}),
    ("vit_tiny_patch16_224", 64, {"depth": 2}),
    ("vil_tiny_w7", 32, {"depths": [1, 1, 1, 1]}),
    ("convnext_atto", 32, {"depths": [1, 1, 1, 1]}),
]


@pytest.mark.parametrize(("patch", "dim", "widths"), [(4, 96, [48, 96]), (16, 192, [24, 48, 96, 192]), (1, 8, [8])])
def test_stem_is_the_published_sequence(patch: int, dim: int, widths: list[int]) -> None:
    stem = ConvStem(3, dim, patch).eval()
    images = torch.randn(2, 3, 32, 32)
    found = images
    for number, width in enumerate(widths):
        convolution, norm = stem[3 * number], stem[3 * number + 1]
        found = F.relu(norm(F.conv2d(found, convolution.weight, stride=2 if patch > 1 else 1, padding=1)))
        assert found.shape[1] == width
    expected = F.conv2d(found, stem[-1].weight, stem[-1].bias)
    torch.testing.assert_close(stem(images), expected)
    assert expected.shape == (2, dim, 32 // patch, 32 // patch)


def test_patch_of_another_size_keeps_the_number_of_tokens() -> None:
    assert ConvStem(1, 16, 14)(torch.randn(1, 1, 56, 56)).shape == (1, 16, 4, 4)


@pytest.mark.parametrize(("name", "side", "shape"), NETWORKS)
def test_network_with_a_conv_stem(name: str, side: int, shape: dict[str, Any], tmp_path: Path) -> None:
    """As many tokens as without, gradients everywhere, the same answers from its folder and from timm."""
    torch.manual_seed(0)
    plain = create_backbone(name, img_size=side, num_classes=3, **shape)
    network = create_backbone(name, img_size=side, num_classes=3, stem="conv", **shape)
    images = torch.randn(2, 3, side, side)
    features = network(images)
    assert features.grid.shape == plain(images).grid.shape
    network.classify(features.pooled).sum().backward()
    (stem,) = [module for module in network.modules() if isinstance(module, ConvStem)]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in stem.parameters())
    network.eval()
    save_model_folder(network, tmp_path / "model", classes=["a", "b", "c"], meta={})
    with torch.no_grad():
        expected = network.classify(network(images).pooled)
        loaded = load_model(str(tmp_path / "model")).backbone.cpu()
        torch.testing.assert_close(loaded.classify(loaded(images).pooled), expected)
        config: Any = read_json(tmp_path / "model" / "config.json", dict)
        built = timm.create_model(config["architecture"], **config["model_args"])
    assert any(isinstance(module, ConvStem) for module in built.modules())


@pytest.mark.parametrize("name", ["resnet18", "hybrid_nano", "cvt_13", "t2t_vit_14"])
def test_networks_without_patches_refuse(name: str) -> None:
    with pytest.raises(UserError, match="does not start with patches"):
        create_backbone(name, img_size=64, stem="conv")


def test_wrong_stems_are_refused() -> None:
    with pytest.raises(UserError, match="random weights"):
        create_backbone("vit_tiny_patch16_224", stem="conv", pretrained=True)
    with pytest.raises(UserError, match="patch or conv"):
        create_backbone("swin_nano", stem="other")


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_runs_with_a_conv_stem(verb: str, tmp_path: Path) -> None:
    """The option reaches the network; the next run takes it over with --init."""
    data = write_images(tmp_path / "images", train=6, val=3)
    run_tiny(verb, data=data, out=tmp_path / "run", steps=2, stem="conv")
    run_tiny("train", data=data, out=tmp_path / "next", steps=2, init=str(tmp_path / "run"))
    for folder in ("run", "next"):
        model = load_model(str(tmp_path / folder)).backbone
        assert any(isinstance(module, ConvStem) for module in model.modules()), folder
