"""Names of networks: the papers', timm's, and what ``frugalvit list models`` shows."""

import pytest
import timm
import torch

from frugalvit.backbones import list_models
from frugalvit.backbones.registry import MODEL_NAMES
from frugalvit.backbones.small_images import final_grid


def test_list_models() -> None:
    ours = {info.name: info for info in list_models("swin_t*_w*")}
    assert ours["swin_tiny_w7"].params == pytest.approx(27.52e6, rel=1e-3)
    assert ours["swin_tiny_w7"].grid == (7, 7) and ours["swin_tiny_w7"].source == "frugalvit"
    assert {info.name: info.source for info in list_models("test_vit")}["test_vit"] == "timm"
    assert list_models("no such model") == []


@pytest.mark.slow
def test_all_names_are_listed() -> None:
    infos = list_models()
    assert [info.name for info in infos] == list(MODEL_NAMES)
    assert all(info.params > 3e5 for info in infos)
    for info in infos:
        with torch.device("meta"):
            model = timm.create_model(MODEL_NAMES[info.name], num_classes=0)
        assert info.grid == final_grid(model, info.img_size)
