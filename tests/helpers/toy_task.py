"""A tiny task for tests of the training loop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.engine.loop import TrainPlan, fit
from frugalvit.engine.schedules import Constant
from frugalvit.engine.task import Task
from frugalvit.runs.run_folder import RunFolder


@dataclass
class ToyBatch:
    images: Tensor
    index: Tensor


class ToyTask(Task):
    """Fit a line through points; ``spoil`` names the fault of a step."""

    best_metric, eval_split = "top1", "val"

    def __init__(self, spoil: dict[int, str] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("center", torch.zeros(3))
        self.spoil = spoil or {}
        self.most = 10**9  # images that fit

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.named_parameters()), "weight_decay": 0.0}]

    def batch_at(self, step: int) -> ToyBatch:
        images = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        if self.spoil.get(step) == "input":
            images[0, 0] = torch.nan
        return ToyBatch(images, torch.arange(8))

    def forward(self, batch: ToyBatch, step: int) -> dict[str, Tensor]:
        if len(batch.images) > self.most or self.spoil.get(step) == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")
        self.center.lerp_(batch.images.mean(0), 0.1)
        outputs = self.linear(self.norm(batch.images))
        loss = (outputs - batch.images.sum(1, keepdim=True)).square().mean()
        if self.spoil.get(step) == "loss":
            loss = loss * torch.inf
        if self.spoil.get(step) == "gradient":
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return {"loss": loss}

    def evaluate(self, step: int) -> dict[str, float]:
        return {}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        return False

    def compile_with(self, graphs: bool) -> None: ...


def toy_plan(**more: Any) -> TrainPlan:
    return TrainPlan(
        **({"steps": 20, "steps_per_epoch": 5, "lr": Constant(0.1), "log_every": 2, "save_every": 2} | more)
    )


def run_toy(folder: Path, task: ToyTask, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    run = RunFolder(folder)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    try:
        return fit(task, toy_plan(images_per_step=8, **more), run, fabric)
    finally:
        run.close()
