"""Rank and world size from the environment: torchrun, SLURM's srun, or a run that starts its own processes.

Nothing here imports torch, so that a command that is not needed on a rank ends at once.
"""

import os
import re
import sys
import time
from typing import NamedTuple

from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize


class LaunchInfo(NamedTuple):
    """One of several processes, as its launcher counts them."""

    launcher: str
    processes: int
    machines: int
    rank: int
    local_rank: int


def launch_info() -> LaunchInfo | None:
    """Read what torchrun or srun started this process as; None for a single process."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        processes, per_node = (int(variables[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        ranks = (int(variables.get(name) or 0) for name in ("RANK", "LOCAL_RANK"))
        return LaunchInfo("torchrun", processes, processes // per_node, *ranks) if processes > 1 else None
    processes = _count_srun_tasks()
    if processes == 1:
        return None
    machines = int(variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or 1)
    ranks = (int(variables.get(name) or 0) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    return LaunchInfo("srun", processes, machines, *ranks)


_SHELLS = ("bash", "interactive")  # SLURM's names for an interactive job
_SPECIAL_STEPS = 0xFFFFFFF0  # larger step numbers are not srun: the batch script, a shell of salloc …


def _count_srun_tasks() -> int:
    """Count the tasks of the srun step that this process is part of; 1 outside of a step.

    SLURM_NTASKS alone says nothing: the batch script has it too, and is one process.
    """
    variables = os.environ
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS or "SLURM_PROCID" not in variables:
        return 1
    if variables.get("SLURM_JOB_NAME") in _SHELLS and sys.stdin is not None and sys.stdin.isatty():
        return 1  # typed into the shell of 'srun --pty bash'
    return int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or 1)


def devices_and_nodes(devices: int, nodes: int) -> tuple[int, int]:
    """Return processes per machine and machines: the options, or what torchrun or srun has started."""
    launch, requested = launch_info(), devices * nodes
    if launch is None:
        _hide_slurm(should_warn=requested == 1)
        return devices, nodes
    per_node = _processes_per_node(launch)
    if requested > 1 and (devices, nodes) != (per_node, launch.machines):
        raise UserError(
            f"--devices {devices} --nodes {nodes} does not match {launch.launcher}, which has started "
            f"{launch.processes} processes on {pluralize(launch.machines, 'machine')}. Drop both options."
        )
    if launch.launcher == "srun":
        _describe_step_to_fabric(launch, per_node)
    return per_node, launch.machines


def _processes_per_node(launch: LaunchInfo) -> int:
    counts = set(re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")))  # as "4(x2),3"
    is_uneven = launch.launcher == "srun" and len(counts) > 1
    if launch.processes % launch.machines or is_uneven:
        least = max(1, launch.processes // launch.machines)
        raise UserError(
            f"{launch.launcher} has started {launch.processes} processes unevenly on "
            f"{pluralize(launch.machines, 'machine')}. Start equally many on each, e.g. with --ntasks-per-node={least}."
        )
    return launch.processes // launch.machines


def _describe_step_to_fabric(launch: LaunchInfo, per_node: int) -> None:
    """Set the variables that Fabric reads to those of the srun step: by default they describe the full job."""
    counts = {"SLURM_NTASKS": launch.processes, "SLURM_NNODES": launch.machines, "SLURM_NTASKS_PER_NODE": per_node}
    os.environ.update({name: str(count) for name, count in counts.items()})
    if os.environ.get("SLURM_JOB_NAME") in _SHELLS:  # srun from a shell of salloc: Fabric would ignore its tasks
        os.environ["SLURM_JOB_NAME"] = "frugalvit"


def _hide_slurm(*, should_warn: bool) -> None:
    """Remove SLURM_NTASKS: without srun there is one process, and Fabric would wait for the others."""
    tasks = int(os.environ.pop("SLURM_NTASKS", None) or 1)
    if tasks > 1 and should_warn:
        console.warning(f"this job has {tasks} tasks, but only one process runs; start it with 'srun frugalvit …'")


_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")


def needs_launch() -> bool:
    """True if a run has to start its other processes itself.

    Fabric takes LOCAL_RANK as the sign of a launcher, and also knows those of MPI and LSF.
    """
    has_other_launcher = any((os.environ.get(name) or "1") != "1" for name in _OTHER_LAUNCHERS)
    return launch_info() is None and "LOCAL_RANK" not in os.environ and not has_other_launcher


def clear_launch_env() -> None:
    """Make this a single process, for a command that does not use the others."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    for name in ("SLURM_STEP_ID", "SLURM_NTASKS"):
        os.environ.pop(name, None)


_RANK_ZERO_PID = "FRUGALVIT_RANK_ZERO_PID"


def mark_rank_zero() -> None:
    """Tell the processes that this one starts that it is their rank 0."""
    if rank() == 0:
        os.environ[_RANK_ZERO_PID] = str(os.getpid())


def rank() -> int:
    """Return the rank of this process. A LOCAL_RANK that no launcher has set does not count."""
    launch = launch_info()
    if launch is not None:
        return launch.rank
    return int(os.environ.get("LOCAL_RANK") or 0) if os.environ.get(_RANK_ZERO_PID) == str(os.getppid()) else 0


def is_rank_zero_alive(after: float = 5.0) -> bool:
    """True if rank 0 still runs after some seconds, so it did not hit the error that this rank hit.

    torchrun and srun end the other ranks with rank 0. A process that rank 0 started gets another parent.
    """
    rank_zero = int(os.environ.get(_RANK_ZERO_PID) or 0)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        if rank_zero and os.getppid() != rank_zero:
            return False
        time.sleep(0.1)
    return True
