"""Distributed training: launch, rank 0, collectives with timeouts, and lost ranks."""

import logging
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn

from frugalvit.errors import LostRankError, ReportedError, UserError
from frugalvit.runs.layout import contains_run, write_error_hint
from frugalvit.utils import console, launch_env
from frugalvit.utils.launch_env import devices_and_nodes as devices_and_nodes
from frugalvit.utils.launch_env import env_number

T = TypeVar("T")

SETUP_TIMEOUT = 12 * 3600.0
"""Timeout of collectives outside the steps, in seconds: one rank may decode a million images while others wait."""

FILESYSTEM_TIMEOUT = 60.0  # seconds until a network disk shows a new file to all nodes

# Rank 0 is 0 in every variable that its launcher sets.
_RANKS = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")

# Lightning warns if srun is installed; ``devices_and_nodes`` decides if a job needs it.
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
    return not any(env_number(name) for name in _RANKS)


def strategy(kind: str, world: int, seconds: float, *, has_unused: bool = False) -> Any:
    """Return "ddp" or "fsdp" for several processes; a collective that waits longer than ``seconds`` fails.

    has_unused: some parameters of the network take no part in the loss
    """
    if kind == "fsdp" and world == 1:
        raise UserError("--strategy fsdp shares the weights among processes: use --devices 2 or more, or drop it.")
    if world == 1:
        return "auto"
    timeout = timedelta(seconds=seconds)
    if kind == "fsdp":
        from frugalvit.engine.sharding import make_strategy

        return make_strategy(world, timeout)
    return DDPStrategy(timeout=timeout, gradient_as_bucket_view=True, find_unused_parameters=has_unused)


def launch(fabric: Fabric, local_processes: int = 1) -> None:
    """Start the other processes, unless a launcher did, and log only on rank 0.

    local_processes: number on this machine; they share its cores and memory (``utils.system``)
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(local_processes)  # also if it is 1: an earlier run may have set more
    for name in ("lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    launch_env.mark_rank_zero()
    _log_rendezvous(fabric)
    fabric.launch()
    if fabric.world_size > 1:
        fabric.barrier()  # NCCL connects at the first collective, with the timeout of the launch
        _set_timeout(SETUP_TIMEOUT)
    console.set_rank(fabric.global_rank)
    children = getattr(getattr(fabric.strategy, "launcher", None), "procs", [])
    if children:
        threading.Thread(target=_report_dead_child, args=(children,), daemon=True).start()


def _log_rendezvous(fabric: Fabric) -> None:
    """Log what rank 0 waits for: processes of a launcher may never start, or be unreachable."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    is_connected = torch.distributed.is_available() and torch.distributed.is_initialized()  # by an earlier run
    if is_connected or environment is None or not environment.creates_processes_externally:
        return
    if environment.world_size() > 1 and environment.global_rank() == 0:
        address = f"{environment.main_address}:{environment.main_port}"
        console.info(f"waiting for {environment.world_size()} processes at {address}")


def _report_dead_child(children: list[Any]) -> None:
    """Log which process died. Lightning then ends the others silently, within seconds."""
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
    value, message = None, None
    if fabric.global_rank == 0:
        try:
            value = decide()
        except UserError as error:
            message = str(error)
    result: Any
    result, message = fabric.broadcast((value, message))
    if message is not None:
        raise UserError(message) if fabric.global_rank == 0 else ReportedError(message)
    return result


def all_reduce_max(fabric: Fabric, value: int) -> int:
    """Return the maximum of a number over all ranks."""
    if fabric.world_size == 1:
        return value
    return int(fabric.all_reduce(torch.tensor(value, device=fabric.device), reduce_op="max"))  # type: ignore[arg-type]


def all_ranks_equal(fabric: Fabric, value: int) -> bool:
    """True if all ranks have the same number."""
    return all_reduce_max(fabric, value) == -all_reduce_max(fabric, -value)


def check_same_resume(fabric: Fabric, resumes: bool, out: str | None) -> None:
    """Raise if ``--resume auto`` found a run on some ranks only."""
    if not all_ranks_equal(fabric, int(resumes)):
        raise UserError(
            f"Some processes see a run in {out} and others do not: put it on a file system that all machines share."
        )


def check_shared_filesystem(fabric: Fabric, folder: Path) -> None:
    """Raise ``UserError`` unless all ranks share the run folder, from which they read checkpoints.

    A folder of the same name is not enough, so rank 0 writes a file that the others must read.
    """
    if fabric.world_size == 1:
        return
    path, content = folder / ".seen.part", fabric.broadcast(uuid.uuid4().hex)

    def write() -> None:
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"Cannot write to {folder} ({error.strerror}). {write_error_hint(folder)}") from None

    run_on_rank_zero(fabric, write)
    is_shared = all_ranks_equal(fabric, int(_can_read(path, content)))
    if fabric.global_rank == 0:
        path.unlink(missing_ok=True)
    if not is_shared:
        raise UserError(f"Not all ranks can read {folder} of rank 0. It must be on a file system that all nodes share.")


def _can_read(path: Path, content: str) -> bool:
    """True if the file has this content, at once or after some seconds."""
    deadline = time.monotonic() + FILESYSTEM_TIMEOUT
    while time.monotonic() < deadline:
        with suppress(OSError):
            if path.read_text(encoding="utf-8") == content:
                return True
        time.sleep(0.2)
    return False


@contextmanager
def collective_timeout(fabric: Fabric, seconds: float) -> Iterator[None]:
    """Inside this context a collective that waits longer than ``seconds`` fails.

    A barrier comes first: before it, ranks may wait longer for each other.
    """
    if fabric.world_size == 1:
        yield
        return
    fabric.barrier()
    _set_timeout(seconds)
    try:
        yield
    finally:
        _set_timeout(SETUP_TIMEOUT)


def barrier() -> None:
    """Wait for all ranks at the end of a run: afterwards rank 0 has written its files."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _set_timeout(seconds: float) -> None:
    distributed: Any = torch.distributed
    change = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout  # its older name
    change(timedelta(seconds=seconds))


@contextmanager
def fail_on_lost_rank(fabric: Fabric, folder: Path | None, seconds: float) -> Iterator[None]:
    """Raise ``LostRankError`` if another rank died or hangs; ``folder`` is the run's, None before it exists."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if fabric.world_size == 1 or not any(message in text.lower() for message in _LOST):
            raise
        if folder is None or not contains_run(folder):  # the empty folder of a new run is removed
            hint = "Nothing was saved yet: fix the error of that process, then start the same processes again."
        else:
            command = f"--resume {console.shell_quote(folder)}"
            hint = f"The checkpoints are intact: start the same processes again with {command}."
        raise LostRankError(
            f"Another rank of this run ended, or did not answer for {seconds:.0f} s ({text[:160]}). {hint}"
        ) from error


def convert_sync_batchnorm(task: nn.Module, fabric: Fabric) -> None:
    """Synchronize batch norms, so that N ranks compute the same as one with the full batch."""
    if fabric.world_size == 1 or not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.modules()):
        return
    if fabric.device.type != "cuda":
        console.warning("each rank has its own batch-norm statistics: PyTorch synchronizes them only on GPUs")
        return
    from timm.layers.norm_act import convert_sync_batchnorm

    convert_sync_batchnorm(task)
    console.info("batch-norm statistics are synchronized over all ranks")
