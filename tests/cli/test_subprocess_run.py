"""devices > 1 from Python: the program stays one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import frugalvit as fv
from frugalvit.cli import subprocess_run
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
    """Also after ``os.chdir`` and without a guard."""
    text = """
print("started")
os.chdir("elsewhere")
result = fv.train("../images", out="runs/two", **TWO)
print(type(fv.load(result["run"])).__name__, result["steps"], "top1" in result, "status" in result)
"""
    lines, err = finish(start(folder, text))
    assert lines[0] == "started" and lines[1].endswith(" 2 True False") and len(lines) == 2
    assert "run folder: runs/two" in err
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-c", """print('{"error": "No folder x", "status": 2}'); exit(2)"""], (fv.UserError, "^No folder x$")),
        # Nothing is saved, so there is no result: Ctrl-C is Ctrl-C.
        (["-c", """print('{"error": "stopped.", "status": 130}'); exit(130)"""], (KeyboardInterrupt, "")),
        (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], (RuntimeError, "status -9")),
    ],
    ids=["mistake", "Ctrl-C", "killed"],
)
def test_an_error_of_the_child_is_raised(
    words: list[str], expected: tuple[type[BaseException], str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    run_child = subprocess_run._run_child
    monkeypatch.setattr(subprocess_run, "_run_child", lambda command, out: run_child([command[0], *words], out))
    with pytest.raises(expected[0], match=expected[1] or None):
        fv.train(str(folder / "images"), **TWO)


def test_several_machines_need_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(fv.UserError, match="torchrun"):
        fv.train(str(folder / "images"), **TWO | {"nodes": 2})


def test_a_launched_rank_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_run, "run_in_subprocess", None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(fv.UserError, match="nowhere"):
        fv.run("train", "nowhere", **TWO)
