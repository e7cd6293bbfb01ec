"""When and how the parts of a step are compiled.

Backbones, one graph for each size of crop, and Drloc's head with its loss; what lies around them changes too often to
gain from it. A step of a small batch is bound by the host that queues a thousand small kernels; replaying those of the
backbone as CUDA graphs takes that away, for memory that stays reserved.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric

from frugalvit import console
from frugalvit.config.train import RunConfig
from frugalvit.training.stepping import Plan

PAYS_FROM = 500
"""Steps from which "auto" compiles: a cold compilation takes one to three minutes."""


def compile_task(task: Any, config: RunConfig, plan: Plan, fabric: Fabric) -> None:
    """Compile as ``--compile`` says; "auto" does so on a GPU for runs long enough to gain from it."""
    wanted = config.compile
    if wanted == "auto":
        wanted = fabric.device.type == "cuda" and plan.steps >= PAYS_FROM
    if not wanted:
        return
    graphs = wanted == "graphs"
    if graphs and (reason := _no_graphs(config, plan, fabric)):
        console.warn(f"compiled without CUDA graphs: {reason}")
        graphs = False
    compile_parts(task, graphs)


def compile_parts(task: Any, graphs: bool) -> None:
    """Compile the networks of a task, replayed as CUDA graphs or not, and the head of its localization loss."""
    for network in task.networks:
        network.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
    if task.localization is not None:
        task.localization.compile(dynamic=False)


def _no_graphs(config: RunConfig, plan: Plan, fabric: Fabric) -> str:
    """Why the networks cannot be replayed as CUDA graphs, or nothing."""
    if fabric.device.type != "cuda" or not torch.cuda.is_available():
        return "there is no CUDA device"
    if fabric.world_size > 1:
        return "several processes exchange gradients while the backward pass runs"
    if plan.accumulate > 1 or getattr(config, "crops_at_once", 0):
        return "a graph's gradients are overwritten by its next replay, and a step in parts adds them up"
    if config.checkpoint_activations:
        return "recomputed activations would be replayed out of turn"
    return ""
