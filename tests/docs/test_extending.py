"""The code of docs/extending.md: timm loads its network, and its export passes the check of ``frugalvit export``."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch

from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.tools import EXPORTS, ExportConfig
from frugalvit.errors import UserError
from frugalvit.export.command import export

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def run_block(section: str, module: ModuleType) -> None:
    """Run the first code block after a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2]
    block = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    exec(block[1], vars(module))


@pytest.fixture(scope="module")
def backbone() -> Any:
    module = sys.modules["extending_example"] = ModuleType("extending_example")  # timm looks it up
    run_block("A backbone", module)
    return module.backbone.eval()


def test_timm_loads_the_weights_of_the_page(backbone: Any, tmp_path: Path) -> None:
    save_model_folder(backbone, tmp_path / "model")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(loaded(images), backbone.model(images))


def test_too_few_blocks_for_the_linear_probe(backbone: Any) -> None:
    with pytest.raises(UserError, match="--blocks"):
        backbone.last_blocks(torch.randn(1, 3, 64, 64), 4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_export_passes_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("extending_export")
    monkeypatch.setitem(sys.modules, "extending_export", module)
    module.torch = torch  # type: ignore[attr-defined]
    run_block("An export", module)
    monkeypatch.setitem(EXPORTS, "torchscript", "extending_export:TorchScript")
    config = ExportConfig(model="resnet10t", img_size=64, out=str(tmp_path / "out"))
    result = export(config.model_copy(update={"to": "torchscript"}))
    assert result.data["files"] == ["model.pt", "preprocessing.py"] and result.data["max_difference"] < 1e-4
