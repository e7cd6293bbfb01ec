"""``--auto-batch`` with several processes: what is blended in pairs is split in pairs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning_fabric import Fabric
from toys import ToyBatch, ToyTask

from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.training import autobatch
from frugalvit.training.loop import Plan
from frugalvit.training.runs import Run
from frugalvit.training.schedules import Constant


class Mixed(ToyTask):
    """Twelve images, blended in pairs."""

    batches: Any = SimpleNamespace(mixing="some")

    def batch_at(self, step: int) -> ToyBatch:
        return ToyBatch(torch.randn(12, 3), torch.arange(12))


@pytest.mark.parametrize(("world", "most", "parts"), [(2, 3, 6), (2, 4, 3), (1, 3, 4)])
def test_pairs_stay_together(world: int, most: int, parts: int) -> None:
    task = cast(Any, Mixed())
    task.most = most
    fabric: Any = SimpleNamespace(
        world_size=world,
        device=torch.device("cpu"),
        autocast=Fabric(accelerator="cpu", devices=1).autocast,
        all_reduce=lambda value, reduce_op: value,
    )
    assert autobatch.parts_that_fit(task, 1, fabric) == parts


def test_a_split_that_is_not_accepted_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("no such batch")

    monkeypatch.setattr(autobatch, "parts_that_fit", lambda *_: 2)
    monkeypatch.setattr(autobatch, "with_batch", refuse)
    fabric: Any = SimpleNamespace(device=torch.device("cuda"), to_device=lambda _: None, world_size=1)
    config, run, task = TrainConfig(), Run(tmp_path), cast(Any, Mixed())
    plan = Plan(steps=1, steps_per_epoch=1, lr=Constant(0.1), images_per_step=8)
    with pytest.raises(UserError, match="no such batch"):
        autobatch.fit_to_memory(config, plan, task, run, fabric)
    run.close()
    assert config.accumulate == 1 and not (tmp_path / "config.yaml").exists()
