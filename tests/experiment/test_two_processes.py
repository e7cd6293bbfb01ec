"""Two ranks with half the batch equal one rank; a lost rank ends the run with one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from helpers.fork_server import ForkServer
from helpers.processes import finish, free_port, start, torchrun_variables
from helpers.tiny_runs import DISTIL, PRETRAIN, SWIN, TRAIN, read_metrics, write_config, write_images

COLLAPSE = """
import torch
from frugalvit.tasks.classification.task import ClassificationTask

after_step = ClassificationTask.after_step

def collapse(self, step, skipped=None):
    after_step(self, step, skipped)
    if step == 60:
        with torch.no_grad():
            for parameter in self.backbone.parameters():
                parameter.zero_()

ClassificationTask.after_step = collapse
"""

# Each rank draws stochastic depth for its own images: equal in distribution, not in numbers.
NO_DROP_PATH: dict[str, Any] = {"drop_path": 0.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    folder = tmp_path_factory.mktemp("distributed")
    # 26 training images make an uneven end of every epoch, 11 validation images an uneven last batch.
    write_images(folder / "images", train=13, val=11)
    write_config(folder / "train.yaml", TRAIN, **NO_DROP_PATH)
    write_config(folder / "muon.yaml", TRAIN, optimizer={"muon": True}, **NO_DROP_PATH)
    localization = {"weight": 0.1, "hidden": 8, "pairs": 4}
    write_config(folder / "pretrain.yaml", PRETRAIN, localization=localization, **NO_DROP_PATH)
    sinkhorn = PRETRAIN["matching"] | {"centering": "sinkhorn", "koleo": 0.1, "chunked": True}  # type: ignore[operator]
    write_config(folder / "sinkhorn.yaml", PRETRAIN, **NO_DROP_PATH | {"matching": sinkhorn})
    write_config(folder / "distil.yaml", DISTIL, **NO_DROP_PATH)
    write_config(folder / "instances.yaml", DISTIL, method="instances", **NO_DROP_PATH)
    save_model_folder(create_backbone("swin_nano", img_size=16, num_classes=0, **SWIN), folder / "teacher")
    return ForkServer(folder)


def slurm_variables(world: int) -> list[dict[str, str]]:
    """Return what srun sets for each task of a job with --ntasks on one node."""
    common = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(world), "SLURM_NNODES": "1"}
    common |= {"SLURM_STEP_NUM_TASKS": str(world), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0"}
    common |= {"SLURM_NODELIST": "localhost", "SLURM_NODEID": "0", "SRUN_DEBUG": "3"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(world)]


def assert_same_run(one: Path, other: Path) -> None:
    """Losses, scores, weights, optimizer and centres of two runs agree to rounding."""
    first, second = read_metrics(one), read_metrics(other)
    assert [line.keys() for line in first] == [line.keys() for line in second]
    # Each rank computes these health metrics on its own images.
    within = ("prototypes_used", "dominant", "match_entropy")
    for a, b in zip(first, second, strict=True):
        names = [name for name in a if not name.removeprefix("region_").startswith(within)]
        texts = ("split", "reason")
        assert [a[name] for name in names if name not in texts] == pytest.approx(
            [b[name] for name in names if name not in texts], rel=2e-4, abs=2e-5
        )
    states = [torch.load(run / "checkpoints" / "last.pt", weights_only=True) for run in (one, other)]
    moments = [state["optimizer"]["state"] for state in states]
    torch.testing.assert_close(states[0]["task"], states[1]["task"], rtol=2e-3, atol=5e-5)
    torch.testing.assert_close(moments[0], moments[1], rtol=2e-3, atol=5e-5)


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("train", "train"),
        ("train", "muon"),
        *(("pretrain", name) for name in ("pretrain", "sinkhorn", "instances")),
        ("distil teacher", "distil"),
    ],
)
def test_two_ranks_equal_one(server: ForkServer, verb: str, name: str) -> None:
    words = [*verb.split(), "images", "--config", f"{name}.yaml", "--json"]
    status, output = server.run(*words, "--out", f"{name}_1")
    assert status == 0, output
    output = finish(start(server, torchrun_variables(2), *words, "--out", f"{name}_2"))
    assert sum(line.startswith("{") for text in output for line in text.splitlines()) == 1, "one answer, not two"
    assert_same_run(server.folder / f"{name}_1", server.folder / f"{name}_2")
    summaries = [json.loads((server.folder / f"{name}_{n}" / "summary.json").read_text()) for n in (1, 2)]
    assert summaries[0].get("floor") == summaries[1].get("floor")


def test_two_ranks_are_rescued_alike(server: ForkServer) -> None:
    """A plug-in makes all weights zero after step 60; both ranks go back to the same weights at the same step."""
    (server.folder / "collapse.py").write_text(COLLAPSE, encoding="utf-8")
    more = "--steps 110 --lr 0.003 --localization.weight 0 --evaluate-every 60 --save-every 20"
    words = ["train", "images", "--config", "train.yaml", "--plugin", "collapse.py", *more.split()]
    status, output = server.run(*words, "--out", "rescued_1")
    assert status == 0 and output.count("rescue at step") == 1, output
    finish(start(server, torchrun_variables(2), *words, "--out", "rescued_2"))
    assert_same_run(server.folder / "rescued_1", server.folder / "rescued_2")
    assert [line["step"] for line in read_metrics(server.folder / "rescued_2") if line["split"] == "rescue"]


def test_under_slurm(server: ForkServer) -> None:
    words = ["train", "images", "--config", "train.yaml", "--steps", "2", "--out", "slurm"]
    output = finish(start(server, slurm_variables(2), *words))
    assert (server.folder / "slurm" / "summary.json").exists()
    assert "waiting for 2 processes at 127.0.0.1:" in output[0] and "waiting for" not in output[1]


def test_slurm_without_srun_is_one_process(server: ForkServer) -> None:
    """Its environment has the number of tasks, but no other task will start."""
    own = slurm_variables(2)[0]
    own = {name: value for name, value in own.items() if "STEP" not in name}
    (child,) = start(
        server, [own], "train", "images", "--config", "train.yaml", "--steps", "2", "--out", "without_srun"
    )
    (output,) = finish([child])
    assert "this job has 2 tasks" in output


def test_resume_auto_with_two_ranks(server: ForkServer) -> None:
    """``--resume auto``: the job that a queue starts again."""
    out = server.folder / "queued"
    words = ["train", "images", "--config", "train.yaml", "--out", str(out), "--steps", "30", "--resume", "auto"]
    children = start(server, torchrun_variables(2), *words)
    children[0].wait_for(out / "metrics.jsonl")
    children[1].send(signal.SIGUSR1)
    assert [child.wait() for child in children] == [3, 0], "\n".join(child.output() for child in children)
    assert "resuming" in finish(start(server, torchrun_variables(2), *words))[0]
    assert "is finished: this is its result" in finish(start(server, torchrun_variables(2), *words))[0]


def test_a_signal_to_one_rank_stops_all(server: ForkServer) -> None:
    out = server.folder / "stopped"
    words = ["train", "images", "--config", "train.yaml", "--out", str(out), "--steps", "30", "--save-every", "0"]
    children = start(server, torchrun_variables(2), *words)
    children[0].wait_for(out / "metrics.jsonl")
    children[1].send(signal.SIGTERM)
    assert [child.wait() for child in children] == [3, 0], "\n".join(child.output() for child in children)
    assert "saved; resume" in children[0].output()
    output = finish(start(server, torchrun_variables(2), "train", "--resume", str(out)))
    assert "resuming" in output[0] and "resuming" not in output[1]
    assert [line["step"] for line in read_metrics(out) if line["split"] == "train"][-1] == 30


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_run(server: ForkServer, lost: int) -> None:
    out = server.folder / f"dead_{lost}"
    words = ["train", "images", "--config", "train.yaml", "--out", str(out), "--steps", "100000"]
    children = start(server, torchrun_variables(2), *words)
    children[0].wait_for(out / "checkpoints" / "last.pt")
    children[lost].send(signal.SIGKILL)
    assert children[lost].wait() == -signal.SIGKILL
    began = time.monotonic()
    other = children[1 - lost]
    assert other.wait() == 2, other.output()
    assert time.monotonic() - began < 30
    assert "Another rank of this run ended" in other.output() and f"--resume {out}" in other.output()
    assert "Traceback" not in other.output()


def test_a_hanging_rank_ends_the_run(server: ForkServer) -> None:
    out = server.folder / "hanging"
    words = ["train", "images", "--config", "train.yaml", "--out", str(out), "--steps", "100000", "--peer-timeout", "2"]
    children = start(server, torchrun_variables(2), *words)
    children[0].wait_for(out / "checkpoints" / "last.pt")
    children[1].send(signal.SIGSTOP)
    assert children[0].wait() == 2, children[0].output()
    assert "did not answer for 2 s" in children[0].output()
    children[1].send(signal.SIGKILL)
    children[1].wait()


def test_an_error_on_rank_zero_ends_all_ranks(server: ForkServer) -> None:
    out = server.folder / "taken"
    out.mkdir()
    (out / "config.yaml").write_text("{}")
    children = start(server, torchrun_variables(2), "train", "images", "--config", "train.yaml", "--out", str(out))
    assert [child.wait() for child in children] == [2, 2]
    assert ["already holds a run" in child.output() for child in children] == [True, False], "only rank 0 prints"


def run_script(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the installed script, or ``python ARGUMENTS``, on a CPU with --json."""
    script = Path(sys.executable).with_name("frugalvit")
    if not script.exists():
        pytest.skip("frugalvit is not installed as a script")
    start = [sys.executable] if words[0] == "-m" else [script]
    command, environment = [*start, *words, "--device", "cpu", "--json"], os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False, cwd=folder
    )


