"""Released weights load without a rest, and our networks give the numbers of the released code."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.weights.load import load_weights
from helpers.released_checkpoints import SWIN, esvit, same, save

# Golden file -> network, options, kind of the checkpoint, image sizes.
ESVIT: dict[str, tuple[str, dict[str, Any], str, tuple[int, ...]]] = {
    "c_swin_w7": ("swin_tiny_w7", {**SWIN, "padding": "zeros"}, "swin", (224, 96, 100, 64, 32)),
    "d_cvt_norpe": (
        "cvt_tiny_w7",
        {
            "embed_dim": (16, 32, 64, 128),
            "depths": (2, 2, 2, 2),
            "num_heads": (1, 2, 4, 8),
            "padding": "zeros",
            "relative_bias": False,
        },
        "esvit",
        (224, 96, 32),
    ),
    "d_vil": (
        "vil_tiny_w7",
        {"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 8), "bias_resize": "matrix"},
        "esvit",
        (224, 96),
    ),
}
DRLOC: dict[str, tuple[str, dict[str, Any]]] = {
    "f_drloc_cvt": ("cvt_13", {"embed_dim": (16, 24, 32), "depths": (1, 1, 2), "num_heads": (1, 1, 1)}),
    "f_drloc_t2t": ("t2t_vit_14", {"embed_dim": 48, "depth": 2, "num_heads": 4, "token_dim": 16}),
}
CLOSE: dict[str, float] = {"rtol": 0, "atol": 1e-4}


def released_weights(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name[2:]: torch.from_numpy(array).float() for name, array in arrays.items() if name.startswith("w.")}


def last_four_blocks(backbone: Backbone, images: Tensor) -> Tensor:
    if backbone.family != "vil":
        return backbone.last_blocks(images, 4)
    # The released probe takes ViL's global token in stage 3 and the mean of the normed tokens in stage 4.
    states: list[Any] = []
    backbone.model.run_blocks(images, states.append)
    stage3 = [tokens[:, 0] for tokens, _, _ in states[-4:-2]]
    return torch.cat(stage3 + [backbone.model.norm(tokens).mean(1) for tokens, _, _ in states[-2:]], 1)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, case in ESVIT.items() for size in case[3]])
def test_equals_released_esvit(golden, name: str, size: int) -> None:
    architecture, keywords, kind, _ = ESVIT[name]
    arrays = golden(name)
    backbone = create_backbone(architecture, **keywords).eval()
    report = load_weights(backbone, released_weights(arrays), strict=True)
    assert (report.kind, report.missing, report.unexpected) == (kind, [], [])
    images = torch.from_numpy(arrays[f"img{size}"]).float()
    with torch.no_grad():
        features = backbone(images)
        torch.testing.assert_close(features.pooled, torch.from_numpy(arrays[f"img{size}.view"]), **CLOSE)
        torch.testing.assert_close(features.grid.flatten(2).mT, torch.from_numpy(arrays[f"img{size}.region"]), **CLOSE)
        last = last_four_blocks(backbone, images)
        torch.testing.assert_close(last, torch.from_numpy(arrays[f"img{size}.last4"]), **CLOSE)
        if name == "c_swin_w7":
            last = sum(len(blocks) for _, blocks in backbone.model.stage_parts()) - 1
            tokens = backbone.model.run_blocks(images, stop_before=last)
            weights, _ = backbone.model.layers[-1].blocks[-1].window_attention(tokens)
            expected = torch.from_numpy(arrays[f"img{size}.last_attn"])  # stored in half precision
            torch.testing.assert_close(weights.half(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", DRLOC)
def test_equals_released_drloc(golden, name: str) -> None:
    architecture, keywords = DRLOC[name]
    arrays = golden(name)
    backbone = create_backbone(architecture, num_classes=10, **keywords).eval()
    checkpoint = {"model": released_weights(arrays), "max_accuracy": 80.0, "epoch": 100}
    report = load_weights(backbone, checkpoint, strict=True)
    assert (report.kind, report.missing, len(report.unexpected)) == ("vts-drloc", [], 6)
    images = np.random.RandomState(zlib.crc32(b"dl.img")).standard_normal((2, 3, 224, 224)).astype(np.float16)
    with torch.no_grad():
        features = backbone(torch.from_numpy(images).float())
    pooled_grid = F.avg_pool2d(features.grid, 3, 2, 1, count_include_pad=False)
    torch.testing.assert_close(backbone.classify(features.pooled), torch.from_numpy(arrays["logits"]), **CLOSE)
    torch.testing.assert_close(pooled_grid, torch.from_numpy(arrays["grid"]), **CLOSE)


@pytest.mark.parametrize("name", ESVIT)
def test_training_checkpoint_loads_the_same_weights(golden, name: str, tmp_path: Path) -> None:
    architecture, keywords, _, _ = ESVIT[name]
    bare, wrapped = create_backbone(architecture, **keywords), create_backbone(architecture, **keywords)
    weights = released_weights(golden(name))
    load_weights(bare, weights)
    assert load_weights(wrapped, save(esvit(weights, "module."), tmp_path), strict=True).kind == "esvit"
    assert same(wrapped.model, bare.model)


@pytest.mark.parametrize(
    ("name", "size", "changed", "note"),
    [
        ("d_cvt_norpe", 96, {"relative_bias": True}, "8 relative bias tables missing in the file set to zero"),
        ("d_vil", 224, {"bias_resize": "table"}, None),  # both resizes are equal at 224 pixels
    ],
)
def test_our_default_form_equals_the_released_one(
    golden, name: str, size: int, changed: dict, note: str | None
) -> None:
    architecture, keywords, _, _ = ESVIT[name]
    arrays = golden(name)
    backbone = create_backbone(architecture, **keywords | changed).eval()
    report = load_weights(backbone, released_weights(arrays))
    assert report.missing == [] and (note is None or note in report.notes)
    with torch.no_grad():
        pooled = backbone(torch.from_numpy(arrays[f"img{size}"]).float()).pooled
    torch.testing.assert_close(pooled, torch.from_numpy(arrays[f"img{size}.view"]), **CLOSE)
