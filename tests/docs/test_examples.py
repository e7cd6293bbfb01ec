"""The examples run."""

import importlib.util
import math
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from frugalvit.cli import parser
from frugalvit.config.train import TrainConfig

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


# The keys of both formats, from their reference pages.
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes", "setup", "run"}
SKYPILOT_RESOURCES = {"infra", "accelerators", "cpus", "memory", "use_spot", "disk_size", "image_id", "job_recovery"}
DSTACK = {"type", "name", "python", "image", "nodes", "env", "commands", "volumes", "resources", "spot_policy", "retry"}
DSTACK_RESOURCES = {"cpu", "memory", "gpu", "shm_size", "disk"}


@pytest.mark.parametrize(
    ("name", "keys", "resources"),
    [("spot_skypilot.yaml", SKYPILOT, SKYPILOT_RESOURCES), ("spot.dstack.yml", DSTACK, DSTACK_RESOURCES)],
)
def test_spot_files_follow_their_schema(name: str, keys: set[str], resources: set[str]) -> None:
    values = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    assert values.keys() <= keys and values["resources"].keys() <= resources
    script = values["run"] if "run" in values else values["commands"][-1]
    words = shlex.split(script.replace("$SHARDS", "s3://bucket/index.json"))
    words = ["8" if word.startswith("$") else word for word in words]
    assert words[:2] == ["frugalvit", "train"]
    config, _ = parser.parse(TrainConfig, words[2:], "frugalvit train", "")
    assert isinstance(config, TrainConfig) and config.devices == 8 and config.out == "/runs/spot"
    assert words[-2:] == ["--resume", "auto"]
    if values.get("type") == "task":
        assert values["spot_policy"] == "spot" and values["retry"].keys() == {"on_events", "duration"}
        assert set(values["retry"]["on_events"]) <= {"no-capacity", "interruption", "error"}
        assert any(config.out.startswith(volume["path"]) for volume in values["volumes"])
    else:
        assert values["resources"]["use_spot"] is True
        (mount,) = values["file_mounts"]
        assert config.out.startswith(mount)
        assert values["file_mounts"][mount]["mode"] in ("MOUNT", "MOUNT_CACHED", "COPY")
