"""Cores and memory that this process may use, within the limits of containers, SLURM and other ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import joblib

from frugalvit.utils import launch_env

_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of control groups (version 2, version 1): the limit, the usage, and the part of it that can be freed."""


def processes_here() -> int:
    """Return the number of processes of this run here. torchrun and ``engine.distributed`` set LOCAL_WORLD_SIZE."""
    return max(1, launch_env.env_number("LOCAL_WORLD_SIZE", 1))


def cores() -> int:
    """Return the cores of this process: its share of those that the run may use here, at least one."""
    allowed = joblib.cpu_count()  # within affinity and a container's quota
    return allowed if _is_bound_by_srun(allowed) else max(1, allowed // processes_here())


def cap_workers(workers: int | Literal["auto"], tasks: int) -> int:
    """Return how many workers decode ``tasks`` images: "auto" is one a core; never more than four a core."""
    return min(cores() if workers == "auto" else workers, 4 * cores(), tasks)


def _is_bound_by_srun(cores: int) -> bool:
    """True if srun has bound this task to a part of the node's cores."""
    launch = launch_env.launch_info()
    return launch is not None and launch.launcher == "srun" and cores < launch_env.env_number("SLURM_CPUS_ON_NODE")


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that are free, within the limits of containers and jobs."""
    limits = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        limits.append(int(facts["MemAvailable"].split()[0]) * 1024)
    limits += [left for group in _groups(root) for left in _memory_left(group)]
    return max(0, min(limits)) if limits else 8 << 30  # other systems: a safe guess


def _groups(root: Path) -> Iterator[Path]:
    """Yield the control group of this process for memory, and its parents; some may not exist.

    Inside a container the container's own group is the outermost.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")  # version 2 has one tree for all controllers
        group = PurePosixPath(path.lstrip("/"))
        yield from (top / part for part in (group, *group.parents))


def _memory_left(group: Path) -> list[int]:
    left = []
    for limit_file, usage_file, freeable in _MEMORY:
        with contextlib.suppress(OSError, ValueError):  # the other version, or unlimited: "max"
            limit, usage = int((group / limit_file).read_text()), int((group / usage_file).read_text())
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left.append(limit - usage + int(facts.get(freeable, 0)))  # cached pages of files are freed when needed
    return left
