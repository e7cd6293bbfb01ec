"""``--auto-batch``: the trial step before a run, and how a batch is split."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning_fabric import Fabric

from frugalvit.backbones import create_backbone
from frugalvit.config.train import TrainConfig
from frugalvit.engine import auto_batch
from frugalvit.engine.loop import TrainPlan
from frugalvit.engine.schedules import Constant
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.pretraining.task import PretrainingTask
from helpers.toy_task import ToyBatch, ToyTask


class MixedTask(ToyTask):
    """Twelve images, mixed in pairs."""

    batches: Any = SimpleNamespace(mixing="some", with_batch_size=lambda batch: None)

    def batch_at(self, step: int) -> ToyBatch:
        return ToyBatch(torch.randn(12, 3), torch.arange(12))


def fabric_of(world: int) -> Any:
    return SimpleNamespace(
        world_size=world,
        device=torch.device("cpu"),
        autocast=Fabric(accelerator="cpu", devices=1).autocast,
        all_reduce=lambda value, reduce_op: value,
    )


@pytest.mark.parametrize(("world", "most", "parts"), [(2, 3, 6), (2, 4, 3), (1, 3, 4)])
def test_pairs_stay_together(world: int, most: int, parts: int) -> None:
    task = cast(Any, MixedTask())
    task.most = most
    assert auto_batch.parts_that_fit(task, 1, fabric_of(world)) == parts


@pytest.mark.parametrize("name", ["swin_nano", "cvt_13", "t2t_vit_14", "vil_tiny_w7"])
def test_trial_step_equals_a_real_step(name: str) -> None:
    """The trial changes nothing, running means included."""
    backbone = create_backbone(name, img_size=32)
    cast(Any, backbone.model).set_grad_checkpointing(True)
    stored: dict[bool, int] = {}

    def store(tensor: torch.Tensor) -> torch.Tensor:
        stored[backbone.training] = stored.get(backbone.training, 0) + tensor.nbytes
        return tensor

    for training in (True, False):
        backbone.train(training)
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            backbone(torch.randn(2, 3, 32, 32))
    assert stored[False] <= 1.05 * stored[True]


@pytest.mark.parametrize(("begin", "every", "step"), [(0, 10, 0), (1, 10, 10), (20, 10, 20), (21, 10, 30)])
def test_trial_step_has_all_losses(begin: int, every: int, step: int) -> None:
    task: Any = SimpleNamespace(regions_from=begin, health_every=every)
    assert PretrainingTask.peak_memory_step(task) == step


@pytest.mark.parametrize("resumed", [False, True])
def test_continued_run_has_a_trial_step(tmp_path: Path, resumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_batch, "parts_that_fit", lambda *_: 2)
    fabric: Any = SimpleNamespace(device=torch.device("cuda"), to_device=lambda _: None, world_size=1)
    config, run, task = (
        TrainConfig(resume=str(tmp_path) if resumed else None),
        RunFolder(tmp_path),
        cast(Any, MixedTask()),
    )
    run.save_checkpoint({"step": 4, "task": {}})
    plan = TrainPlan(steps=8, steps_per_epoch=1, lr=Constant(0.1), images_per_step=8)
    parts = auto_batch.fit_to_memory(config, plan, task, run, fabric).accumulate
    run.close()
    assert parts == (1 if resumed else 2)
