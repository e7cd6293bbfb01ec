"""Cores and memory within affinity, control groups, SLURM and other ranks."""

import os
from pathlib import Path

import pytest

from frugalvit.utils import system
from frugalvit.utils.system import available_memory, cores

GIB = 2**30


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "LOCAL_WORLD_SIZE"))]:
        monkeypatch.delenv(name)


def allow(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)  # of a machine on which a job has some
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


# -- cores


@pytest.mark.parametrize(("allowed", "processes", "each"), [(96, None, 96), (96, 8, 12), (12, 1, 12), (4, 8, 1)])
def test_ranks_share_the_cores(allowed: int, processes: int | None, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, allowed)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert cores() == each


@pytest.mark.parametrize(("allowed", "each"), [(12, 12), (96, 12)])
def test_srun_binds_cores_to_a_task(allowed: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tasks with 96 cores: each bound to twelve of them, or all to all."""
    allow(monkeypatch, allowed)
    facts = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 3, "SLURM_LOCALID": 3, "SLURM_STEP_NUM_TASKS": 8}
    facts |= {"SLURM_JOB_NAME": "train", "SLURM_CPUS_ON_NODE": 96, "LOCAL_WORLD_SIZE": 8}
    for name, value in facts.items():
        monkeypatch.setenv(name, str(value))
    assert cores() == each


def test_quota_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("joblib.externals.loky.backend.context._cpu_count_cgroup", lambda _: 6)
    assert cores() == 3


# -- memory

V2 = {
    "proc/meminfo": f"MemTotal: {100 * GIB // 1024} kB\nMemAvailable: {64 * GIB // 1024} kB",
    "proc/self/cgroup": "0::/system.slice/job_7/step_0",
}
JOB = "sys/fs/cgroup/system.slice/job_7"
V1 = {
    "proc/meminfo": V2["proc/meminfo"],
    "proc/self/cgroup": "11:cpuset:/slurm/job_7\n4:memory:/slurm/job_7/step_0\n0::/",
}


def group(folder: str, limit: object, used: int, files: int) -> dict[str, object]:
    facts = {"max": limit, "current": used, "stat": f"anon 5\ninactive_file {files}"}
    return {f"{folder}/memory.{name}": value for name, value in facts.items()}


def old_group(folder: str, limit: int, used: int, files: int) -> dict[str, object]:
    stat = f"inactive_file 1\ntotal_inactive_file {files}"  # of the group alone, and of all inside it
    facts = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"{folder}/memory.{name}": value for name, value in facts.items()}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (V2, 64),  # nothing is limited
        (V2 | group(f"{JOB}/step_0", "max", 5 * GIB, 0) | group(JOB, 32 * GIB, 8 * GIB, 2 * GIB), 26),  # the job is
        (V2 | group(f"{JOB}/step_0", 16 * GIB, GIB, 0) | group(JOB, 32 * GIB, 2 * GIB, 0), 15),
        (V2 | group("sys/fs/cgroup", 20 * GIB, 4 * GIB, GIB), 17),  # a container that sees only itself
        (V2 | group(JOB, GIB, 2 * GIB, 0), 0),
        (V1 | old_group("sys/fs/cgroup/memory/slurm/job_7", 32 * GIB, 8 * GIB, 2 * GIB), 26),
        (V1 | old_group("sys/fs/cgroup/memory", 9223372036854771712, 8 * GIB, 0), 64),  # what unlimited is there
    ],
)
def test_memory_limit_of_the_job(files: dict[str, object], left: int, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert available_memory(tmp_path) == left * GIB


def test_systems_without_control_groups(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 8 * GIB and list(system._groups(tmp_path)) == []
