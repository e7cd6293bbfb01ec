"""The network of docs/extending.md: timm loads its weights, and errors name what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.errors import UserError
from frugalvit.export.command import advise_on_difference

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def backbone() -> Any:
    module = sys.modules["extending_example"] = ModuleType("extending_example")  # timm looks up where a network is from
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    exec(block[1], vars(module))
    return module.backbone.eval()


def test_timm_loads_the_weights_of_the_page(backbone: Any, tmp_path: Path) -> None:
    save_model_folder(backbone, tmp_path / "model")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(loaded(images), backbone.model(images))


def test_too_few_blocks_raise_user_error(backbone: Any) -> None:
    with pytest.raises(UserError, match="--blocks"):
        backbone.last_blocks(torch.randn(1, 3, 64, 64), 4)


@pytest.mark.parametrize(("network", "to"), [("mine", "timm"), ("mine", "hf"), ("mine", "onnx"), ("timm", "timm")])
def test_advice_after_a_wrong_export(network: str, to: str) -> None:
    model = timm.create_model("resnet10t") if network == "timm" else type("Mine", (nn.Module,), {})()
    advice = advise_on_difference(SimpleNamespace(model=model, name="some_net"), to)  # type: ignore[arg-type]
    assert ("pretrained" in advice) == (network == "mine" and to != "onnx") != ("report" in advice)
