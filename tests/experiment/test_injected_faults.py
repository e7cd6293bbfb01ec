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
from frugalvit.engine import auto_batch, checkpoint
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils.files import write_atomically
from helpers.fork_server import Child, ForkServer
from helpers.tiny_runs import TRAIN, load_state, read_metrics, run_tiny, write_config, write_images
from helpers.toy_task import ToyBatch, ToyTask, run_toy


def saved_step(run: Path, name: str = "last.pt") -> int:
    return load_state(run, name)["step"]


def command(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Run a command on a CPU; return its exit status and output."""
    status = cli.main([*map(str, words), "--device", "cpu"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


# -- non-finite numbers


@pytest.mark.parametrize("kind", ["input", "loss", "gradient"])
def test_a_nonfinite_step_is_skipped_and_counted(tmp_path: Path, kind: str) -> None:
    task = ToyTask({3: kind, 10: kind, 11: kind})
    outcome = run_toy(tmp_path / "run", task)
    assert outcome["skipped"] == 3 and outcome["steps"] == 20
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())
    assert [line["skipped"] for line in read_metrics(tmp_path / "run")] == [0, 1, 1, 1, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["input", "loss", "gradient"])
def test_a_skipped_step_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Weights, moments, batch norm and center after a bad step are those before it."""
    run_toy(tmp_path / "before", ToyTask(), steps=3)
    run_toy(tmp_path / "after", ToyTask({3: kind}), steps=4)
    before, after = (load_state(tmp_path / name) for name in ("before", "after"))
    torch.testing.assert_close(after["task"], before["task"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)


def test_many_nonfinite_steps_stop_the_run_with_a_dump(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"5 steps in a row.*first non-finite input: batch.images.*fault/step_11"):
        run_toy(tmp_path / "run", ToyTask(dict.fromkeys(range(7, 20), "input")), log_every=1, save_every=5)
    state = load_state(tmp_path / "run")
    assert state["step"] == 10 and all(torch.isfinite(value).all() for value in state["task"].values())
    (file,) = (tmp_path / "run" / "fault").iterdir()
    dump = torch.load(file, weights_only=True)
    assert dump["step"] == 11 and "linear.weight" in dump["task"]
    assert dump["parts"][0]["batch.images"].isnan().sum() == 1


@pytest.mark.parametrize(("verb", "network"), [("train", "backbone"), ("pretrain", "student")])
def test_the_dump_holds_the_nonfinite_weight(
    tmp_path: Path, photos: Path, verb: str, network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight becomes NaN; the run stops and names that weight."""
    run = tmp_path / "run"
    run_tiny(verb, data=photos, out=run, steps=3, save_every=1, log_every=1)
    (run / "summary.json").unlink()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 3\n", "steps: 30\n"))
    state, name = load_state(run), f"{network}.model.layers.1.blocks.0.mlp.fc1.bias"
    state["task"][name][2] = torch.nan
    write_atomically(run / "checkpoints" / "last.pt", lambda handle: torch.save(state, handle))
    status, output = command(capsys, verb, "--resume", run)
    assert status == 2 and f"first non-finite parameter: {name}" in output, output
    (file,) = (run / "fault").iterdir()
    assert str(file) in output and torch.load(file, weights_only=True)["task"][name].isnan().sum() == 1


# -- memory


def test_out_of_memory_names_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2.50 GiB.*--batch 4.*--accumulate 2.*--auto-batch"):
        run_toy(tmp_path / "run", ToyTask({5: "memory"}))
    assert saved_step(tmp_path / "run") == 4


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


def test_auto_batch_on_a_cpu(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny("train", data=photos, out=tmp_path / "run", steps=1, auto_batch=True)
    assert "auto-batch: batch stays 8" in capsys.readouterr().err


@pytest.mark.gpu
def test_auto_batch_on_a_gpu(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.9 GB is too little for the full batch; in parts the run finishes."""
    total = torch.cuda.get_device_properties(0).total_memory
    values = {"backbone": "swin_tiny_w7", "backbone_args": {}, "img_size": 96, "batch": 16, "steps": 2}
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.9e9 / total)
    try:
        run_tiny("train", data=photos, out=tmp_path / "run", auto_batch=True, device="cuda", precision="32", **values)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "(accumulate = " in capsys.readouterr().err
    assert "accumulate: 1\n" not in (tmp_path / "run" / "config.yaml").read_text()


# -- disks


def test_a_full_disk_keeps_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer fails in the middle of the third checkpoint; both earlier ones stay intact for the resume."""
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
    assert (saved_step(tmp_path / "run"), saved_step(tmp_path / "run", "previous.pt")) == (4, 2)
    assert not list(tmp_path.rglob("*.part"))
    assert run_toy(tmp_path / "run", ToyTask())["steps"] == 20


class ImprovingTask(ToyTask):
    """Every score is the best so far, so that best.pt is saved before last.pt."""

    best_metric = "top1"

    def evaluate(self, step: int) -> dict[str, float]:
        return {"top1": float(step)}


def test_a_full_disk_names_the_checkpoint_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full is a disk without space: torch's writer reports it with an error of its own."""
    real, full = checkpoint.write_atomically, {"best.pt"}

    def write(path: Path, content: Callable[[IO[bytes]], object], *, keep: Path | None = None) -> None:
        if path.name in full:
            with Path("/dev/full").open("wb") as handle:
                content(handle)
                handle.flush()
        real(path, content, keep=keep)

    monkeypatch.setattr(checkpoint, "write_atomically", write)
    with pytest.raises(UserError, match=r"save best.pt .*\(No space left on device\)\. Nothing was saved yet"):
        run_toy(tmp_path / "run", ImprovingTask(), evaluate_every=1)
    with pytest.raises(UserError, match=r"last.pt is intact\. .*--resume"):
        run_toy(tmp_path / "run", ImprovingTask(), evaluate_every=5)
    full.add("last.pt")
    with pytest.raises(UserError, match=r"Could not save last.pt .*last.pt is intact"):
        run_toy(tmp_path / "run", ToyTask())


def test_file_size_limit(server: ForkServer) -> None:
    """The kernel refuses to let any file grow beyond a limit."""
    child, run = start_training(server, "limited")
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
def test_a_read_only_folder_is_refused_first(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        status, output = command(capsys, "train", photos, "--out", tmp_path / "run")
    finally:
        tmp_path.chmod(stat.S_IRWXU)
    assert status == 2 and "Cannot write to" in output and "--out" in output


def test_a_folder_that_cannot_be_created(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    status, output = command(capsys, "train", photos, "--out", tmp_path / "file" / "run")
    assert status == 2 and "Cannot write to" in output and len(output.strip().splitlines()) == 1


# -- data and workers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    server = ForkServer(tmp_path_factory.mktemp("faulty"))
    write_images(server.folder / "images", train=30)
    return server


def start_training(server: ForkServer, out: str, data: str = "images", **values: object) -> tuple[Child, Path]:
    """Start a long training; return its process and its folder."""
    config = write_config(server.folder / f"{out}.yaml", TRAIN, steps=100000, **values)
    return server.start("train", data, "--config", str(config), "--out", out), server.folder / out


def find_workers(pid: int) -> list[int]:
    """Return the worker processes of a run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_files_that_vanish_while_training(server: ForkServer) -> None:
    """Few unreadable images are skipped by name; many stop the run, and it resumes when they are back."""
    images = shutil.copytree(server.folder / "images", server.folder / "vanishing")
    child, run = start_training(server, "vanished", "vanishing", cache={"location": "off"}, workers=0)
    child.wait_for(run / "checkpoints" / "last.pt")
    (images / "train").rename(images / "train_elsewhere")
    assert child.wait() == 2, child.output()
    assert "left out:" in child.output() and "cannot be read" in child.output() and "Traceback" not in child.output()
    (images / "train_elsewhere").rename(images / "train")
    step = saved_step(run)
    again = server.start("train", "--resume", "vanished")
    again.wait_for_output("epoch")  # it is training again
    again.send(signal.SIGTERM)
    assert again.wait() == 3 and f"at step {step}" in again.output()


def test_a_killed_worker_is_reported(server: ForkServer) -> None:
    child, run = start_training(server, "worker", cache={"location": "off"}, workers=1)
    child.wait_for(run / "checkpoints" / "last.pt")
    workers = find_workers(child.pid)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert workers and child.wait() == 2, child.output()
    assert "worker process was killed" in child.output() and "Traceback" not in child.output()


@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP]
    + [pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
)
def test_workers_ignore_signals_to_the_process_group(server: ForkServer, number: signal.Signals) -> None:
    """Ctrl-C reaches the workers too; the run needs them for the step that it finishes before it saves."""
    child, _ = start_training(server, f"group_{number.name}", cache={"location": "off"}, workers=1)
    child.wait_for_output("(step 8)")  # the workers of the evaluation exist too
    workers = find_workers(child.pid)
    for pid in workers:
        os.kill(pid, number)
    time.sleep(1.0)  # a worker that does not ignore the signal has ended by now, and the run has noticed
    child.send(number)
    assert workers and child.wait() == 3, child.output()
    assert f"{number.name}: saved" in child.output() and "Traceback" not in child.output()
    until = time.monotonic() + 20
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < until, "workers were left behind"
        time.sleep(0.05)


def test_training_with_unreadable_first_images(tmp_path: Path) -> None:
    """A missing dataset ends a resume before anything is written."""
    images = write_images(tmp_path / "images")
    run_tiny("train", data=images, out=tmp_path / "run", steps=1)
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


def test_seconds_continue_after_a_resume(tmp_path: Path) -> None:
    run_toy(tmp_path / "run", ToyTask(), steps=4)
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    torch.save(torch.load(path) | {"seconds": 50.0}, path)
    assert 50 < run_toy(tmp_path / "run", ToyTask(), steps=8)["seconds"] < 90
