"""The training loop: resumed state, skipped steps, metrics, and errors while saving."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric

from frugalvit.cli import main as cli
from frugalvit.engine import loop as trainer
from frugalvit.engine import step as stepping
from frugalvit.engine.failure_dump import is_out_of_memory
from frugalvit.engine.hardware import make_precision
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from helpers.fake_distributed import run_ranks
from helpers.fork_server import ForkServer
from helpers.processes import torchrun_variables
from helpers.tiny_runs import TRAIN, write_config, write_images
from helpers.toy_task import ToyTask, run_toy, toy_plan


def groups(run: Path) -> list[dict]:
    return torch.load(run / "checkpoints" / "last.pt", weights_only=True)["optimizer"]["param_groups"]


def test_resumed_optimizer_uses_this_machines_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts with an unfused step and resumes with a fused one still skips bad gradients."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(stepping, "_fused", lambda fabric: False)
        run_toy(tmp_path / "run", ToyTask(), steps=4)
    assert [group["fused"] for group in groups(tmp_path / "run")] == [False]
    run_toy(tmp_path / "run", ToyTask(), steps=8)
    assert [group["fused"] for group in groups(tmp_path / "run")] == [True]


def test_skipped_steps_are_counted_across_a_resume(tmp_path: Path) -> None:
    spoilt = {1: "loss"} | dict.fromkeys(range(4, 20), "loss")
    run_toy(tmp_path / "run", ToyTask(spoilt), steps=3)
    assert run_toy(tmp_path / "run", ToyTask(spoilt), steps=6)["skipped"] == 3
    with pytest.raises(UserError, match=r"5 steps in a row .* stopped at step 9"):
        run_toy(tmp_path / "run", ToyTask(spoilt), log_every=1)


def test_resumed_scaler_has_its_scale(tmp_path: Path) -> None:
    scales = []
    for steps, start in ((2, 64.0), (4, 65536.0)):
        precision: Any = make_precision("fp16", "cpu")
        precision.scaler._init_scale = start
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
        fabric.launch()
        run = RunFolder(tmp_path)
        trainer.fit(ToyTask(), toy_plan(images_per_step=8, steps=steps), run, fabric)
        run.close()
        scales.append(torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)["scaler"]["scale"])
    assert scales == [64.0, 64.0]


def test_latest_of_equal_scores_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few validation images often give equal scores."""
    scores = {2: 50.0, 4: 66.7, 6: 66.7, 8: 33.3}
    monkeypatch.setattr(ToyTask, "evaluate", lambda self, step: {"top1": scores[step]})
    outcome = run_toy(tmp_path / "run", ToyTask(), steps=8, evaluate_every=2)
    assert (outcome["best"], outcome["best_step"]) == (66.7, 6)
    assert torch.load(tmp_path / "run" / "checkpoints" / "best.pt", weights_only=True)["step"] == 6


