"""Decide when and how to compile a step; the task's ``compile_with`` decides what. Graphs: see ``step``."""

from typing import Literal

import torch
import torch._inductor.config as inductor
from lightning_fabric import Fabric

from frugalvit.config.train import RunConfig
from frugalvit.engine.step import TrainPlan
from frugalvit.engine.task import Task
from frugalvit.utils import console

REPLAYS_FROM = 100  # the shortest run, in steps, for which "auto" captures CUDA graphs: a second or two
COMPILES_FROM = 6000
"""The shortest run, in steps, that "auto" compiles: 30 s are a tenth of 6,000 steps of 50 ms."""

DIFFERENT_REGIONS = 256
"""torch's recompile limit: the blocks of all networks of a process share it, and torch stops compiling after 8."""


def compile_task(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> None:
    """Compile as ``--compile`` says; "auto" compiles long runs on a GPU."""
    wanted = _resolve_auto(task, config, plan, fabric) if config.compile == "auto" else config.compile
    task.requires_cuda_graphs = config.compile == "graphs"
    if wanted == "replay":
        task.use_cuda_graphs = True
    if wanted in (False, "replay"):
        return
    graphs = wanted == "graphs"
    if graphs and (reason := _graphs_blocker(task, config, plan, fabric)):
        console.warning(f"compiled without CUDA graphs: {reason}")
        graphs = False
    prepare_compiler()
    task.compile_with(graphs)


def prepare_compiler() -> None:
    torch._dynamo.config.recompile_limit = DIFFERENT_REGIONS
    # Inductor times several kernels for a sum, or a padded matrix product, and takes the fastest. They round
    # differently, so an equal machine would train another network. Small sums are still chosen by time; the compiler's
    # cache keeps the choice.
    if hasattr(inductor, "deterministic"):  # not in every torch release
        inductor.deterministic = True
    # From torch 2.10 on, Inductor fuses sums over rows with sums over columns. Such kernels may return wrong gradients
    # (pytorch/pytorch#193061).
    if hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False


def _resolve_auto(task: Task, config: RunConfig, plan: TrainPlan, fabric: Fabric) -> bool | Literal["graphs", "replay"]:
    """Resolve ``--compile auto``. "replay": CUDA graphs of PyTorch's own kernels, without compilation."""
    if fabric.device.type != "cuda" or plan.steps < REPLAYS_FROM or config.strategy == "fsdp":
        return False
    fits = not config.auto_batch and not _graphs_blocker(task, config, plan, fabric)  # auto-batch measures no graphs
    graphs = fits and can_replay_graphs(task, fabric)
    if not task.compiles_by_default or plan.steps < COMPILES_FROM:
        return "replay" if graphs else False
    return "graphs" if graphs else True


def can_replay_graphs(task: Task, fabric: Fabric) -> bool:
    """True if nothing keeps "auto" from CUDA graphs. With an fp16 scaler they are not tested."""
    return not task.cuda_graphs_blocker and getattr(fabric.strategy.precision, "scaler", None) is None


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
