"""Several processes asked for in Python: the program stays one process, wherever it came from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import frugalvit as fv
from frugalvit import api
from frugalvit.cli import subprocess_run
from frugalvit.config.train import TrainConfig
from frugalvit.errors import Interrupted
from helpers.tiny_runs import TRAIN, write_images

TWO: dict[str, Any] = TRAIN | {"steps": 2, "devices": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("apart")
    write_images(made / "images")
    (made / "two.json").write_text(json.dumps(TWO))
    (made / "elsewhere").mkdir()
    return made


def start(folder: Path, text: str, *before: str, name: str | None = "script.py") -> subprocess.Popen[str]:
    """A program of somebody's, from a file or from standard input."""
    text = "import json, os, sys\nimport frugalvit as fv\nTWO = json.load(open('two.json'))\n" + text
    if name:
        (folder / name).write_text(text)
    variables = {name: value for name, value in os.environ.items() if "RANK" not in name}
    variables |= {"OMP_NUM_THREADS": "1", "FRUGALVIT_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    program = subprocess.Popen(
        [sys.executable, *before, name or "-"],
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    if not name:
        program.stdin.write(text)
        program.stdin.close()
        program.stdin = None
    return program


def said_by(program: subprocess.Popen[str], status: int = 0) -> tuple[list[str], str]:
    said, error = program.communicate(timeout=300)
    assert program.returncode == status, said + error
    return said.splitlines(), error


def test_a_script_goes_on_once_with_what_was_trained(folder: Path) -> None:
    """Also after ``os.chdir``, and without a guard; a mistake there is the mistake that it is here."""
    text = """
print("begun")
os.chdir("elsewhere")
outcome = fv.train("../images", out="runs/two", **TWO)
print(type(fv.load(outcome["run"])).__name__, outcome["steps"], "top1" in outcome, "status" in outcome)
for devices in (1, 2):
    try:
        fv.train("../nowhere", out="runs/none", quiet=True, **TWO | {"devices": devices})
    except fv.UserError as error:
        print(error)
"""
    said, error = said_by(start(folder, text))
    assert said[:2] == ["begun", "ReadyModel 2 True False"] and len(said) == 4 and said[2] == said[3]
    assert "run folder: runs/two" in error and "frugalvit:" not in error
    facts = json.loads((folder / "elsewhere" / "runs" / "two" / "data.json").read_text())
    assert facts["processes"] == 2


@pytest.mark.slow
def test_a_program_without_a_file(folder: Path) -> None:
    """As in a notebook, whose standard error is no file of the system either."""
    text = """
import io
sys.ps1, sys.stderr = ">>> ", io.StringIO()
outcome = fv.train("images", out="typed", **TWO)
print(outcome["run"], "run folder: typed" in sys.stderr.getvalue())
"""
    assert said_by(start(folder, text, name=None))[0] == ["typed True"]


@pytest.mark.slow
def test_a_run_that_is_stopped_is_saved(folder: Path) -> None:
    """By a signal that the program alone gets, and of which the run hears once."""
    text = """
outcome = fv.train("images", out="stopped", **TWO | {"steps": 100000})
print(outcome["stopped"], outcome["exit"], "--devices 2" in outcome["resume"], "error" in outcome)
"""
    program = start(folder, text)
    until = time.monotonic() + 120
    while not (folder / "stopped" / "metrics.jsonl").exists():
        assert time.monotonic() < until and program.poll() is None, program.communicate()
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    said, error = said_by(program)
    assert said == ["SIGINT 3 True False"] and "saved; continue with" in error


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_no_run_behind(folder: Path) -> None:
    program = start(folder, 'fv.train("images", out="left", **TWO | {"steps": 100000})')
    until = time.monotonic() + 120
    while not (folder / "left" / "metrics.jsonl").exists():
        assert time.monotonic() < until and program.poll() is None, program.communicate()
        time.sleep(0.05)
    program.kill()
    _, error = said_by(program, -signal.SIGKILL)  # till the last of its processes has closed it
    assert "is gone" in error and "saved; continue with" in error


@pytest.mark.slow
def test_all_processes_of_torchrun_find_what_was_written(folder: Path) -> None:
    text = """
import time
from frugalvit.engine import commands
write = commands.save_model_folder
commands.save_model_folder = lambda *words, **more: (time.sleep(3), write(*words, **more))
if __name__ == "__main__":
    outcome = fv.train("images", out="torchrun", quiet=True, **TWO)
    sys.stdout.write(type(fv.load(outcome["run"])).__name__ + "\\n")
"""
    before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert said_by(start(folder, text, *before))[0] == ["ReadyModel", "ReadyModel"]


# -- what cannot be given to another process


def but(**more: Any) -> dict[str, Any]:
    return TWO | more


def never(*_: object) -> Any:
    raise AssertionError("no process should have been started")


def test_a_network_of_the_program_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from timm.models import _registry

    def own_patches() -> None:
        pass

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(subprocess_run, "_waited_for", never)
    monkeypatch.setitem(_registry._model_entrypoints, "own_patches", own_patches)
    with pytest.raises(fv.UserError, match=r"'own_patches' is a network of this program, .*--nproc-per-node 2 "):
        fv.run("train", str(folder / "images"), **but(backbone="own_patches"))
    with pytest.raises(fv.UserError, match="'own_patches' is a network of this program"):
        fv.run(
            "compare", str(folder / "images"), **TWO, with_settings=["backbone=own_patches"], without_settings=["lr=1"]
        )
    with pytest.raises(fv.UserError, match=r"no network is named 'own_patches'\. 'own_patches' is a .* 'torchrun"):
        subprocess_run._outcome("", {"error": "no network is named 'own_patches'.", "status": 2}, 2, 0, 2)


def test_what_is_no_plain_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(subprocess_run, "_waited_for", never)
    with pytest.raises(fv.UserError, match=r"backbone_args\.norm_layer holds a type, .* 'torchrun --nproc-per-node 2 "):
        fv.train("images", **but(backbone_args={"norm_layer": torch.nn.LayerNorm}))
    with pytest.raises(fv.UserError, match=r"on every machine start .* --nnodes"):
        fv.train("images", nodes=2, **TWO)


def test_options_arrive_as_they_were_given() -> None:
    given = {"data": Path("photos"), "img_size": (32, 16), "device": torch.device("cpu"), "lr": "auto", "batch": 8}
    given |= {"val_fraction": np.float64(0.25), "localization": {"weight": 1}, "steps": None, "seed": np.int64(3)}
    config = TrainConfig.parse(given)
    read = yaml.safe_load(subprocess_run._as_yaml(given, config, 2))
    plain = {"data": "photos", "img_size": [32, 16], "device": "cpu", "lr": "auto", "batch": 8}
    assert read == plain | {"val_fraction": 0.25, "localization": {"weight": 1}, "steps": None, "seed": 3}
    assert TrainConfig.parse(read).model_dump() == config.model_dump()


# -- the answer


@pytest.mark.parametrize(
    ("answer", "status", "pressed", "kind", "message"),
    [
        ({"error": "No such data.", "status": 2}, 2, 0, fv.UserError, "^No such data.$"),
        ({"error": "stopped; the same command goes on.", "status": 3}, 3, 1, Interrupted, None),
        ({"error": "stopped.", "status": 130}, 130, 2, KeyboardInterrupt, None),
        (None, -int(signal.SIGINT), 1, KeyboardInterrupt, None),
        (
            {"error": "ValueError: odd", "status": 1},
            1,
            0,
            RuntimeError,
            "'go', .* ended with status 1: ValueError: odd",
        ),
        (None, -int(signal.SIGTERM), 0, RuntimeError, "was ended by SIGTERM"),
        (None, 0, 0, RuntimeError, "ended with status 0"),
    ],
)
def test_failures(answer: Any, status: int, pressed: int, kind: type[BaseException], message: str | None) -> None:
    with pytest.raises(kind, match=message):
        subprocess_run._outcome("go", answer, status, pressed, 2)


def test_lines_of_others_are_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text('a library\n{"run": "runs/x"}\n[1]\nbye\n')
    assert subprocess_run._answer_in(path) == {"run": "runs/x"}


def test_processes_that_somebody_has_started_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_run, "run_in_subprocess", never)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(fv.UserError, match="There is no folder"):
        api.run("train", "nowhere", **TWO)
