"""Several processes as one run: who they are, how they agree, and what is said when one of them is gone."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn

from frugalvit import console
from frugalvit.errors import UserError

T = TypeVar("T")

# What the backends say when a peer closes its connection, or does not answer in time.
_LOST = ("connection closed", "connection reset", "connection refused", "timed out", "timeout", "broken pipe", "nccl")


def places(devices: int, nodes: int) -> tuple[int, int]:
    """Processes per machine and machines: as asked for, or as torchrun and SLURM have already started them."""
    if devices * nodes > 1:
        return devices, nodes
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        here = int(variables["LOCAL_WORLD_SIZE"])
        return here, int(variables["WORLD_SIZE"]) // here
    if "SLURM_NTASKS" in variables and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        machines = int(variables.get("SLURM_NNODES", 1))
        return max(1, int(variables["SLURM_NTASKS"]) // machines), machines
    return devices, nodes


def strategy(several: bool, patience: float, *, resting: bool = False) -> Any:
    """DDP for several processes; a collective that waits longer than ``patience`` seconds is an error.

    resting: some parameters of the network take no part in the loss
    """
    if not several:
        return "auto"
    timeout = timedelta(seconds=patience)
    return DDPStrategy(timeout=timeout, gradient_as_bucket_view=True, find_unused_parameters=resting)


def launch(fabric: Fabric) -> None:
    """Start the other processes (where nobody else has) and let only the first one talk."""
    for name in ("lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    fabric.launch()
    console.set_secondary(fabric.global_rank > 0)
    children = getattr(getattr(fabric.strategy, "launcher", None), "procs", [])
    if children:
        threading.Thread(target=_mind, args=(children,), daemon=True, name="mind the processes").start()


def _mind(children: list[Any]) -> None:
    """Say which process died; lightning's own observer then ends the others, silently and within seconds."""
    while any(child.poll() is None for child in children):
        time.sleep(0.5)
        for number, child in enumerate(children, 1):
            if child.poll():
                console.warn(f"process {number} of this run ended with status {child.returncode}; ending the others")
                return


def together(fabric: Fabric, decide: Callable[[], T]) -> T:
    """What the first process decides, on all of them; a mistake it meets is everybody's."""
    if fabric.world_size == 1:
        return decide()
    answer: tuple[Any, str | None] = (None, None)
    if fabric.global_rank == 0:
        try:
            answer = (decide(), None)
        except UserError as error:
            answer = (None, str(error))
    value: Any
    value, mistake = fabric.broadcast(answer)
    if mistake is not None:
        raise UserError(mistake)
    return value


def same_everywhere(fabric: Fabric, value: int) -> bool:
    """Whether all processes hold the same number."""
    if fabric.world_size == 1:
        return True
    both_ends: Any = fabric.all_reduce(torch.tensor([value, -value], device=fabric.device), reduce_op="max")
    return both_ends.tolist() == [value, -value]


@contextmanager
def mind_the_peers(fabric: Fabric, folder: Path, patience: float) -> Iterator[None]:
    """A peer that died or hangs ends the run with a line that says so, instead of a hang or a traceback."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if fabric.world_size == 1 or not any(sign in text.lower() for sign in _LOST):
            raise
        raise UserError(
            f"Another process of this run has ended, or has not answered for {patience:.0f} s ({text[:160]}). What was "
            f"saved is intact: start the same processes again with --resume {console.shown(folder)}."
        ) from error


def synchronise_norms(task: nn.Module, fabric: Fabric) -> None:
    """Batch norms over all processes' images, so that N of them compute what one would with the whole batch."""
    if fabric.world_size == 1 or not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.modules()):
        return
    if fabric.device.type != "cuda":
        console.warn("batch norms see each process's images alone here: PyTorch synchronises them on GPUs only")
        return
    from timm.layers.norm_act import convert_sync_batchnorm

    convert_sync_batchnorm(task)
    console.say("batch norms are computed over the images of all processes")
