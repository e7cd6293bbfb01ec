"""create_backbone for the families of timm and our networks: shapes, gradients, sizes, errors, timm's loader."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.layers import DropPath
from torch._dynamo.testing import CompileCounter

from frugalvit.backbones import create_backbone
from frugalvit.backbones.factory import from_spec
from frugalvit.backbones.registry import MODEL_NAMES
from frugalvit.errors import UserError
from frugalvit.tasks.pretraining.task import make_teacher

VIT: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 2}
SWIN: dict[str, Any] = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}

# One of every family, as small as its keywords allow: name, keywords, T of the attention at 64x64 (0: it has none).
FAMILIES: list[tuple[str, dict[str, Any], int]] = [
    ("vit_tiny_patch16_224", VIT, 65),
    ("deit_tiny_patch16_224", VIT, 65),
    ("deit_tiny_distilled_patch16_224", VIT, 66),
    ("vit_little_patch16_reg4_gap_256", VIT, 68),
    ("vit_small_patch14_reg4_dinov2", VIT, 69),
    ("vit_base_patch16_siglip_224", VIT, 64),
    ("eva02_tiny_patch14_224", VIT, 65),
    ("beit_base_patch16_224", VIT, 65),
    ("cait_xxs24_224", VIT, 0),
    ("xcit_nano_12_p16_224", VIT, 0),
    ("swin_tiny_patch4_window7_224", SWIN, 16),
    ("swinv2_tiny_window8_256", SWIN, 16),
    ("convnext_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}, 0),
    ("convnextv2_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}, 0),
    ("resnet18", {}, 0),
    ("resnetv2_50", {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 64)}, 0),
    ("regnetx_002", {}, 0),
    ("regnety_002", {}, 0),
    ("test_efficientnet", {}, 0),
    ("mobilenetv3_small_050", {}, 0),
    ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, 16),
    ("maxvit_pico_rw_256", {"depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 32), "stem_width": 8}, 0),
    ("twins_svt_small", {"embed_dims": (32, 32, 64, 64), "depths": (2, 2, 2, 2), "num_heads": (1, 1, 2, 2)}, 16),
    ("hiera_tiny_224", {"stages": (1, 1, 1, 1), "embed_dim": 24}, 0),
    ("davit_tiny", {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 64, 96), "num_heads": (1, 1, 2, 2)}, 0),
    ("test_mambaout", {}, 0),
    ("ese_vovnet19b_slim_dw", {}, 0),
    ("levit_128s", {}, 0),
]


LARGE = [
    pytest.param(name, {}, 16 if name == "nextvit_small" else 0, marks=pytest.mark.slow)
    for name in (
        *("focalnet_tiny_srf", "nextvit_small", "mixer_s32_224", "mvitv2_tiny", "densenet121", "poolformer_s12"),
        *("edgenext_xx_small", "mobilevitv2_050", "gmlp_ti16_224"),
    )
]


@pytest.mark.parametrize(
    ("name", "keywords", "tokens"),
    [*FAMILIES, *LARGE],
    ids=[name for name, _, _ in FAMILIES] + [case.values[0] for case in LARGE],
)
def test_every_family(name: str, keywords: dict[str, Any], tokens: int) -> None:
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64, num_classes=3, **keywords).eval()
    images = torch.randn(2, 3, 64, 64)
    features = backbone(images)
    assert features.grid.shape == (2, backbone.dim, *backbone.grid_size(64))
    assert features.pooled.shape == (2, backbone.pooled_dim)
    torch.testing.assert_close(backbone.classify(features.pooled), backbone.model(images), atol=1e-5, rtol=1e-4)

    (features.grid.square().mean() + features.pooled.square().mean()).backward()
    first = next(parameter for parameter in backbone.model.parameters() if parameter.dim() > 1)
    assert first.grad is not None and first.grad.abs().sum() > 0

    with torch.no_grad():
        wide = backbone(torch.randn(1, 3, 40, 64))
        assert wide.grid.shape == (1, backbone.dim, *backbone.grid_size((40, 64)))
        rows, columns = wide.grid.shape[2:]
        assert columns == features.grid.shape[3] and rows <= columns
        stages = backbone.stages(images)
        assert 1 <= len(stages) <= 4
        assert all(fine.shape[2] >= coarse.shape[2] for fine, coarse in pairwise(stages))
        if tokens:
            weights = backbone.attention(images)
            assert weights.shape[0] == 2 and weights.shape[2:] == (tokens, tokens)
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
        else:
            with pytest.raises(UserError):
                backbone.attention(images)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto", "regnetx_002"])
def test_blocks_end_in_the_final_grid(name: str) -> None:
    keywords = dict(next(entry[1] for entry in FAMILIES if entry[0] == name))
    backbone = create_backbone(name, img_size=64, **keywords).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        blocks, stages = backbone.blocks(images), backbone.stages(images)
        torch.testing.assert_close(blocks[-1], stages[-1])
        torch.testing.assert_close(backbone._final_norm(blocks[-1]), backbone(images).grid)
        expected = torch.cat([backbone._final_norm(grid).mean((2, 3)) for grid in blocks[-2:]], 1)
        if blocks[-2].shape[1] == blocks[-1].shape[1]:
            torch.testing.assert_close(backbone.last_blocks(images, 2), expected)
    with pytest.raises(UserError, match="n=1000"):
        backbone.last_blocks(images, 1000)


def test_attention_is_the_softmax_of_the_last_block() -> None:
    backbone = create_backbone("vit_tiny_patch16_224", img_size=64, **VIT).eval()
    images = torch.randn(2, 3, 64, 64)
    normed: list[torch.Tensor] = []
    block = backbone.model.blocks[-1]
    hook = block.norm1.register_forward_hook(lambda _module, _input, output: normed.append(output))
    with torch.no_grad():
        weights = backbone.attention(images)
        query, key, _ = block.attn.qkv(normed[-1]).view(2, 65, 3, 2, 12).permute(2, 0, 3, 1, 4)
    hook.remove()
    torch.testing.assert_close(weights, (query @ key.mT * 12**-0.5).softmax(-1))
    assert block.attn.fused_attn  # the fused kernel is on again


def test_grid_before_the_final_norm() -> None:
    images = torch.randn(1, 3, 64, 64)
    for name, keywords in (("swin_tiny_w7", SWIN), ("vit_tiny_patch16_224", VIT)):
        torch.manual_seed(0)
        normed = create_backbone(name, img_size=64, **keywords).eval()
        raw = create_backbone(name, img_size=64, grid_norm=False, **keywords).eval()
        raw.load_state_dict(normed.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(normed._final_norm(raw(images).grid), normed(images).grid)
            torch.testing.assert_close(raw(images).pooled, normed(images).pooled)
        assert raw.spec()["keywords"]["grid_norm"] is False


SMALL: dict[str, dict[str, Any]] = {
    **{name: SWIN for name in MODEL_NAMES if name.startswith("swin_") and name != "swin_nano"},
    "deit_small": VIT,
    "vit_base": VIT,
}


@pytest.mark.parametrize(
    "name", ["swin_nano", "swin_mini", "swin_tiny_w7", "swin_base_w14", "deit_small", "resnet50", "cvt_13"]
)
def test_names_of_the_papers(name: str) -> None:
    backbone = create_backbone(name, img_size=64, num_classes=2, in_chans=1, **SMALL.get(name, {})).eval()
    with torch.no_grad():
        for size in ((64, 64), (40, 72)):
            features = backbone(torch.randn(2, 1, *size))
            assert features.grid.shape == (2, backbone.dim, *backbone.grid_size(size))
        images = torch.randn(2, 1, 64, 64)
        torch.testing.assert_close(backbone.classify(backbone(images).pooled), backbone.model(images))
    assert len(backbone.mean) == len(backbone.std) == 1
    again = from_spec(json.loads(json.dumps(backbone.spec())))
    again.load_state_dict(backbone.state_dict())
    assert json.loads(json.dumps(backbone.spec())) == again.spec()
    other = from_spec(backbone.spec(), num_classes=0, drop_path=0.0)
    assert other.num_classes == 0 and other.keywords == backbone.keywords | {"drop_path": 0.0}


def test_last_four_blocks_of_swin_tiny_have_2304_channels() -> None:
    with torch.no_grad():
        assert create_backbone("swin_tiny_w7", img_size=64).last_blocks(torch.zeros(1, 3, 64, 64)).shape == (1, 2304)


def test_default_mean_and_std_are_those_of_imagenet() -> None:
    assert create_backbone("test_vit", img_size=64).mean == (0.485, 0.456, 0.406)
    assert create_backbone("test_vit", img_size=64, in_chans=5).std == (0.25,) * 5
    own = create_backbone("test_vit", img_size=64, mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    assert own.mean == (0.1, 0.2, 0.3) and own.spec()["keywords"]["mean"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "swin_tiny_w8"}, "'swin_tiny_w7'"),
        ({"name": "no/such"}, "no/such"),
        ({"name": None}, "not NoneType"),
        ({"name": "coat_tiny", "img_size": 64}, "no single grid"),
        ({"name": "pit_ti_224", "img_size": 64}, "pit_ti_224"),
        ({"name": "volo_d1_224", "img_size": 64, "num_classes": 3}, "volo_d1_224"),
        ({"name": "swin_nano", "embed_dm": 24}, "'embed_dm'"),
        ({"name": "poolformer_s12", "depths": (1, 1, 1, 1)}, "'depths'"),
        ({"name": "test_vit", "img_size": 0}, "img_size=0"),
        ({"name": "test_vit", "img_size": (64, 64, 64)}, "not a size"),
        ({"name": "test_vit", "img_size": True}, "img_size=True"),
        ({"name": "test_vit", "mean": (0.5,), "img_size": 64}, "mean has 1 numbers"),
        ({"name": "swin_nano", "pretrained": True}, "no weights of 'swin_nano'"),
        ({"name": "swin_nano", "num_classes": -1}, "num_classes=-1"),
        ({"name": "swin_nano", "in_chans": 0}, "in_chans=0"),
        ({"name": "swin_nano", "drop_path": float("nan")}, "drop_path=nan"),
        ({"name": "swin_nano", "drop_path_rate": 2.0}, "drop_path=2.0"),
        ({"name": "vgg11", "drop_path_rate": 0.1}, "no stochastic depth"),
        ({"name": "hrnet_w18_small", "drop_path": 0.1}, "no stochastic depth"),
    ],
)
def test_wrong_arguments_raise_user_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_backbone(**arguments)


@pytest.mark.parametrize("name", ["swin_nano", "test_vit"])
def test_drop_path_rate_equals_drop_path(name: str) -> None:
    """A teacher made from such a network has no stochastic depth, so two passes give the same grid."""
    backbone = create_backbone(name, img_size=32, drop_path_rate=0.5)
    assert backbone.keywords["drop_path"] == 0.5 and "drop_path_rate" not in backbone.keywords
    assert max(part.drop_prob for part in backbone.modules() if isinstance(part, DropPath)) == pytest.approx(0.5)
    assert backbone.spec() == create_backbone(name, img_size=np.int64(32), drop_path=0.5).spec()
    teacher = make_teacher(backbone).train()
    images = torch.randn(8, 3, 32, 32)
    assert torch.equal(teacher(images).grid, teacher(images).grid)
    assert not torch.equal(backbone.train()(images).grid, backbone(images).grid)


def test_wrong_images_raise_user_error() -> None:
    backbone = create_backbone("swin_nano", img_size=32)
    with pytest.raises(UserError, match="in_chans"):
        backbone(torch.zeros(1, 1, 32, 32))
    with pytest.raises(UserError, match="num_classes"):
        backbone.classify(torch.zeros(1, 128))
    with pytest.raises(UserError, match=r"float32 \(0, 3"):
        backbone(torch.zeros(0, 3, 32, 32))
    with pytest.raises(UserError, match=r"torch\.uint8"):
        backbone(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(UserError, match="not Image"):
        backbone(Image.new("RGB", (32, 32)))
    fixed = create_backbone("cait_xxs24_224", img_size=64, **VIT)
    with pytest.raises(UserError, match="does not accept 64x96"):
        fixed(torch.zeros(1, 3, 64, 96))


def test_compiled_network_pads_like_the_original() -> None:
    """Sizes are tried while a timm network is compiled: each once, in one graph."""
    backbone = create_backbone("vit_tiny_patch16_224", img_size=64, depth=1).eval()
    counter = CompileCounter()
    compiled = torch.compile(backbone, backend=counter, fullgraph=True)
    for size in ((64, 64), (50, 70), (72, 72), (50, 70)):
        images = torch.randn(1, 3, *size)
        torch.testing.assert_close(compiled(images).grid, backbone(images).grid)
    assert counter.frame_count == 3


@pytest.mark.parametrize(
    ("name", "has_token"),
    [("vit_tiny_patch16_224", True), ("swin_nano", False), ("cait_xxs24_224", False), ("t2t_vit_14", True)],
)
def test_class_tokens_of_the_last_blocks(name: str, has_token: bool) -> None:
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        means, features = backbone.last_blocks(images, 3), backbone.last_blocks(images, 3, class_token=True)
        assert features.shape == means.shape
        if not has_token:
            assert torch.equal(features, means)
            return
        model = backbone.model
        tokens, expected = model.embed(images) if "t2t" in name else model._pos_embed(model.patch_embed(images)), []
        for block in model.blocks:
            tokens = block(tokens)
            expected.append(model.norm(tokens[0] if "t2t" in name else tokens)[:, 0])
        torch.testing.assert_close(features, torch.cat(expected[-3:], 1))
        torch.testing.assert_close(features[:, -backbone.dim :], backbone(images).pooled)
