"""The examples run."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["plain_pytorch", "timm_loop", "resnet", "region_matching", "own_objective"])
def test_example_runs(name: str) -> None:
    losses = load(name).main(steps=4)
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("name", "package"), [("lightning_module", "lightning"), ("huggingface_trainer", "transformers")]
)
def test_example_of_another_framework(name: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed; it is not a dependency")
    losses = load(name).main(steps=3)
    assert len(losses) >= 3 and all(math.isfinite(loss) for loss in losses)


def test_lightning_lines_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:

    class Module(nn.Module):
        def log_dict(self, values: dict[str, Tensor]) -> None:
            self.logged = values

    module: Any = ModuleType("lightning")
    module.LightningModule = Module
    monkeypatch.setitem(sys.modules, "lightning", module)
    model = load("lightning_module").Classifier(img_size=32)
    optimizer = model.configure_optimizers()
    loss = model.training_step((torch.randn(2, 3, 32, 32), torch.tensor([0, 1])), 0)
    loss.backward()
    assert 0 <= float(model.logged["localization_error"]) < 7
    head = set(model.localization.parameters())
    assert head <= {p for group in optimizer.param_groups for p in group["params"]}
    assert all(parameter.grad is not None for parameter in head)
