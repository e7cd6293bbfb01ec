"""Injected faults end with one line, and nothing that was saved is lost."""

import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch
from lightning_fabric import Fabric

from frugalvit.cli import main as cli
from frugalvit.engine import auto_batch
from frugalvit.errors import UserError
from frugalvit.runs import checkpoint
from frugalvit.runs.run_folder import RunFolder, Stopwatch
from frugalvit.utils.files import write_atomically
from helpers.fork_server import ForkServer
from helpers.tiny_runs import PRETRAIN, TRAIN, read_metrics, write_config, write_images
from helpers.toy_task import ToyBatch, ToyTask, run_toy

SLOWER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def step_of(run: Path, name: str = "last.pt") -> int:
    return torch.load(run / "checkpoints" / name, weights_only=True)["step"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("faults") / "images")


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main([*words])
    output = capsys.readouterr()
    return status, output.out + output.err


# -- numbers that are none


@pytest.mark.parametrize("kind", ["input", "loss", "gradient"])
def test_a_nonfinite_step_is_skipped_and_counted(tmp_path: Path, kind: str) -> None:
    task = ToyTask({3: kind, 10: kind, 11: kind})
    outcome = run_toy(tmp_path / "run", task)
    assert outcome["skipped"] == 3 and outcome["steps"] == 20
    assert all(torch.isfinite(value).all() for value in task.state_dict().values()), "a NaN has stayed somewhere"
    assert [line["skipped"] for line in read_metrics(tmp_path / "run")] == [0, 1, 1, 1, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["input", "loss", "gradient"])
def test_a_skipped_step_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Weights, moments, batch norm and centre after a bad step are those before it."""
    run_toy(tmp_path / "before", ToyTask(), steps=3)
    run_toy(tmp_path / "after", ToyTask({3: kind}), steps=4)
    before, after = (
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("before", "after")
    )
    torch.testing.assert_close(after["task"], before["task"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)


def test_many_nonfinite_steps_stop_the_run_with_a_dump(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"5 steps in a row.*first non-finite input: batch.images.*fault/step_11"):
        run_toy(tmp_path / "run", ToyTask(dict.fromkeys(range(7, 20), "input")), log_every=1, save_every=5)
    assert step_of(tmp_path / "run") == 10
    assert all(
        torch.isfinite(value).all()
        for value in torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)["task"].values()
    )
    (evidence,) = (tmp_path / "run" / "fault").iterdir()
    kept = torch.load(evidence, weights_only=True)
    assert (
        kept["step"] == 11 and kept["parts"][0]["batch.images"].isnan().sum() == 1 and "linear.weight" in kept["task"]
    )


@pytest.mark.parametrize(("verb", "settings"), [("train", TRAIN), ("pretrain", PRETRAIN)])
def test_replay_names_the_first_nonfinite_tensor(
    tmp_path: Path, images: Path, verb: str, settings: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight turns NaN on its own; the run stops, and replay finds that weight."""
    config = write_config(tmp_path / "config.yaml", settings, steps=3, save_every=1, log_every=1)
    run = tmp_path / "run"
    words = [verb, str(images), "--config", str(config), "--out", str(run), "--device", "cpu", "--quiet"]
    assert command(capsys, *words)[0] == 0
    (run / "summary.json").unlink()
    settings_file = run / "config.yaml"
    settings_file.write_text(settings_file.read_text().replace("steps: 3\n", "steps: 30\n"))
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    name = "backbone.model.layers.1.blocks.0.mlp.fc1.bias" if verb == "train" else None
    name = name or "student.model.layers.1.blocks.0.mlp.fc1.bias"
    state["task"][name][2] = torch.nan
    write_atomically(run / "checkpoints" / "last.pt", lambda handle: torch.save(state, handle))
    status, output = command(capsys, verb, "--resume", str(run), "--device", "cpu", "--quiet")
    assert status == 2, output
    assert f"first non-finite parameter: {name}" in output and "frugalvit replay" in output
    status, output = command(capsys, "replay", str(run), "--device", "cpu")
    assert status == 0 and f"weight {name}" in output
    assert "mlp.fc1 (Linear)" in output and "gradient" in output, output


def test_replay_needs_a_failed_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, expected in ((tmp_path, "no failed step"), (tmp_path / "absent.pt", "The checkpoint file")):
        status, output = command(capsys, "replay", str(word))
        assert status == 2 and expected in output


# -- memory


def test_out_of_memory_names_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2.50 GiB.*--batch 4.*--accumulate 2.*--auto-batch"):
        run_toy(tmp_path / "run", ToyTask({5: "memory"}))
    assert step_of(tmp_path / "run") == 4


