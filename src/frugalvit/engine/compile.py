"""Decide when and how to compile a step; the task's ``compile_with`` decides what. Graphs: see ``step``."""

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
"""The shortest run, in steps, that "auto" compiles: a cold compilation takes one to three minutes."""

DIFFERENT_GRAPHS = 64
"""torch's recompile limit: a comparison compiles each setting in one process, and torch stops compiling after 8."""

KEEPS_SHAPES = Version("2.15")
"""The first torch version whose compiled gradients always have the parameters' shapes."""

_FUSES_SUMS = getattr(inductor.triton, "mix_order_reduction", False)  # the setting before we change it


def compile_task(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> None:
    """Compile as ``--compile`` says; "auto" compiles long runs on a GPU."""
    wanted = _resolve_auto(task, config, plan, fabric) if config.compile == "auto" else config.compile
    if not wanted:
        return
    graphs = wanted == "graphs"
    if graphs and (reason := _graphs_blocker(task, config, plan, fabric)):
        console.warning(f"compiled without CUDA graphs: {reason}")
        graphs = False
    prepare_compiler(task)
    task.compile_with(graphs)


def prepare_compiler(module: nn.Module) -> None:
    """Configure torch's compiler for a step of ``module``."""
    torch._dynamo.config.recompile_limit = DIFFERENT_GRAPHS
    # By default Inductor times several kernels for a sum, and padded matrix products, and takes the fastest. They round
    # differently, so the same command on an equal machine would train another network.
    if hasattr(inductor, "deterministic"):  # not in every torch release
        inductor.deterministic = True
    if Version(torch.__version__) >= KEEPS_SHAPES:
        return
    # Inductor fuses sums over rows and columns, and then returns gradients of (1, C, 1, 1) as (C,).
    learning = (p for p in module.parameters() if p.requires_grad and p.ndim > 2)
    has_channel_map = any(p.shape[-1] == 1 and 1 < p.numel() == max(p.shape) for p in learning)
    inductor.triton.mix_order_reduction = _FUSES_SUMS and not has_channel_map


def _resolve_auto(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> bool | Literal["graphs"]:
    """Resolve ``--compile auto``."""
    if fabric.device.type != "cuda" or plan.steps < PAYS_FROM:
        return False
    fits = not config.auto_batch and not _graphs_blocker(task, config, plan, fabric)  # auto-batch measures no graphs
    return "graphs" if fits and can_replay_graphs(task, fabric) else True


def can_replay_graphs(task: Task, fabric: Fabric) -> bool:
    """True if the step is tested with CUDA graphs and has no fp16 scaler."""
    return task.supports_cuda_graphs and getattr(fabric.strategy.precision, "scaler", None) is None


def _graphs_blocker(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> str:
    """Return the reason why the step cannot be a CUDA graph; empty if it can."""
    if fabric.device.type != "cuda" or not torch.cuda.is_available():
        return "there is no CUDA device"
    if fabric.world_size > 1:
        return "several ranks exchange gradients during the backward pass"
    if plan.accumulate > 1 or getattr(config, "crops_at_once", 0):
        return "a replay overwrites gradients, and micro-batches must add them up"
    if config.checkpoint_activations:
        return "a graph cannot recompute activations (--checkpoint-activations)"
    return task.cuda_graphs_blocker
