"""devices > 1 from Python: the program stays one process."""

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
from frugalvit.cli import subprocess_run
from frugalvit.config.train import TrainConfig
from frugalvit.errors import Interrupted
from helpers.tiny_runs import TRAIN, write_images

TWO: dict[str, Any] = TRAIN | {"steps": 2, "devices": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("subprocess")
    write_images(folder / "images")
    (folder / "two.json").write_text(json.dumps(TWO))
    (folder / "elsewhere").mkdir()
    return folder


def start(folder: Path, text: str, *before: str, name: str | None = "script.py") -> subprocess.Popen[str]:
    """Start a user's program, from a file or from standard input."""
    text = "import json, os, sys\nimport frugalvit as fv\nTWO = json.load(open('two.json'))\n" + text
    if name:
        (folder / name).write_text(text)
    variables = {name: value for name, value in os.environ.items() if "RANK" not in name}
    variables |= {"OMP_NUM_THREADS": "1", "FRUGALVIT_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    program = subprocess.Popen([sys.executable, *before, name or "-"], cwd=folder, env=variables, text=True, **pipes)
    assert program.stdin is not None
    if not name:
        program.stdin.write(text)
        program.stdin.close()
        program.stdin = None
    return program


def finish(program: subprocess.Popen[str], status: int = 0) -> tuple[list[str], str]:
    out, err = program.communicate(timeout=300)
    assert program.returncode == status, out + err
    return out.splitlines(), err


def wait_for_metrics(program: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and program.poll() is None, program.communicate()
        time.sleep(0.05)


def test_a_script_runs_once_and_gets_the_result(folder: Path) -> None:
    """Also after ``os.chdir`` and without a guard; an error of the child is raised in the script."""
    text = """
print("started")
os.chdir("elsewhere")
result = fv.train("../images", out="runs/two", **TWO)
print(type(fv.load(result["run"])).__name__, result["steps"], "top1" in result, "status" in result)
for devices in (1, 2):
    try:
        fv.train("../nowhere", out="runs/none", quiet=True, **TWO | {"devices": devices})
    except fv.UserError as error:
        print(error)
"""
    lines, err = finish(start(folder, text))
    assert lines[0] == "started" and lines[1].endswith(" 2 True False") and len(lines) == 4 and lines[2] == lines[3]
    assert "run folder: runs/two" in err and "frugalvit:" not in err
    facts = json.loads((folder / "elsewhere" / "runs" / "two" / "data.json").read_text())
    assert facts["processes"] == 2


@pytest.mark.slow
def test_a_notebook_shows_the_messages(folder: Path) -> None:
    """A notebook has no file, and its standard error is not a file of the system."""
    text = """
import io
sys.ps1, sys.stderr = ">>> ", io.StringIO()
result = fv.train("images", out="typed", **TWO)
print(result["run"], "run folder: typed" in sys.stderr.getvalue())
"""
    assert finish(start(folder, text, name=None))[0] == ["typed True"]


@pytest.mark.slow
def test_ctrl_c_stops_and_saves_the_run(folder: Path) -> None:
    text = """
result = fv.train("images", out="stopped", **TWO | {"steps": 100000})
print(result["stopped"], result["exit"], "--devices 2" in result["resume"], "error" in result)
"""
    program = start(folder, text)
    wait_for_metrics(program, folder / "stopped")
    program.send_signal(signal.SIGINT)
    lines, err = finish(program)
    assert lines == ["SIGINT 3 True False"] and "--resume stopped" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_program_leaves_a_saved_run(folder: Path, number: signal.Signals) -> None:
    program = start(folder, f'fv.train("images", out="{number.name}", **TWO | {{"steps": 100000}})')
    wait_for_metrics(program, folder / number.name)
    program.send_signal(number)
    _, err = finish(program, -number)  # until the last of its processes has closed standard error
    assert "is gone" in err and f"--resume {number.name}" in err


@pytest.mark.slow
def test_all_ranks_of_torchrun_find_the_model(folder: Path) -> None:
    text = """
import time
from frugalvit.tasks.classification import train
write = train.save_model_folder
train.save_model_folder = lambda *arguments, **options: (time.sleep(3), write(*arguments, **options))
if __name__ == "__main__":
    result = fv.train("images", out="torchrun", quiet=True, **TWO)
    sys.stdout.write(type(fv.load(result["run"])).__name__ + "\\n")
"""
    before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines = finish(start(folder, text, *before))[0]
    assert len(lines) == 2 and lines[0] == lines[1]


# -- what a child process cannot run


def never(*_: object) -> Any:
    raise AssertionError("no process should start")


def own_patches() -> None:
    """A network that only this program has registered."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backbone": "own_patches"}, "'own_patches' .*--nproc-per-node 2"),
        ({"backbone_args": {"norm_layer": torch.nn.LayerNorm}}, "LayerNorm.*--nproc-per-node 2"),
        ({"nodes": 2}, "--nnodes"),
    ],
)
def test_options_that_need_torchrun(options: Any, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from timm.models import _registry

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(subprocess_run, "_run_child", never)
    monkeypatch.setitem(_registry._model_entrypoints, "own_patches", own_patches)
    with pytest.raises(fv.UserError, match=expected):
        fv.train(str(folder / "images"), **TWO | options)


def test_options_are_passed_unresolved() -> None:
    options = {"data": Path("photos"), "img_size": (32, 16), "device": torch.device("cpu"), "lr": "auto", "batch": 8}
    options |= {"val_fraction": np.float64(0.25), "localization": {"weight": 1}, "steps": None, "seed": np.int64(3)}
    read = yaml.safe_load(subprocess_run._to_yaml(options, 2))
    plain = {"data": "photos", "img_size": [32, 16], "device": "cpu", "lr": "auto", "batch": 8}
    assert read == plain | {"val_fraction": 0.25, "localization": {"weight": 1}, "steps": None, "seed": 3}
    assert TrainConfig.parse(read).model_dump() == TrainConfig.parse(options).model_dump()


# -- the result


@pytest.mark.parametrize(
    ("result", "status", "interrupts", "kind", "message"),
    [
        ({"error": "No such data.", "status": 2}, 2, 0, fv.UserError, "^No such data.$"),
        ({"error": "stopped; the same command continues.", "status": 3}, 3, 1, Interrupted, None),
        ({"error": "stopped.", "status": 130}, 130, 2, KeyboardInterrupt, None),
        (None, -int(signal.SIGINT), 1, KeyboardInterrupt, None),
        ({"error": "ValueError: odd", "status": 1}, 1, 0, RuntimeError, "status 1 .*: ValueError: odd"),
        (None, -int(signal.SIGTERM), 0, RuntimeError, "signal 15"),
        (None, 0, 0, RuntimeError, "status 0"),
    ],
)
def test_failures(result: Any, status: int, interrupts: int, kind: type[BaseException], message: str | None) -> None:
    with pytest.raises(kind, match=message):
        subprocess_run._check_result("go", result, status, interrupts)


def test_lines_of_other_libraries_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "output.json"
    path.write_text('a library\n{"run": "runs/x"}\n[1]\nbye\n')
    assert subprocess_run._read_result(path) == {"run": "runs/x"}


def test_a_launched_rank_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_run, "run_in_subprocess", never)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(fv.UserError, match="nowhere"):
        fv.run("train", "nowhere", **TWO)