@pytest.mark.parametrize(("most", "parts"), [(8, 1), (7, 2), (4, 2), (3, 4), (1, 8)])
def test_auto_batch_halves_until_it_fits(most: int, parts: int) -> None:
    task = ToyTask()
    task.most = most
    before = {name: value.clone() for name, value in task.state_dict().items() if name != "center"}
    assert auto_batch.parts_that_fit(task, 1, Fabric(accelerator="cpu", devices=1)) == parts
    assert task.training and all(parameter.grad is None for parameter in task.parameters())
    after = task.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_auto_batch_fails_with_one_line() -> None:
    task = ToyTask()
    task.most = 0
    with pytest.raises(UserError, match="Not even 1 images"):
        auto_batch.parts_that_fit(task, 1, Fabric(accelerator="cpu", devices=1))


def test_auto_batch_keeps_other_errors() -> None:
    class Broken(ToyTask):
        def forward(self, batch: ToyBatch, step: int) -> dict[str, torch.Tensor]:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        auto_batch.parts_that_fit(Broken(), 1, Fabric(accelerator="cpu", devices=1))


def test_auto_batch_on_a_cpu(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "config.yaml", TRAIN, steps=1)
    words = ["train", str(images), "--config", str(config), "--out", str(tmp_path / "run"), "--device", "cpu"]
    status, output = command(capsys, *words, "--auto-batch")
    assert status == 0 and "auto-batch: batch stays 8" in output


