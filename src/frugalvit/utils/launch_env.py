"""Rank and world size from the environment: torchrun, srun, or a run that starts its own processes.

Nothing here imports torch, so that a command that is not needed on a rank ends at once.
"""

import os
import time
from typing import NamedTuple

from frugalvit.errors import UserError
from frugalvit.utils import console

_LAST_STEP = 0xFFFFFFF0  # larger step numbers are not srun: the batch script, a shell of salloc …
_RANK_ZERO_PID = "FRUGALVIT_RANK_ZERO_PID"


def env_number(name: str, default: int = 0) -> int:
    """Return the number in an environment variable; ``default`` if it is unset or empty."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise UserError(f"The environment variable {name} is {text!r:.40}, not a number. Unset or correct it.")
    return int(text)


class LaunchInfo(NamedTuple):
    """The launcher of this process, its number of processes and machines, and this rank."""

    launcher: str
    processes: int
    machines: int
    rank: int


def launch_info() -> LaunchInfo | None:
    """Return how torchrun or srun started this process; None for a single process."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        processes, per_node = (max(1, env_number(name)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        info = LaunchInfo("torchrun", processes, processes // per_node or 1, env_number("RANK"))
        return info if processes > 1 else None
    # SLURM_NTASKS alone says nothing: the batch script has it too, and is one process.
    step = variables.get("SLURM_STEP_ID", "")
    is_number = step.isdecimal() and len(step) <= len(str(_LAST_STEP))
    if not is_number or int(step) >= _LAST_STEP or "SLURM_PROCID" not in variables:
        return None
    processes = env_number("SLURM_STEP_NUM_TASKS") or env_number("SLURM_NTASKS", 1)
    machines = env_number("SLURM_STEP_NUM_NODES") or max(1, env_number("SLURM_NNODES", 1))
    return LaunchInfo("srun", processes, machines, env_number("SLURM_PROCID")) if processes > 1 else None


def devices_and_nodes(devices: int, nodes: int) -> tuple[int, int]:
    """Return processes per machine and machines: the options, or what torchrun or srun has started."""
    launch, requested = launch_info(), devices * nodes
    if launch is None:
        # Without srun there is one process, and Fabric would wait for the others.
        tasks = env_number("SLURM_NTASKS", 1)
        os.environ.pop("SLURM_NTASKS", None)
        if tasks > 1 and requested == 1:
            console.warning(f"this job has {tasks} tasks, but only one process runs; start it with 'srun frugalvit …'")
        return devices, nodes
    launcher, processes, machines, _ = launch
    if processes % machines:
        raise UserError(
            f"{launcher} has started {processes} processes unevenly on {machines} machines. Start equally many on "
            f"each, e.g. with --ntasks-per-node={max(1, processes // machines)}."
        )
    per_node = processes // machines
    if requested > 1 and (devices, nodes) != (per_node, machines):
        raise UserError(
            f"--devices {devices} --nodes {nodes} does not match {launcher}, which has started "
            f"{per_node} processes on each of {machines} machines. Drop both options."
        )
    if launcher == "srun":
        # Fabric reads the variables of the job: set them to those of the step. It ignores jobs named "interactive".
        step = {"SLURM_NTASKS": processes, "SLURM_NNODES": machines, "SLURM_NTASKS_PER_NODE": per_node}
        os.environ.update({name: str(count) for name, count in step.items()} | {"SLURM_JOB_NAME": "frugalvit"})
    return per_node, machines


def needs_launch() -> bool:
    """True if a run has to start its other processes itself. Fabric takes LOCAL_RANK as the sign of a launcher."""
    return launch_info() is None and "LOCAL_RANK" not in os.environ


def clear_launch_env() -> None:
    """Make this a single process, for a command that does not use the others."""
    torchrun = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in (*torchrun, "SLURM_STEP_ID", "SLURM_NTASKS"):
        os.environ.pop(name, None)


def mark_rank_zero() -> None:
    """Mark this process as rank 0 for the processes that it starts."""
    if rank() == 0:
        os.environ[_RANK_ZERO_PID] = str(os.getpid())


def rank() -> int:
    """Return the rank of this process. A LOCAL_RANK that no launcher has set does not count."""
    launch = launch_info()
    if launch is not None:
        return launch.rank
    return env_number("LOCAL_RANK") if os.environ.get(_RANK_ZERO_PID) == str(os.getppid()) else 0


def is_rank_zero_alive(after: float = 5.0) -> bool:
    """True if rank 0 still runs after some seconds: then only this rank has the error.

    torchrun and srun end the other ranks with rank 0. A process that rank 0 started gets another parent.
    """
    rank_zero = env_number(_RANK_ZERO_PID)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        if rank_zero and os.getppid() != rank_zero:
            return False
        time.sleep(0.1)
    return True
