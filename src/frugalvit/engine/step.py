"""One training step: fetch, forward, backward, clip, step.

Everything random in a step is a function of (seed, step). Nothing here waits for the device, which sums the losses and
skips steps with non-finite gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import AdamW

from frugalvit.config.resolved import ResolvedRunConfig
from frugalvit.engine.cuda_graphs import GraphedStep
from frugalvit.engine.grad_guard import (
    MOVED,
    STATISTICS,
    BufferSnapshot,
    clip_per_tensor,
    step_if_finite,
    unwrapped,
)
from frugalvit.engine.schedules import Constant, Schedule
from frugalvit.engine.task import Task


@dataclass
class TrainPlan:
    """Length, learning rate and intervals of a run, all in steps."""

    steps: int
    steps_per_epoch: int
    lr: Schedule
    weight_decay: Schedule | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 0.0
    clip_per: str = "global"
    accumulate: int = 1
    images_per_step: int = 1
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0
    save_minutes: float = 10.0
    max_nonfinite_steps: int = 5  # in a row
    rank_timeout: float = 300.0  # seconds

    @classmethod
    def from_config(
        cls, config: ResolvedRunConfig, images: int, world: int, *, group: int = 1, lines: int = 10
    ) -> TrainPlan:
        """Make a plan with constant rates and without evaluation; a command changes that with ``replace``.

        images: training images; world: number of ranks
        group:  images that must stay on one rank (2 for mixup pairs)
        lines:  lines of metrics that even a short run writes
        """
        batch = in_equal_parts(config.batch, images, equal_parts(world, config.accumulate, group))
        steps, optimizer = total_steps(config.steps, config.length(), images, batch), config.optimizer
        return cls(
            steps=steps,
            steps_per_epoch=steps_per_epoch(images, batch),
            lr=Constant(config.lr),
            weight_decay=Constant(optimizer.weight_decay),
            betas=optimizer.betas,
            clip=optimizer.clip,
            clip_per=optimizer.clip_per,
            accumulate=config.accumulate,
            images_per_step=batch,
            seed=config.seed,
            log_every=min(config.log_every, max(1, steps // lines)),
            save_every=config.save_every,
            rank_timeout=config.peer_timeout,
        )


def make_optimizer(task: Task, plan: TrainPlan, fabric: Fabric) -> AdamW:
    """Make AdamW, the optimiser of every task, with the learning rate of step 0."""
    return AdamW(task.parameter_groups(), lr=plan.lr.at(0), betas=plan.betas, fused=_fused(fabric))


class TrainStep:
    """Takes training steps of a task. ``module`` is the task as Fabric wrapped it."""

    def __init__(self, task: Task, module: nn.Module, optimizer: Any, plan: TrainPlan, fabric: Fabric) -> None:
        self.task, self.module, self.optimizer = task, module, optimizer
        self.plan, self.fabric = plan, fabric
        self.step = 0
        self.window: dict[tuple[str, ...], Tensor] = {}  # sums and counts, by the set of logged names
        self.once = torch.ones((), device=fabric.device)
        self.guard = torch.zeros(2, device=fabric.device)  # non-finite steps: in a row, in total
        self.moved, self.statistics = BufferSnapshot(task, MOVED), BufferSnapshot(task, STATISTICS)
        self.inner = unwrapped(optimizer)
        self.learning = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        self.graphs = GraphedStep(self.learning, fabric.device)
        self.scaled = getattr(fabric.strategy.precision, "scaler", None) is not None

    def one_step(self) -> None:
        plan, step = self.plan, self.step
        seed_step(plan.seed, step, self.fabric.global_rank)
        self._set_schedules(step)
        self.moved.save()
        if self.task.use_cuda_graphs and self.task.is_capturable(step):
            inputs = self.task.step_inputs(self.task.batch_at(step), step)
            self._collect(self.graphs.run(self._gradients, inputs))
        else:
            self._accumulate(step)
        norm = self._clip()
        skipped = step_if_finite(self.optimizer, norm, self.guard, scaled=self.scaled)
        self.moved.restore_if(skipped)  # a NaN in a running mean or a centre would never leave
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_step(step, skipped)
        self._collect({"gradient_norm": norm})

    def _accumulate(self, step: int) -> None:
        """Compute the gradients of a step, micro-batch by micro-batch."""
        parts = self.plan.accumulate
        for micro in range(parts):
            batch = self.task.batch_at(step * parts + micro)
            with self.fabric.no_backward_sync(self.module, enabled=micro + 1 < parts):  # type: ignore[arg-type]
                losses = self.module(batch, step)
                self._backward(losses["loss"] / parts)
            self._collect(losses)
        self.task.before_optimizer(step)

    def _gradients(self, *inputs: Tensor | bool | None) -> dict[str, Tensor]:
        """Compute the gradients from tensors alone, so that a CUDA graph can capture it; return the losses."""
        with self.fabric.autocast():
            losses = self.task.compute_losses(*inputs)
        self._backward(losses["loss"])
        self.task.before_optimizer(self.step)
        return {name: loss.detach() for name, loss in losses.items()}

    def _backward(self, loss: Tensor) -> None:
        """Run backward and restore BatchNorm's statistics: recomputed activations would count twice.

        timm's networks recompute activations in their own way, so the trainer restores, not the network.
        """
        self.statistics.save()
        self.fabric.backward(loss)
        self.statistics.restore()

    def _set_schedules(self, step: int) -> None:
        lr = self.plan.lr.at(step)
        decay = (self.plan.weight_decay or Constant(0.0)).at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            if group.get("decayed"):
                group["weight_decay"] = decay

    def _clip(self) -> Tensor:
        """Clip by the global norm, or each tensor by its own norm; return the global norm before clipping."""
        # The fp16 scaler identifies optimisers by object: with the wrapper it would unscale now and again at the step.
        self.fabric.strategy.precision.unscale_gradients(self.inner)
        if self.plan.clip_per == "tensor":
            return clip_per_tensor(self.learning, self.plan.clip)
        return nn.utils.clip_grad_norm_(self.learning, self.plan.clip if self.plan.clip > 0 else math.inf)

    def _collect(self, values: dict[str, Tensor]) -> None:
        """Add values to the window's sums on the device. Reading them each step would stall the device."""
        names = tuple(sorted(values))
        row = torch.stack([*(values[name].detach().float() for name in names), self.once])
        self.window[names] = self.window[names] + row if names in self.window else row


def _fused(fabric: Fabric) -> bool:
    """True if fused AdamW works. On a CPU it takes a quarter of the time of the plain one."""
    return fabric.device.type in ("cuda", "cpu")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout and stochastic depth by (seed, step, rank), so that resume needs no stored state."""
    torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + rank) % 2**63)


def equal_parts(world: int, accumulate: int, group: int = 1) -> int:
    """Return the number that the batch size must be a multiple of. ``group``: images that share a rank."""
    return world * accumulate * (group if world > 1 else 1)


def in_equal_parts(batch: int, images: int, parts: int) -> int:
    """Return the largest multiple of ``parts`` that exceeds neither ``batch`` nor ``images``; at least ``parts``."""
    return max(parts, min(batch, images) // parts * parts)


def steps_per_epoch(images: int, batch: int) -> int:
    """Return the number of full batches in an epoch, at least 1."""
    return max(1, images // batch)


def total_steps(steps: int | None, epochs: float, images: int, batch: int) -> int:
    """Return the length of a run in optimizer steps: ``steps`` if it is set, else that many epochs."""
    return steps if steps is not None else max(1, round(epochs * steps_per_epoch(images, batch)))