@pytest.mark.gpu
def test_auto_batch_on_a_gpu(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenth of a gigabyte is too little for the whole batch; in parts it goes through to the end."""
    total = torch.cuda.get_device_properties(0).total_memory
    values = TRAIN | {"backbone": "swin_tiny_w7", "backbone_args": {}, "img_size": 96, "batch": 16, "steps": 2}
    config = write_config(tmp_path / "config.yaml", values)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.9e9 / total)
    try:
        words = ["train", str(images), "--config", str(config), "--out", str(tmp_path / "run"), "--auto-batch"]
        status, output = command(capsys, *words, "--precision", "32", "--json")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert status == 0 and "images a step fit in" in output, output
    assert "accumulate: 1\n" not in (tmp_path / "run" / "config.yaml").read_text()


# -- disks


def test_a_full_disk_keeps_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer fails in the middle of the third checkpoint; both earlier ones stay whole, and a resume goes on."""
    real, calls = torch.save, []

    def save(state: object, handle: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            handle.write(b"half of it")  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        real(state, handle)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(UserError, match=r"Could not save last.pt in .*No space left on device.*--resume"):
        run_toy(tmp_path / "run", ToyTask())
    assert (step_of(tmp_path / "run"), step_of(tmp_path / "run", "previous.pt")) == (4, 2)
    assert not list(tmp_path.rglob("*.part"))
    assert run_toy(tmp_path / "run", ToyTask())["steps"] == 20


class Full(ToyTask):
    """One whose first score is the best, so that it is saved before anything else."""

    best_metric = "top1"

    def evaluate(self, step: int) -> dict[str, float]:
        return {"top1": float(step)}


def test_a_full_disk_names_the_checkpoint_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full is a disk without room: torch's writer reports it in its own words."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 20\n")
    real = checkpoint.write_atomically

    def write(path: Path, content: Callable[[IO[bytes]], object], *, keep: Path | None = None) -> None:
        if path.name == "best.pt" or state["full"]:
            with Path("/dev/full").open("wb") as handle:
                content(handle)
                handle.flush()
        real(path, content, keep=keep)

    state = {"full": False}
    monkeypatch.setattr(checkpoint, "write_atomically", write)
    with pytest.raises(UserError) as first:
        run_toy(tmp_path / "run", Full(), evaluate_every=1)
    assert "Could not save best.pt" in str(first.value) and "(No space left on device)" in str(first.value)
    assert "There is no checkpoint yet. Free some space, then start at step 0 with --resume" in str(first.value)
    with pytest.raises(UserError, match=r"last.pt \(step 4\) is intact\. Free some space, then resume"):
        run_toy(tmp_path / "run", Full(), evaluate_every=5)
    state["full"] = True
    with pytest.raises(UserError, match=r"Could not save last.pt .*last.pt \(step 4\) is intact"):
        run_toy(tmp_path / "run", ToyTask())


def test_file_size_limit(tmp_path: Path, images: Path) -> None:
    """Not simulated: the kernel refuses to let any file grow beyond a limit."""
    server = ForkServer(tmp_path)
    config = write_config(tmp_path / "config.yaml", TRAIN)
    words = ["train", str(images), "--config", str(config), "--out", "run"]
    child = server.start(*words, "--steps", "100000")
    run = tmp_path / "run"
    child.wait_for(run / "checkpoints" / "previous.pt")
    size = (run / "checkpoints" / "last.pt").stat().st_size
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
    assert child.wait() == 2, child.output()
    assert "Could not save" in child.output() and "Traceback" not in child.output()
    for name in ("last.pt", "previous.pt"):
        assert checkpoint.find_damage(run / "checkpoints" / name) is None


def test_a_full_disk_while_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    run.log(1, loss=1.0)

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(run, "_metrics", Full())
    with pytest.raises(UserError, match="Could not save metrics"):
        run.log(2, loss=1.0)
    run.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_first(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        status, output = command(capsys, "train", str(images), "--out", str(tmp_path / "run"), "--device", "cpu")
    finally:
        tmp_path.chmod(stat.S_IRWXU)
    assert status == 2 and "Cannot write to" in output and "--out" in output


def test_a_folder_that_cannot_be_created(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    status, output = command(capsys, "train", str(images), "--out", str(tmp_path / "file" / "run"), "--device", "cpu")
    assert status == 2 and "Cannot write to" in output and len(output.strip().splitlines()) == 1


def test_previous_checkpoint_is_copied_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run_toy(tmp_path / "run", ToyTask(), steps=6)
    assert (step_of(tmp_path / "run"), step_of(tmp_path / "run", "previous.pt")) == (6, 4)


# -- data and workers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    return ForkServer(tmp_path_factory.mktemp("faulty"))


def test_files_that_vanish_while_training(server: ForkServer) -> None:
    """Few are left out by name; many stop the run, and when they are back it goes on."""
    folder = server.folder
    images = write_images(folder / "vanishing", train=30)
    config = write_config(folder / "lazy.yaml", TRAIN, cache={"where": "off"}, workers=0, steps=100000)
    child = server.start("train", "vanishing", "--config", str(config), "--out", "vanished")
    child.wait_for(folder / "vanished" / "checkpoints" / "last.pt")
    (images / "train").rename(images / "train_elsewhere")
    assert child.wait() == 2, child.output()
    assert "left out:" in child.output() and "cannot be read" in child.output() and "Traceback" not in child.output()
    (images / "train_elsewhere").rename(images / "train")
    step = step_of(folder / "vanished")
    again = server.start("train", "--resume", "vanished")
    again.wait_for_output("epoch")  # it is training again
    again.send(signal.SIGTERM)
    assert again.wait() == 3 and f"at step {step}" in again.output()


def test_a_killed_worker_is_reported(server: ForkServer) -> None:
    folder = server.folder
    write_images(folder / "worked")
    config = write_config(folder / "workers.yaml", TRAIN, cache={"where": "off"}, workers=1, steps=100000)
    child = server.start("train", "worked", "--config", str(config), "--out", "worker")
    child.wait_for(folder / "worker" / "checkpoints" / "last.pt")
    workers = [pid for pid in _children(child.pid) if "spawn_main" in _command_line(pid)]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert workers and child.wait() == 2, child.output()
    assert "A process that decodes images was killed" in child.output() and "Traceback" not in child.output()


@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, *SLOWER_SIGNALS))],
)
def test_workers_ignore_signals_to_the_process_group(server: ForkServer, number: signal.Signals) -> None:
    """Ctrl-C reaches the workers too; the run needs them for the step it finishes before it saves. None stays."""
    folder = server.folder
    if not (folder / "grouped").exists():
        write_images(folder / "grouped")
    config = write_config(folder / "group.yaml", TRAIN, cache={"where": "off"}, workers=1, steps=100000)
    out = folder / f"group_{number.name}"
    child = server.start("train", "grouped", "--config", str(config), "--out", str(out))
    child.wait_for_output("(step 8)")  # the workers of the evaluation are there too
    workers = [pid for pid in _children(child.pid) if "spawn_main" in _command_line(pid)]
    for pid in workers:
        os.kill(pid, number)
    time.sleep(1.0)  # a worker that minds the signal is gone by now, and the run has noticed
    child.send(number)
    assert workers and child.wait() == 3, child.output()
    assert f"{number.name}: saved" in child.output() and "Traceback" not in child.output()
    until = time.monotonic() + 20
    while any(_is_running(pid) for pid in workers):
        assert time.monotonic() < until, "workers were left behind"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_training_with_unreadable_first_images(tmp_path: Path) -> None:
    """A resume reports a missing dataset before it does anything else."""
    images = write_images(tmp_path / "images")
    config = write_config(tmp_path / "config.yaml", TRAIN, steps=1)
    assert cli.main(["train", str(images), "--config", str(config), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(images)
    assert cli.main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 2
    assert checkpoint.find_damage(tmp_path / "run" / "checkpoints" / "last.pt") is None


# -- clocks


def test_a_jumping_clock_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    outcome = run_toy(tmp_path / "run", ToyTask(), save_every=0)
    assert 0 <= outcome["seconds"] < 60 and outcome["seconds_per_step"] < 10


def test_seconds_continue_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", iter([100.0, 107.0]).__next__)
    assert Stopwatch(50.0).seconds() == 57.0
