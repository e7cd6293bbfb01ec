"""Who has started this process, and which of several it is: torchrun, SLURM, a run of ours, or nobody.

Only the environment is asked, so that a command which has nothing to do leaves before it loads anything.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


class SaidByTheFirst(UserError):
    """A mistake that the first process has met: it says it for the others."""


class MetByAll(SaidByTheFirst):
    """A mistake that the first process, of all or of this machine, meets too, as far as another can know."""


class PeerLost(UserError):
    """What is said of another process that has gone: it may have been the first, so everyone who is left says it."""


def launch_info() -> LaunchInfo | None:
    """What torchrun or srun has started this process as, among others; None for a process of its own."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" in variables:
        processes, here = (int(variables[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        ranks = (int(variables.get(name) or 0) for name in ("RANK", "LOCAL_RANK"))
        return LaunchInfo("torchrun", processes, processes // here, *ranks) if processes > 1 else None
    processes = _tasks_of_step()
    if processes == 1:
        return None
    machines = int(variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or 1)
    return LaunchInfo("srun", processes, machines, *(int(variables.get(name) or 0) for name in _SLURM_RANKS))


_SLURM_RANKS = ("SLURM_PROCID", "SLURM_LOCALID")
_SHELLS = ("bash", "interactive")  # what SLURM calls a job that somebody sits at
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on SLURM's numbers mean no srun: the batch script, salloc's shell …


def _tasks_of_step() -> int:
    """How many tasks srun has started, this process being one of them; 1 where it is not.

    SLURM_NTASKS tells nothing of it: every process of a job has that, the batch script itself too, which is alone.
    """
    variables = os.environ
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS or "SLURM_PROCID" not in variables:
        return 1
    if variables.get("SLURM_JOB_NAME") in _SHELLS and sys.stdin is not None and sys.stdin.isatty():
        return 1  # a command typed into the shell of 'srun --pty bash'
    return int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or 1)


def devices_and_nodes(devices: int, nodes: int) -> tuple[int, int]:
    """Processes per machine and machines: as asked for, or as torchrun and SLURM have already started them."""
    found, asked = launch_info(), devices * nodes
    if found is None:
        _hide_slurm(say=asked == 1)
        return devices, nodes
    here = _equal_share(found)
    if asked > 1 and (devices, nodes) != (here, found.machines):
        raise UserError(
            f"--devices {devices} --nodes {nodes} was asked for, but {found.launcher} has already started "
            f"{found.processes} processes on {pluralize(found.machines, 'machine')}: leave both options out."
        )
    if found.launcher == "srun":
        _show_slurm(found, here)
    return here, found.machines


def _equal_share(found: LaunchInfo) -> int:
    """Processes on each machine."""
    counts = set(re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")))  # as "4(x2),3"
    uneven = found.launcher == "srun" and len(counts) > 1
    if found.processes % found.machines or uneven:
        least = max(1, found.processes // found.machines)
        raise UserError(
            f"{found.launcher} has started {found.processes} processes on {pluralize(found.machines, 'machine')}, not as "
            f"many on each. Ask for the same number, for instance with --ntasks-per-node={least}."
        )
    return found.processes // found.machines


def _show_slurm(found: LaunchInfo, here: int) -> None:
    """Tell Lightning of the step that this process is part of: it reads what was asked of the whole job, and stops at
    jobs that asked for --ntasks alone."""
    counts = {"SLURM_NTASKS": found.processes, "SLURM_NNODES": found.machines, "SLURM_NTASKS_PER_NODE": here}
    os.environ.update({name: str(count) for name, count in counts.items()})
    if os.environ.get("SLURM_JOB_NAME") in _SHELLS:  # srun from a shell of salloc: Lightning would not count its tasks
        os.environ["SLURM_JOB_NAME"] = "frugalvit"


def _hide_slurm(*, say: bool) -> None:
    """Without srun, SLURM has started no other process, and Lightning must not wait for one."""
    tasks = int(os.environ.pop("SLURM_NTASKS", None) or 1)
    if tasks > 1 and say:
        console.warning(
            f"this job has {tasks} tasks but was not started by srun: one process does all the work. "
            "'srun frugalvit …' uses them all"
        )


_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")


def needs_launch() -> bool:
    """Whether a run of several processes has to start them: nobody has started this one as one of several.

    Lightning takes LOCAL_RANK, whoever has set it, for a launcher's word, and knows those of MPI and LSF.
    """
    others = any((os.environ.get(name) or "1") != "1" for name in _SIZES)
    return launch_info() is None and "LOCAL_RANK" not in os.environ and not others


def clear_launch_env() -> None:
    """Let this process work as if the others were not there: its command has no use for them."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    for name in ("SLURM_STEP_ID", "SLURM_NTASKS"):
        os.environ.pop(name, None)


# -- who speaks

_FIRST = "FRUGALVIT_FIRST_PROCESS"


def mark_first() -> None:
    """Let the processes that this one is about to start know who speaks for them."""
    if local_rank() == 0:
        os.environ[_FIRST] = str(os.getpid())


def local_rank() -> int:
    """Which process of this machine this is. A number that somebody left in the environment is no rank."""
    found = launch_info()
    if found is not None:
        return found.local_rank
    return int(os.environ.get("LOCAL_RANK") or 0) if os.environ.get(_FIRST) == str(os.getppid()) else 0


def rank() -> int:
    """Which of all processes this is."""
    found = launch_info()
    return local_rank() if found is None else found.rank


def is_rank_zero() -> bool:
    """Whether this process answers for all that were started."""
    return rank() == 0


_PATIENCE = 5.0  # seconds


def first_goes_on() -> bool:
    """Whether the first process is still there after a while: then it has not met the mistake that this one has.

    torchrun and srun end the others of a process that has failed; of one that this program started the number is known.
    """
    first = int(os.environ.get(_FIRST) or 0)
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if first and os.getppid() != first:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def said_once() -> Iterator[None]:
    """A mistake inside is met by every process of a machine, since they see the same words and files: one says it."""
    speaks_here = local_rank() == 0  # asked now: when the first process has left, nobody's parent tells it any more
    try:
        yield
    except (SaidByTheFirst, PeerLost):
        raise
    except UserError as error:
        if not speaks_here:
            raise MetByAll(str(error)) from None
        raise
