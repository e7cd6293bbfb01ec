"""What this process may take of its machine: cores and memory, as containers, SLURM and its neighbours leave them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from frugalvit.utils import launch_env

_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""What control groups of version 2 and of version 1 call the limit, what is used, and what of that can be dropped."""


def processes_here() -> int:
    """Processes of this run on this machine: LOCAL_WORLD_SIZE is set by torchrun and by ``training.processes``."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def cores(root: Path = Path("/")) -> int:
    """Cores for this process, one at least: its share of those that it and the others here may use."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    here = processes_here()
    limits = [allowed if _are_its_own(allowed) else allowed // here]
    limits += [math.ceil(limit / here) for group in _groups("cpu", root) for limit in _quotas(group)]
    return max(1, min(limits))


def _are_its_own(count: int) -> bool:
    """Whether so many cores are for one task of several: srun binds each to a part of the cores that its step has."""
    found = launch_env.launch_info()
    return found is not None and found.launcher == "srun" and count < int(os.environ.get("SLURM_CPUS_ON_NODE") or 0)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM a program may still take, limits of containers and jobs included."""
    limits = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        limits.append(int(facts["MemAvailable"].split()[0]) * 1024)
    limits += [left for group in _groups("memory", root) for left in _memory_left(group)]
    return max(0, min(limits)) if limits else 8 << 30  # elsewhere: what any machine that trains has


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The control group of this process and those around it, any of which may be limited; not all need be there.

    A container sees its own group as the outermost, whatever path the machine has for it.
    """
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")  # version 2 has one tree for everything
        inside = PurePosixPath(path.lstrip("/"))
        yield from (top / place for place in (inside, *inside.parents))


def _memory_left(group: Path) -> list[int]:
    left = []
    for limit, used, droppable in _MEMORY:
        with contextlib.suppress(OSError, ValueError):  # of the other version, or unlimited: "max"
            most, taken = int((group / limit).read_text()), int((group / used).read_text())
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left.append(most - taken + int(facts.get(droppable, 0)))  # pages of files make room when it is needed
    return left


def _quotas(group: Path) -> list[float]:
    """Cores' worth of time that a group gets, as ``docker --cpus`` sets it."""
    shares = []
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        shares.append(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:  # -1: as much as there is
            shares.append(int(quota) / int(period))
    return shares
