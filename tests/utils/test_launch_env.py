"""Rank and world size from the environment of torchrun and SLURM, and which rank prints."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from lightning_fabric.plugins.environments import SLURMEnvironment
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.errors import LostRankError, UserError
from frugalvit.utils import console, launch_env
from frugalvit.utils.launch_env import devices_and_nodes

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
# The batch script of sbatch; it has PROCID and NODEID as if it were a task.
JOB = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
SCRIPT = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# A task of srun.
STEP = SCRIPT | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    clean = {name: value for name, value in clean.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    monkeypatch.setattr(os, "environ", clean)


@pytest.mark.parametrize(
    ("variables", "requested", "expected"),
    [
        ({}, (1, 1), (1, 1)),
        ({}, (4, 2), (4, 2)),
        (TORCHRUN, (1, 1), (8, 2)),
        (TORCHRUN, (8, 2), (8, 2)),
        (STEP, (1, 1), (4, 2)),
        (STEP, (4, 2), (4, 2)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}, (1, 1), (2, 1)),
        (STEP | {"SLURM_JOB_NAME": "interactive"}, (1, 1), (4, 2)),  # srun from a shell of salloc
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "1"}, (2, 1), (2, 1)),
        (SCRIPT, (1, 1), (1, 1)),
        (SCRIPT, (2, 1), (2, 1)),
        (SCRIPT | {"SLURM_STEP_ID": "batch"}, (1, 1), (1, 1)),
        (SCRIPT | {"SLURM_STEP_ID": "4294967291"}, (1, 1), (1, 1)),  # the batch script
        (SCRIPT | {"SLURM_STEP_ID": "4294967290"}, (1, 1), (1, 1)),  # a shell of salloc
        (JOB | {"SLURM_JOB_NAME": "bash"}, (1, 1), (1, 1)),
    ],
)
def test_devices_and_nodes(variables: dict[str, str], requested: tuple[int, int], expected: tuple[int, int]) -> None:
    os.environ.update(variables)
    assert devices_and_nodes(*requested) == expected
    assert devices_and_nodes(*requested) == expected, "the second call changes nothing"


@pytest.mark.parametrize("variables", [{}, {"SLURM_NTASKS_PER_NODE": "8"}])
def test_fabric_sees_the_srun_step(variables: dict[str, str]) -> None:
    os.environ.update(STEP | variables)
    per_node, machines = devices_and_nodes(1, 1)
    assert SLURMEnvironment.detect()
    environment = SLURMEnvironment()
    environment.validate_settings(per_node, machines)
    assert environment.world_size() == 8


def test_job_without_srun_is_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(SCRIPT)
    devices_and_nodes(1, 1), devices_and_nodes(1, 1)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "8 tasks" in err and "srun frugalvit" in err
    assert not SLURMEnvironment.detect()


@pytest.mark.parametrize(
    ("variables", "requested", "expected"),
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "7"}, (1, 1), "7 processes unevenly on 2 machines"),
        (STEP, (8, 2), "--devices 8 --nodes 2 does not match srun"),
        (TORCHRUN, (2, 2), "--devices 2 --nodes 2 does not match torchrun"),
    ],
)
def test_impossible_layouts(variables: dict[str, str], requested: tuple[int, int], expected: str) -> None:
    os.environ.update(variables)
    with pytest.raises(UserError, match=expected):
        devices_and_nodes(*requested)


# -- which rank works, and which prints


def set_rank(rank: int, launcher: dict[str, str] = TORCHRUN) -> None:
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")
    os.environ.update(launcher | dict.fromkeys(names, str(rank)))


@pytest.mark.parametrize(("launcher", "others"), [(TORCHRUN, 15), (STEP, 7)], ids=["torchrun", "srun"])
def test_command_for_one_process_runs_on_rank_0(
    launcher: dict[str, str], others: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / label / "0.png")
    outputs = []
    for rank in (1, 0):
        set_rank(rank, launcher)
        assert cli.main(["data", str(tmp_path), "--json", "--quiet"]) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0] == ("", "") and json.loads(outputs[1].out)["images"] == 2
    assert f"'frugalvit data' uses one process; the other {others}" in outputs[1].err
    assert launch_env.launch_info() is None, "nothing may wait for the other ranks"


@pytest.mark.parametrize("words", [["trian"], ["train", "photos", "--epoch", "3"], ["train", "photos", "--init", "no"]])
def test_an_error_of_all_ranks_is_printed_once(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_env, "is_rank_zero_alive", lambda: False)
    outputs = []
    for rank in (0, 1):
        set_rank(rank)
        assert cli.main([*words, "--json"]) == 2
        outputs.append(capsys.readouterr())
    assert outputs[0].err.startswith("frugalvit: ") and json.loads(outputs[0].out)["status"] == 2
    assert outputs[1] == ("", "")


def test_an_error_of_one_rank_is_printed_with_its_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that one machine lacks: rank 0 continues and would wait forever."""
    monkeypatch.setattr(launch_env, "is_rank_zero_alive", lambda: True)
    set_rank(1)
    assert cli.main(["train", "nowhere", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("frugalvit: rank 1: ") and "nowhere" in err


def test_every_rank_prints_a_lost_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_: list[str]) -> int:
        raise LostRankError("Another process of this run has ended")

    monkeypatch.setattr(launch_env, "is_rank_zero_alive", lambda: False)
    monkeypatch.setattr(cli, "_run", lose)
    set_rank(1)
    assert cli.main(["train", "photos"]) == 2
    assert capsys.readouterr().err.startswith("frugalvit: rank 1: Another process")


def test_a_child_knows_when_rank_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_RANK_ZERO_PID", "1000000000")
    assert not launch_env.is_rank_zero_alive()
    monkeypatch.setenv("FRUGALVIT_RANK_ZERO_PID", str(os.getppid()))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch_env.is_rank_zero_alive(after=0.0) and launch_env.rank() == 1


def test_a_rank_without_a_launcher_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert cli.main(["trian"]) == 2
    assert console.get_rank() == 0 and "Did you mean 'train'" in capsys.readouterr().err
