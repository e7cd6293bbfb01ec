"""Several processes as one run: who they are, how they agree, and what is said when one of them is gone."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn

from frugalvit.config.run import write_error_hint
from frugalvit.errors import LostRankError, ReportedError, UserError
from frugalvit.utils import console, launch_env
from frugalvit.utils.launch_env import devices_and_nodes as devices_and_nodes

T = TypeVar("T")

SETUP_TIMEOUT = 12 * 3600.0
"""Seconds to wait for a process outside of the steps: one may have a million images to decode, and another none."""

FILESYSTEM_TIMEOUT = 60.0  # seconds till a network disk shows everybody what one process has just written

# The first process of all is the first by every count that its launcher keeps.
_RANKS = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")

# Lightning's advice wherever srun is installed; whether a job lacks it is said by ``launchers.places``.
warnings.filterwarnings("ignore", message="The `srun` command is available")

# What the backends say when a peer closes its connection, or does not answer in time.
_LOST = ("connection closed", "connection reset", "connection refused", "timed out", "timeout", "broken pipe", "nccl")


def is_rank_zero(devices: int, nodes: int) -> bool:
    """Whether this process writes and speaks for all of them; known before it has met the others, too.

    A lone process is, whatever rank its environment speaks of.
    """
    if math.prod(devices_and_nodes(devices, nodes)) == 1:
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return not any(int(os.environ.get(name) or 0) for name in _RANKS)


def strategy(several: bool, patience: float, *, resting: bool = False) -> Any:
    """DDP for several processes; a collective that waits longer than ``patience`` seconds is an error.

    resting: some parameters of the network take no part in the loss
    """
    if not several:
        return "auto"
    timeout = timedelta(seconds=patience)
    return DDPStrategy(timeout=timeout, gradient_as_bucket_view=True, find_unused_parameters=resting)


def launch(fabric: Fabric, here: int = 1) -> None:
    """Start the other processes (where nobody else has) and let only the first one talk.

    here: processes on this machine, which share its cores and memory: ``data.machine`` reads it from the environment
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(here)  # one as well: an earlier run of this process may have had more
    for name in ("lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    launch_env.mark_rank_zero()
    _say_where_they_meet(fabric)
    fabric.launch()
    if fabric.world_size > 1:
        fabric.barrier()  # NCCL connects at the first collective, and waits for that only as long as for the launch
        _wait_at_most(SETUP_TIMEOUT)
    console.set_rank(fabric.global_rank)
    children = getattr(getattr(fabric.strategy, "launcher", None), "procs", [])
    if children:
        threading.Thread(target=_mind, args=(children,), daemon=True, name="mind the processes").start()


def _say_where_they_meet(fabric: Fabric) -> None:
    """Processes that somebody else starts may never come, on a machine that cannot be reached: say what is awaited."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return  # they have met for a run before this one
    count = 1 if environment is None or not environment.creates_processes_externally else environment.world_size()
    if count > 1 and environment is not None and environment.global_rank() == 0:
        console.info(f"waiting for {count} processes at {environment.main_address}:{environment.main_port}")


def _mind(children: list[Any]) -> None:
    """Say which process died; lightning's own observer then ends the others, silently and within seconds."""
    while any(child.poll() is None for child in children):
        time.sleep(0.5)
        for number, child in enumerate(children, 1):
            if child.poll():
                console.warning(f"process {number} of this run ended with status {child.returncode}; ending the others")
                return


def run_on_rank_zero(fabric: Fabric, decide: Callable[[], T]) -> T:
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
        raise UserError(mistake) if fabric.global_rank == 0 else ReportedError(mistake)
    return value


def all_reduce_max(fabric: Fabric, value: int) -> int:
    """The largest of the processes' numbers."""
    if fabric.world_size == 1:
        return value
    return int(fabric.all_reduce(torch.tensor(value, device=fabric.device), reduce_op="max"))  # type: ignore[arg-type]


def all_ranks_equal(fabric: Fabric, value: int) -> bool:
    """Whether all processes hold the same number."""
    if fabric.world_size == 1:
        return True
    both_ends: Any = fabric.all_reduce(torch.tensor([value, -value], device=fabric.device), reduce_op="max")
    return both_ends.tolist() == [value, -value]


def check_shared_filesystem(fabric: Fabric, folder: Path) -> None:
    """All processes must find the first one's folder: each of them reads the checkpoints there.

    A folder of the same name is not enough, so the first process leaves a word in it for the others to find.
    """
    if fabric.world_size == 1:
        return
    note, word = folder / ".seen.part", fabric.broadcast(uuid.uuid4().hex)
    run_on_rank_zero(fabric, lambda: _write_note(note, word))
    everywhere = all_ranks_equal(fabric, int(_finds(note, word)))
    if fabric.global_rank == 0:
        note.unlink(missing_ok=True)
    if not everywhere:
        raise UserError(
            f"Not all processes find the first one's {folder}: it must lie on a file system that all machines share."
        )


def _write_note(note: Path, word: str) -> None:
    try:
        note.write_text(word, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write to {note.parent} ({error.strerror}). {write_error_hint(note.parent)}") from None


def _finds(note: Path, word: str) -> bool:
    until = time.monotonic() + FILESYSTEM_TIMEOUT
    while True:
        try:
            if note.read_text(encoding="utf-8") == word:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


@contextmanager
def collective_timeout(fabric: Fabric, patience: float) -> Iterator[None]:
    """Inside, processes take the same steps, and one that does not answer for ``patience`` seconds hangs.

    Outside they wait for each other's preparations. So they meet before the time begins to count.
    """
    if fabric.world_size == 1:
        yield
        return
    fabric.barrier()
    _wait_at_most(patience)
    try:
        yield
    finally:
        _wait_at_most(SETUP_TIMEOUT)


def barrier() -> None:
    """Wait for the others of a run that is over: the first process has written its files when they go on."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _wait_at_most(seconds: float) -> None:
    """For every collective from now on."""
    distributed: Any = torch.distributed
    change = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout  # its older name
    change(timedelta(seconds=seconds))


@contextmanager
def fail_on_lost_rank(fabric: Fabric, folder: Path | None, patience: float) -> Iterator[None]:
    """A peer that died or hangs ends the run with a line that says so, instead of a hang or a traceback.

    folder: of the run; None before it has one
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if fabric.world_size == 1 or not any(sign in text.lower() for sign in _LOST):
            raise
        way = (
            "Nothing has begun yet: mend what that process said, then start the same processes again."
            if folder is None
            else "What was saved is intact: start the same processes again with --resume "
            + console.shell_quote(folder)
            + "."
        )
        raise LostRankError(
            f"Another process of this run has ended, or has not answered for {patience:.0f} s ({text[:160]}). {way}"
        ) from error


def convert_sync_batchnorm(task: nn.Module, fabric: Fabric) -> None:
    """Batch norms over all processes' images, so that N of them compute what one would with the whole batch."""
    if fabric.world_size == 1 or not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.modules()):
        return
    if fabric.device.type != "cuda":
        console.warning("batch norms see each process's images alone here: PyTorch synchronises them on GPUs only")
        return
    from timm.layers.norm_act import convert_sync_batchnorm

    convert_sync_batchnorm(task)
    console.info("batch norms are computed over the images of all processes")
