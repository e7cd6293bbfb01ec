"""When and how a task's step is compiled; what of it, the task knows (``compile_with``).

A step of a small batch is bound by the host that queues a thousand small kernels; replaying them as CUDA graphs takes
that away, for memory that stays reserved.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch._inductor.config as inductor
from lightning_fabric import Fabric
from packaging.version import Version
from torch import nn

from frugalvit.config.train import RunConfig
from frugalvit.engine.step import TrainPlan
from frugalvit.engine.task import Task
from frugalvit.utils import console

PAYS_FROM = 500
"""Steps from which "auto" compiles: a cold compilation takes one to three minutes."""

DIFFERENT_GRAPHS = 64
"""A comparison compiles one graph for each of its settings in one process; after 8 torch would go on uncompiled."""

KEEPS_SHAPES = Version("2.15")
"""The torch from which compiled gradients are known to have their parameters' shapes."""

_FUSES_SUMS = getattr(inductor.triton, "mix_order_reduction", False)  # as torch, or its user, has it


def compile_task(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> None:
    """Compile as ``--compile`` says; "auto" does so on a GPU for runs long enough."""
    wanted = _chosen(task, config, plan, fabric) if config.compile == "auto" else config.compile
    if not wanted:
        return
    graphs = wanted == "graphs"
    if graphs and (reason := _no_graphs(task, config, plan, fabric)):
        console.warning(f"compiled without CUDA graphs: {reason}")
        graphs = False
    prepare_compiler(task)
    task.compile_with(graphs)


def prepare_compiler(module: nn.Module) -> None:
    """What torch's compiler must know before it compiles a step of ``module``."""
    torch._dynamo.config.recompile_limit = DIFFERENT_GRAPHS
    if Version(torch.__version__) >= KEEPS_SHAPES:
        return
    # It makes one kernel of sums over rows and over columns, and gives back gradients of (1, C, 1, 1) as (C,).
    learning = (p for p in module.parameters() if p.requires_grad and p.ndim > 2)
    standing = any(p.shape[-1] == 1 and 1 < p.numel() == max(p.shape) for p in learning)
    inductor.triton.mix_order_reduction = _FUSES_SUMS and not standing


def _chosen(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> bool | Literal["graphs"]:
    """What "auto" means here."""
    if fabric.device.type != "cuda" or plan.steps < PAYS_FROM:
        return False
    fits = not config.auto_batch and not _no_graphs(task, config, plan, fabric)  # auto-batch tries sizes without graphs
    return "graphs" if fits and replays_by_itself(task, fabric) else True


def replays_by_itself(task: Task, fabric: Fabric) -> bool:
    """Whether a step has been tried with graphs, and has no scale of fp16 to look for."""
    return task.supports_cuda_graphs and getattr(fabric.strategy.precision, "scaler", None) is None


def _no_graphs(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> str:
    """Why the step cannot be replayed as CUDA graphs, or nothing."""
    if fabric.device.type != "cuda" or not torch.cuda.is_available():
        return "there is no CUDA device"
    if fabric.world_size > 1:
        return "several processes exchange gradients while the backward pass runs"
    if plan.accumulate > 1 or getattr(config, "crops_at_once", 0):
        return "a graph's gradients are overwritten by its next replay, and a step in parts adds them up"
    if config.checkpoint_activations:
        return "recomputed activations would be replayed out of turn"
    return task.cuda_graphs_blocker