@pytest.mark.parametrize(("signals", "written"), [(2, 1), (3, 0)])
def test_second_signal_lets_a_log_line_finish(
    signals: int, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written TensorBoard queue would keep the run from ending."""
    lines: list[int] = []

    def log(run: RunFolder, step: int, **values: Any) -> None:
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
        lines.append(step)

    monkeypatch.setattr(RunFolder, "log", log)
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path / "run", ToyTask(), steps=8)
    assert len(lines) == written


def test_mean_of_values_that_some_steps_lack(tmp_path: Path) -> None:
    """Each value is averaged over the steps that have it."""

    class Talkative(ToyTask):
        def forward(self, batch: Any, step: int) -> dict[str, torch.Tensor]:
            more = {"sign": torch.tensor(float(step))} if step % 3 == 0 else {}
            return super().forward(batch, step) | {"number": torch.tensor(float(step))} | more

    run_toy(tmp_path / "run", Talkative(), steps=6, log_every=6, accumulate=2)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["number"] == sum(range(6)) / 6
    assert line["sign"] == (0 + 3) / 2
    assert line["gradient_norm"] > 0


class RankTrainer(trainer.Trainer):
    """A trainer of one rank; ``saved`` replaces the run folder."""

    def __init__(self, peer: Any, saved: dict[str, Any]) -> None:
        peer.strategy = SimpleNamespace(precision=SimpleNamespace(state_dict=dict))
        task: Any = ToyTask()
        optimizer, plan = torch.optim.AdamW(task.parameters()), toy_plan(save_every=0, save_minutes=1.0)
        self.saved = saved
        run: Any = SimpleNamespace(folder="run", load_checkpoint=lambda: saved, metrics=list)
        run.save_checkpoint = lambda state: saved.update(state) if peer.is_global_zero else None
        run.truncate_metrics = lambda step: None
        super().__init__(task, task, optimizer, plan, run, peer)

    def see(self, *steps: int) -> None:
        """Another loss in every process, and a sign at every other step."""
        for step in steps:
            loss = torch.tensor(10.0 * self.fabric.global_rank + step / 3)
            self._collect({"loss": loss} | ({"sign": loss} if step % 2 else {}))


def test_resumed_window_covers_all_ranks() -> None:
    """Ranks have different losses; resumed inside a window they log the same as without the stop."""
    saved: dict[str, Any] = {}

    def run_on(peer: Any) -> dict[str, float]:
        part = RankTrainer(peer, saved)
        part.see(1, 2, 3)
        part.save()
        part.see(4, 5)
        return part._means()

    def resume(peer: Any) -> dict[str, float]:
        part = RankTrainer(peer, saved)
        part.resume()
        part.see(4, 5)
        return part._means()

    wanted = {"loss": (1 + 2 + 3 + 4 + 5) / 3 / 5 + 10, "sign": (1 + 3 + 5) / 3 / 3 + 10}
    expected = run_ranks(3, run_on)
    assert expected == [pytest.approx(wanted)] * 3
    assert run_ranks(3, resume) == expected


def test_rank_zero_decides_when_to_save() -> None:
    """All ranks take part in saving, so they must not use their own clocks."""

    def decide(peer: Any) -> list[bool]:
        part, decisions = RankTrainer(peer, {}), []
        for step, waited in ((4, 0.0), (5, 90.0), (6, 90.0)):  # lines are logged at even steps
            part.step = step
            part.saved_at = time.monotonic() - (waited if peer.global_rank == 0 else 90.0 - waited)
            decisions.append(part.time_to_save())
        return decisions

    assert run_ranks(2, decide) == [[False, False, True]] * 2


@pytest.mark.parametrize(("scaled", "limit"), [(False, 5), (True, 21)])
def test_scaler_may_skip_its_first_steps(scaled: bool, limit: int) -> None:
    """fp16 starts with overflows: from 65,536 it needs up to sixteen steps."""
    assert trainer.Trainer._max_nonfinite(SimpleNamespace(plan=toy_plan(), scaled=scaled)) == limit


def test_failure_dump_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("frugalvit.engine.failure_dump.write_atomically", full)
    with pytest.raises(UserError, match=r"5 steps in a row.*could not be written.*No space left.*checkpoint is intact"):
        run_toy(tmp_path / "run", ToyTask(dict.fromkeys(range(7, 20), "loss")), log_every=1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.10 GB)"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_metrics_after_a_power_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost blocks read as zeros: the other lines count, and the run resumes."""
    run_toy(tmp_path / "run", ToyTask(), steps=8)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"\0" * len(lines[1])
    lines.insert(2, b'["no", "record"]')
    path.write_bytes(b"\n".join(lines) + b'{"step": 8, "lo')
    run_toy(tmp_path / "run", ToyTask(), steps=10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 6, 8, 10]
    assert "skipping a damaged line" in capsys.readouterr().err


def test_summary_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunFolder(tmp_path)
    monkeypatch.setattr("frugalvit.utils.files.write_text", full)
    with pytest.raises(UserError, match=r"Could not save summary.json.*No space left on device"):
        run.save_json("summary.json", {})
    run.close()


def test_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(words: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(cli, "_run", full)
    assert cli.main(["train"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "No space left on device: model.safetensors" in printed


@pytest.mark.slow
def test_rank_that_dies_while_scoring(tmp_path: Path) -> None:
    """With a real second process."""
    server = ForkServer(tmp_path)
    write_images(tmp_path / "images")
    write_config(tmp_path / "config.yaml", TRAIN, steps=2)
    words = ["train", "images", "--config", "config.yaml", "--out", "run", "--device", "cpu"]
    first, second = torchrun_variables(2)
    child = server.start(*words, **first)
    run = (
        "import os, sys; from frugalvit.cli import main as cli; import frugalvit.tasks.classification.train as module\n"
        f"module.ClassificationExperiment.score = lambda *_: os._exit(9)\nsys.exit(cli.main({words!r}))"
    )
    variables = os.environ | second | {"OMP_NUM_THREADS": "1", "FRUGALVIT_CACHE": str(tmp_path / "cache")}
    peer = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, env=variables, capture_output=True, timeout=120)
    assert peer.returncode == 9, peer.stderr
    assert child.wait() == 2, child.output()
    assert "Another rank of this run ended" in child.output() and "Traceback" not in child.output()
