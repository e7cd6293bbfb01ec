"""Train with SAM or schedule-free AdamW, on a CPU. Do they earn a place beside AdamW and Muon (docs/FIRST_RUN.md)?

    python benchmarks/optimizers.py sam train DATA --steps 750 --device cpu
    python benchmarks/optimizers.py schedule_free train DATA --steps 1500 --device cpu --optimizer.min-lr 1

Everything else is `frugalvit train`. SAM computes each gradient twice, so it gets half the steps.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from frugalvit.cli.main import main
from frugalvit.engine import step as engine

RADIUS = 0.05  # of SAM, as published


class ScheduleFree(torch.optim.AdamW):
    """AdamW without a schedule: gradients at a point between the iterate z and its average x (Defazio et al., 2024)."""

    beta = 0.9

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, **options | {"betas": (0.0, 0.999)})
        self.weight_sum = 0.0
        self.points: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:  # p holds y; AdamW must move z
            point = self.points.setdefault(id(p), {"z": p.clone(), "average": p.clone()})
            p.copy_(point["z"])
        super().step()
        lr = max(group["lr"] for group in self.param_groups)
        self.weight_sum += lr**2
        for p in parameters:
            point = self.points[id(p)]
            point["z"].copy_(p)
            point["average"].lerp_(p, lr**2 / self.weight_sum)
            p.copy_(point["z"].lerp(point["average"], self.beta))


def use_sam() -> None:
    plain = engine.TrainStep._accumulate

    def twice(self: engine.TrainStep, step: int) -> None:
        plain(self, step)
        gradients = [p.grad for p in self.learning if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        moved = [(p, RADIUS * p.grad / (norm + 1e-12)) for p in self.learning if p.grad is not None]
        with torch.no_grad():
            for p, offset in moved:
                p.add_(offset)
        for p in self.learning:
            p.grad = None
        engine.seed_step(self.plan.seed, step, self.fabric.global_rank)
        plain(self, step)
        with torch.no_grad():
            for p, offset in moved:
                p.sub_(offset)

    engine.TrainStep._accumulate = twice  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv.pop(1) == "sam":
        use_sam()
    else:
        engine.AdamW = ScheduleFree  # type: ignore[misc]
    sys.exit(main())
