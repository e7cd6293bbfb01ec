"""Which of several processes this is, by what torchrun and SLURM leave in the environment, and who of them speaks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lightning_fabric.plugins.environments import SLURMEnvironment
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.utils import launch_env
from frugalvit.utils.launch_env import devices_and_nodes

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
# What sbatch gives to the batch script; PROCID and NODEID are there too, as if it were a task.
JOB = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
SCRIPT = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# What srun adds for its tasks.
STEP = SCRIPT | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test leaves in the environment ends with it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    kept = {name: value for name, value in kept.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    monkeypatch.setattr(os, "environ", kept)


@pytest.mark.parametrize(
    ("variables", "asked", "expected"),
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
def test_places(variables: dict[str, str], asked: tuple[int, int], expected: tuple[int, int]) -> None:
    os.environ.update(variables)
    assert devices_and_nodes(*asked) == expected
    assert devices_and_nodes(*asked) == expected, "asked again"


def test_a_shell_in_a_step_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """``srun --ntasks 8 --pty bash``: what is typed there is no task, for all that its environment says."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    os.environ.update(STEP | {"SLURM_JOB_NAME": "bash"})
    assert devices_and_nodes(1, 1) == (1, 1)


@pytest.mark.parametrize("given", [{}, {"SLURM_NTASKS_PER_NODE": "8"}])
def test_lightning_is_told_of_the_step(given: dict[str, str]) -> None:
    """It reads what was asked of the job: nothing where that was --ntasks alone, more where srun was asked for less."""
    os.environ.update(STEP | given)
    here, machines = devices_and_nodes(1, 1)
    assert SLURMEnvironment.detect()
    environment = SLURMEnvironment()
    environment.validate_settings(here, machines)
    assert environment.world_size() == 8


def test_without_srun_nobody_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(SCRIPT)
    devices_and_nodes(1, 1), devices_and_nodes(1, 1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "this job has 8 tasks but was not started by srun" in said
    assert not SLURMEnvironment.detect()


@pytest.mark.parametrize(
    ("variables", "asked", "expected"),
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "7"}, (1, 1), "7 processes on 2 machines, not as many on each"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, (1, 1), "--ntasks-per-node=4"),
        (STEP, (8, 2), "srun has already started 8 processes on 2 machines: leave both options out"),
        (TORCHRUN, (2, 2), "torchrun has already started 16 processes"),
    ],
)
def test_what_cannot_be_shared_is_said(variables: dict[str, str], asked: tuple[int, int], expected: str) -> None:
    os.environ.update(variables)
    with pytest.raises(UserError, match=expected):
        devices_and_nodes(*asked)


def test_as_many_tasks_on_each_machine() -> None:
    os.environ.update(STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert devices_and_nodes(1, 1) == (4, 2)


# -- who works, and who speaks


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_what_one_process_does_is_done_once(launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / label / "0.png")
    answers = []
    for rank in ("1", "0"):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        os.environ.update((TORCHRUN if launcher == "torchrun" else STEP) | ranks)
        assert cli.main(["data", str(tmp_path), "--json", "--quiet"]) == 0
        answers.append(capsys.readouterr())
    assert answers[0] == ("", "") and json.loads(answers[1].out)["images"] == 2
    assert f"'frugalvit data' uses one process: the other {15 if launcher == 'torchrun' else 7} leave" in answers[1].err
    assert launch_env.launch_info() is None, "nothing that it calls may wait for the others"


@pytest.mark.parametrize("words", [["trian"], ["train", "photos", "--epoch", "3"], ["train", "photos", "--init", "no"]])
def test_a_mistake_of_all_is_said_once(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_env, "first_goes_on", lambda: False)
    said = []
    for rank in ("0", "1"):
        os.environ.update(TORCHRUN | {"RANK": rank, "LOCAL_RANK": rank})
        assert cli.main([*words, "--json"]) == 2
        said.append(capsys.readouterr())
    assert said[0].err.startswith("frugalvit: ") and json.loads(said[0].out)["status"] == 2
    assert said[1] == ("", "")


def test_a_mistake_of_one_alone_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that only one machine lacks: the first process goes on, and would wait for ever."""
    monkeypatch.setattr(launch_env, "_PATIENCE", 0.0)
    os.environ.update(TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"})
    assert cli.main(["train", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("frugalvit: process 1: There is no folder")


def test_the_second_knows_that_it_is_when_the_first_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first meets the same mistake a moment before and is gone: then the second has another parent."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("FRUGALVIT_FIRST_PROCESS", str(os.getppid()))

    def fail() -> None:
        monkeypatch.setenv("FRUGALVIT_FIRST_PROCESS", "1000000000")
        raise UserError("wrong")

    with pytest.raises(launch_env.MetByAll, match="wrong"), launch_env.said_once():
        fail()


@pytest.mark.parametrize("kind", [launch_env.SaidByTheFirst, launch_env.PeerLost])
def test_what_is_said_already_or_by_whoever_is_left_stays_so(kind: type[UserError]) -> None:
    os.environ.update(TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"})
    with pytest.raises(UserError) as caught, launch_env.said_once():
        raise kind("gone")
    assert type(caught.value) is kind


def test_those_who_are_left_behind_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_FIRST_PROCESS", "1000000000")
    assert not launch_env.first_goes_on()


def test_a_rank_that_was_left_in_the_environment_silences_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert cli.main(["trian"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err