def training(server: ForkServer) -> list[str | Path]:
    return ["train", server.folder / "images", "--config", server.folder / "train.yaml", "--steps", "2", "--out", "run"]


@pytest.mark.slow
def test_devices_2_starts_two_processes(server: ForkServer, tmp_path: Path) -> None:
    done = run_script(tmp_path, *training(server), "--devices", "2", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2 and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("nodata", "No folder"),
        pytest.param("empty", "empty", marks=pytest.mark.slow),
        pytest.param("few", "2 training images are too few for 2 processes", marks=pytest.mark.slow),
        pytest.param(
            "some --img-size 32 --backbone coat_tiny", "coat_tiny gives no single grid", marks=pytest.mark.slow
        ),
    ],
)
def test_an_error_is_printed_once(data: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_images(tmp_path / "few", train=1, val=1)
    write_images(tmp_path / "some", train=4, val=1)
    done = run_script(tmp_path, "train", *data.split(), "-o", "run", "--devices", "2")
    assert done.returncode == 2 and expected in done.stderr, done.stderr
    assert done.stderr.count("frugalvit: ") == 1 and len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["status"] == 2


@pytest.mark.slow
def test_under_torchrun(server: ForkServer, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = run_script(tmp_path, *torchrun, "-m", "frugalvit.cli", *training(server), "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2


def test_fsdp_equals_one_rank(server: ForkServer) -> None:
    """Two ranks share the weights; they also continue a run of one rank, from its second newest checkpoint."""
    folder, words = server.folder, ["train", "images", "--config", "train.yaml"]
    if not (folder / "train_1").exists():
        status, output = server.run(*words, "--out", "train_1")
        assert status == 0, output
    finish(start(server, torchrun_variables(2), *words, "--out", "train_fsdp", "--strategy", "fsdp"))
    shutil.copytree(folder / "train_1", folder / "continued")
    for name in ("summary.json", "checkpoints/last.pt"):
        (folder / "continued" / name).unlink()
    finish(start(server, torchrun_variables(2), "train", "--resume", "continued", "--strategy", "fsdp"))
    for name in ("train_fsdp", "continued"):
        assert_same_run(folder / "train_1", folder / name)
    weights = [load_file(folder / name / "model" / "model.safetensors") for name in ("train_1", "train_fsdp")]
    torch.testing.assert_close(*weights, rtol=2e-3, atol=5e-5)
