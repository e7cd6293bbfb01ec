"""The class tokens of a ViT's last blocks: what EsViT's linear probe sees of it."""

from __future__ import annotations

import pytest
import torch

from frugalvit import create_backbone


@pytest.mark.parametrize(
    ("name", "class_tokens"),
    [("vit_tiny_patch16_224", True), ("swin_nano", False), ("cait_xxs24_224", False), ("t2t_vit_14", False)],
)
def test_where_a_network_classifies_by_its_class_token(name: str, class_tokens: bool) -> None:
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        means, found = backbone.last_blocks(images, 3), backbone.last_blocks(images, 3, class_token=True)
        assert found.shape == means.shape
        if not class_tokens:
            assert torch.equal(found, means)
            return
        model = backbone.model
        tokens, expected = model._pos_embed(model.patch_embed(images)), []
        for block in model.blocks:
            tokens = block(tokens)
            expected.append(model.norm(tokens)[:, 0])
        torch.testing.assert_close(found, torch.cat(expected[-3:], 1))
        torch.testing.assert_close(found[:, -backbone.dim :], backbone(images).pooled)
