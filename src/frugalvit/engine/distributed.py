"""Distributed training: launch, rank 0, collectives with timeouts, and lost ranks."""

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

from frugalvit.errors import LostRankError, ReportedError, UserError
from frugalvit.runs.layout import write_error_hint
from frugalvit.utils import console, launch_env
from frugalvit.utils.launch_env import devices_and_nodes as devices_and_nodes

T = TypeVar("T")

SETUP_TIMEOUT = 12 * 3600.0
"""Timeout of collectives outside the steps, in seconds: one rank may decode a million images while others wait."""

FILESYSTEM_TIMEOUT = 60.0  # seconds until a network disk shows a new file to all nodes

# Rank 0 is 0 in every variable that its launcher sets.
_RANKS = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")

# Lightning warns if srun is installed; ``launch_env.devices_and_nodes`` decides if a job needs it.
warnings.filterwarnings("ignore", message="The `srun` command is available")

# Texts of the backends' errors when another rank is lost or does not answer in time.
_LOST = ("connection closed", "connection reset", "connection refused", "timed out", "timeout", "broken pipe", "nccl")


def is_rank_zero(devices: int, nodes: int) -> bool:
    """True if this process is rank 0. Works before the launch, too.

    A single process is always rank 0, even if its environment says otherwise.
    """
    if math.prod(devices_and_nodes(devices, nodes)) == 1:
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return not any(int(os.environ.get(name) or 0) for name in _RANKS)


def strategy(several: bool, patience: float, *, resting: bool = False) -> Any:
    """Return DDP for several processes; a collective that waits longer than ``patience`` seconds fails.

    resting: some parameters of the network take no part in the loss
    """
    if not several:
        return "auto"
    timeout = timedelta(seconds=patience)
    return DDPStrategy(timeout=timeout, gradient_as_bucket_view=True, find_unused_parameters=resting)


def launch(fabric: Fabric, here: int = 1) -> None:
    """Start the other processes, unless a launcher did, and log only on rank 0.

    here: processes on this machine, which share its cores and memory: ``data.machine`` reads it from the environment
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(here)  # also for one: an earlier run of this process may have set more
    for name in ("lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    launch_env.mark_rank_zero()
    _say_where_they_meet(fabric)
    fabric.launch()
    if fabric.world_size > 1:
        fabric.barrier()  # NCCL connects at the first collective, with the timeout of the launch
        _wait_at_most(SETUP_TIMEOUT)
    console.set_rank(fabric.global_rank)
    children = getattr(getattr(fabric.strategy, "launcher", None), "procs", [])
    if children:
        threading.Thread(target=_mind, args=(children,), daemon=True, name="mind the processes").start()


def _say_where_they_meet(fabric: Fabric) -> None:
    """Log what this process waits for: processes of a launcher may never start, or be unreachable."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return  # already connected by an earlier run
    count = 1 if environment is None or not environment.creates_processes_externally else environment.world_size()
    if count > 1 and environment is not None and environment.global_rank() == 0:
        console.info(f"waiting for {count} processes at {environment.main_address}:{environment.main_port}")


def _mind(children: list[Any]) -> None:
    """Log which process died; Lightning then ends the others silently, within seconds."""
    while any(child.poll() is None for child in children):
        time.sleep(0.5)
        for number, child in enumerate(children, 1):
            if child.poll():
                console.warning(f"process {number} of this run ended with status {child.returncode}; ending the others")
                return


def run_on_rank_zero(fabric: Fabric, decide: Callable[[], T]) -> T:
    """Run ``decide`` on rank 0 and broadcast its result, or its ``UserError``, to all ranks."""
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
    """Return the maximum of a number over all ranks."""
    if fabric.world_size == 1:
        return value
    return int(fabric.all_reduce(torch.tensor(value, device=fabric.device), reduce_op="max"))  # type: ignore[arg-type]


def all_ranks_equal(fabric: Fabric, value: int) -> bool:
    """True if all ranks have the same number."""
    if fabric.world_size == 1:
        return True
    both_ends: Any = fabric.all_reduce(torch.tensor([value, -value], device=fabric.device), reduce_op="max")
    return both_ends.tolist() == [value, -value]


def check_shared_filesystem(fabric: Fabric, folder: Path) -> None:
    """Raise ``UserError`` unless all ranks share the run folder, from which they read checkpoints.

    A folder of the same name is not enough, so rank 0 writes a file that the others must read.
    """
    if fabric.world_size == 1:
        return
    note, word = folder / ".seen.part", fabric.broadcast(uuid.uuid4().hex)
    run_on_rank_zero(fabric, lambda: _write_note(note, word))
    everywhere = all_ranks_equal(fabric, int(_finds(note, word)))
    if fabric.global_rank == 0:
        note.unlink(missing_ok=True)
    if not everywhere:
        raise UserError(f"Not all ranks can read {folder} of rank 0. It must be on a file system that all nodes share.")


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
    """Inside this context a collective that waits longer than ``patience`` seconds fails.

    A barrier comes first, because outside ranks may wait longer for each other.
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
    """Wait for all ranks at the end of a run: afterwards rank 0 has written its files."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _wait_at_most(seconds: float) -> None:
    """Set the timeout of all later collectives."""
    distributed: Any = torch.distributed
    change = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout  # its older name
    change(timedelta(seconds=seconds))


@contextmanager
def fail_on_lost_rank(fabric: Fabric, folder: Path | None, patience: float) -> Iterator[None]:
    """End the run with one line if another rank died or hangs, instead of a hang or a traceback.

    folder: of the run; None before it has one
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if fabric.world_size == 1 or not any(sign in text.lower() for sign in _LOST):
            raise
        way = (
            "No step was taken yet: fix the error of that process, then start the same processes again."
            if folder is None
            else "The checkpoints are intact: start the same processes again with --resume "
            + console.shell_quote(folder)
            + "."
        )
        raise LostRankError(
            f"Another rank of this run ended, or did not answer for {patience:.0f} s ({text[:160]}). {way}"
        ) from error


def convert_sync_batchnorm(task: nn.Module, fabric: Fabric) -> None:
    """Synchronise batch norms, so that N ranks compute the same as one with the full batch."""
    if fabric.world_size == 1 or not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.modules()):
        return
    if fabric.device.type != "cuda":
        console.warning("each rank has its own batch-norm statistics: PyTorch synchronises them only on GPUs")
        return
    from timm.layers.norm_act import convert_sync_batchnorm

    convert_sync_batchnorm(task)
    console.info("batch-norm statistics are synchronised over all ranks")
