"""A run that is killed and resumed ends with the same bits as one that was not."""

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from lightning_fabric import Fabric

from frugalvit.experiment.builders import restore_threads
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils.signals import stop_signals
from helpers.fork_server import ForkServer
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, load_state, write_config, write_images

VERBS = ("train", "pretrain")


@dataclass
class Bench:
    """Data, settings, the fork server, and one undisturbed run of each kind with its seconds."""

    folder: Path
    server: ForkServer
    seconds: dict[str, float]

    def words(self, verb: str, out: Path) -> list[str]:
        """Return the command that starts ``out``, or resumes it."""
        if (out / "config.yaml").exists():
            return [verb, "--resume", str(out)]
        cache = (
            ["--cache.location", "disk", "--cache.folder", str(out.with_suffix(".cache"))] if verb == "pretrain" else []
        )
        return [verb, "images", "--config", f"{verb}.yaml", "--out", str(out), *cache]

    def finish(self, verb: str, out: Path) -> str:
        status, output = self.server.run(*self.words(verb, out))
        assert status == 0, output
        return output

    def while_saving(self, which: int, verb: str, out: Path, number: signal.Signals, *more: str) -> tuple[int, str]:
        """Run a command that sends itself a signal when it opens its n-th ``last.pt``."""
        at = 3 * (which - 1)  # each is opened under another name, renamed, and the other name removed
        inside = out / "checkpoints" / ".last.pt"
        return self.server.run(*self.words(verb, out), *more, kill_at=at, inside=inside, signals=[number])

    def reference(self, verb: str) -> Path:
        out = self.folder / f"{verb}_reference"
        if verb not in self.seconds:
            began = time.monotonic()
            self.finish(verb, out)
            self.seconds[verb] = time.monotonic() - began
        return out

    def differences(self, verb: str, out: Path) -> list[str]:
        """Compare with the undisturbed run; partial files count too."""
        return [*differences(self.reference(verb), out), *map(str, out.rglob("*.part"))]

    def check(self, verb: str, out: Path) -> None:
        assert self.differences(verb, out) == []


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("resume")
    write_images(folder / "images")
    write_config(folder / "train.yaml", TRAIN)
    write_config(folder / "pretrain.yaml", PRETRAIN)
    server = ForkServer(folder)
    server.run("--version")  # wait for the imports, so that the seconds are fair
    return Bench(folder, server, {})


def kill_at_random(bench: Bench, verb: str, seed: int, kills: int) -> list[str]:
    """Kill a run at random moments, resume it, and return the differences."""
    dice = random.Random(seed)
    bench.reference(verb)
    out = bench.folder / f"{verb}_random_{seed}"
    killed = 0
    for _ in range(kills):
        child = bench.server.start(*bench.words(verb, out))
        time.sleep(dice.uniform(0, bench.seconds[verb]))
        child.send(signal.SIGKILL)
        status = child.wait()
        assert status in (-signal.SIGKILL, 0), child.output()
        killed += status != 0  # 0: the run ended before the kill
    print(f"{verb}: {killed} kills at random moments, seed {seed}")
    bench.finish(verb, out)
    return bench.differences(verb, out)


def kill_at_write(bench: Bench, verb: str, number: int) -> bool:
    """Kill a new run at its n-th file operation and resume it; return whether it had that many."""
    out = Path(mkdtemp(dir=bench.folder, prefix=f"{verb}_write_{number}_")) / "run"
    status, output = bench.server.run(*bench.words(verb, out), kill_at=number, inside=out)
    assert status in (0, -signal.SIGKILL), output
    if status:
        bench.finish(verb, out)
    bench.check(verb, out)
    return status != 0


@pytest.mark.parametrize("verb", ["train", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_killed_at_random_moments(bench: Bench, verb: str) -> None:
    assert kill_at_random(bench, verb, seed=1, kills=2) == []


@pytest.mark.parametrize(("verb", "number"), [pytest.param("train", 18, marks=pytest.mark.slow), ("pretrain", 25)])
def test_killed_while_writing(bench: Bench, verb: str, number: int) -> None:
    assert kill_at_write(bench, verb, number), "the run has fewer file operations than that"


def test_killed_while_checking_write_access(bench: Bench) -> None:
    """The partial test file in checkpoints/ is not a checkpoint."""
    out = bench.folder / "tried"
    inside = out / "checkpoints" / ".writable"
    assert bench.server.run(*bench.words("train", out), kill_at=1, inside=inside)[0] == -signal.SIGKILL
    assert [path.suffix for path in (out / "checkpoints").iterdir()] == [".part"]
    bench.finish("train", out)
    bench.check("train", out)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("seed", range(10, 20))
def test_killed_at_many_random_moments(bench: Bench, verb: str, seed: int) -> None:
    assert kill_at_random(bench, verb, seed, kills=5) == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_every_file_operation(bench: Bench, verb: str) -> None:
    kills = next(number for number in count() if not kill_at_write(bench, verb, number))
    print(f"{verb}: {kills} kills, one at each file operation")
    assert kills > 30


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("train", signal.SIGTERM),
        ("train", signal.SIGUSR1),
        ("train", signal.SIGHUP),
        pytest.param("pretrain", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_stops(bench: Bench, verb: str, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here (nohup)")
    out = bench.folder / f"{verb}_{number.name}"
    status, output = bench.while_saving(2, verb, out, number)
    assert status == 3, output
    assert f"{number.name}: saved; resume with 'frugalvit {verb} --resume {out}'" in output
    step = load_state(out)["step"]
    assert step == 7 and f"at step {step} of 10" in bench.finish(verb, out)
    bench.check(verb, out)


def test_a_signal_in_the_last_step_stops_the_comparison(bench: Bench) -> None:
    """The run itself is finished, but the comparison starts no other run."""
    out = bench.folder / "compared"
    settings = ["--with", "lr=0.001", "--without", "lr=0.002", "--seeds", "1", "--steps", "1"]
    words = ["compare", "images", "--config", "train.yaml", *settings, "--out", str(out)]
    last = out / "with" / "seed_0" / "checkpoints" / ".last.pt"
    status, output = bench.server.run(*words, kill_at=0, inside=last, signals=[signal.SIGINT])
    assert status == 3 and "stopped; the same command continues." in output, output
    assert (out / "with" / "seed_0" / "summary.json").exists() and not (out / "without").exists()
    assert bench.server.run(*words)[0] == 0 and (out / "comparison.md").exists()


def test_a_second_signal_stops_at_once(bench: Bench) -> None:
    out = bench.folder / "twice"
    child = bench.server.start(*bench.words("train", out), "--steps", "100000")
    child.wait_for(out / "metrics.jsonl")
    # Both signals wait while the process is stopped; then they arrive within one step.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        child.send(number)
    assert child.wait() == 130 and "stopped." in child.output() and "Traceback" not in child.output()


def test_a_second_signal_waits_for_the_checkpoint(bench: Bench) -> None:
    """An exception inside torch.save would be swallowed, or look like a disk error."""
    out = bench.folder / "twice_while_saving"
    both = {"kill_at": 0, "inside": out / "checkpoints" / ".last.pt", "signals": [signal.SIGINT, signal.SIGTERM]}
    status, output = bench.server.run(*bench.words("train", out), **both)
    assert status == 130 and "stopped." in output and "Could not save" not in output, output
    assert load_state(out)["step"] == 3
    bench.finish("train", out)
    bench.check("train", out)


def test_a_third_signal_is_not_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's interrupted writer raises an error of its own."""

    def interrupted_save(state: object, handle: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 114496 vs 114392")

    monkeypatch.setattr(torch, "save", interrupted_save)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path / "run").save_checkpoint({"step": 1})


def test_sigusr1_before_sigterm_is_one_stop(bench: Bench) -> None:
    """SLURM sends SIGUSR1 and then SIGTERM; a session that ends sends SIGTERM and SIGHUP at once."""
    out = bench.folder / "warned"
    child = bench.server.start(*bench.words("train", out), "--steps", "100000")
    child.wait_for(out / "metrics.jsonl")
    for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
        child.send(number)
    assert child.wait() == 3 and ": saved; resume with" in child.output(), child.output()


def test_an_ignored_sighup_stays_ignored() -> None:
    """nohup: the run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("verb", ["train", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_resume_auto_starts_resumes_and_shows(bench: Bench, verb: str) -> None:
    """A queue repeats one command, whatever the state of the run."""
    out = bench.folder / f"{verb}_auto"
    words = [*bench.words(verb, out), "--resume", "auto"]
    assert bench.while_saving(2, verb, out, signal.SIGKILL, "--resume", "auto")[0] == -signal.SIGKILL
    status, output = bench.server.run(*words)
    assert status == 0 and "resuming" in output, output
    bench.check(verb, out)
    status, output = bench.server.run(*words)
    assert status == 0 and "is finished: this is its result" in output


def test_a_second_process_is_refused(bench: Bench) -> None:
    out = bench.folder / "shared"
    child = bench.server.start(*bench.words("train", out), "--steps", "100000")
    child.wait_for(out / "checkpoints" / "last.pt")
    status, output = bench.server.run("train", "--resume", str(out))
    assert status == 2 and f"Another process works in {out}" in output
    status, output = bench.server.run("train", "images", "--config", "train.yaml", "--out", str(out))
    assert status == 2 and "already holds a run" in output and "--resume auto" in output
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    status, output = bench.server.run("train", "--resume", str(out), kill_at=20, inside=out)
    assert status == -signal.SIGKILL, "the lock must vanish with its process"


@pytest.mark.parametrize(
    "fault", ["flipped", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("empty", "truncated"))]
)
def test_a_damaged_checkpoint_falls_back(bench: Bench, fault: str) -> None:
    out = bench.folder / f"damaged_{fault}"
    assert bench.while_saving(3, "train", out, signal.SIGKILL)[0] == -signal.SIGKILL
    last = out / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 0x10
    last.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[fault])
    output = bench.finish("train", out)
    assert "last.pt is damaged" in output and "going back to" in output and "previous.pt, step" in output
    bench.check("train", out)


def test_no_intact_checkpoint_is_one_line(bench: Bench) -> None:
    out = bench.folder / "damaged_both"
    assert bench.while_saving(3, "train", out, signal.SIGKILL)[0] == -signal.SIGKILL
    for name in ("last.pt", "previous.pt"):
        (out / "checkpoints" / name).write_bytes(b"nothing")
    metrics = (out / "metrics.jsonl").read_bytes()
    status, output = bench.server.run("train", "--resume", str(out))
    assert status == 2 and "No checkpoint of" in output and "Traceback" not in output
    assert (out / "metrics.jsonl").read_bytes() == metrics, "the metrics must stay"


def test_a_finished_run_is_shown(bench: Bench) -> None:
    out = bench.reference("train")
    before = (out / "summary.json").read_bytes()
    assert "is finished: this is its result" in bench.finish("train", out)
    assert (out / "summary.json").read_bytes() == before


def test_init_is_not_needed_twice(bench: Bench) -> None:
    """With a checkpoint, the weights of --init are not needed any more."""
    out, start = bench.folder / "started", bench.folder / "start"
    shutil.copytree(bench.reference("train") / "model", start)
    words = ["train", "images", "--config", "train.yaml", "--out", str(out), "--init", str(start)]
    assert bench.server.run(*words, kill_at=35, inside=out)[0] == -signal.SIGKILL
    assert (out / "checkpoints" / "last.pt").exists()
    shutil.rmtree(start)
    assert "resuming" in bench.finish("train", out)


def test_changed_data_is_warned(bench: Bench) -> None:
    out = bench.folder / "changed"
    images = write_images(bench.folder / "changing")
    words = ["train", "changing", "--config", "train.yaml", "--out", str(out)]
    status, output = bench.server.run(*words, kill_at=30, inside=out)
    assert status == -signal.SIGKILL, output
    extra = images / "train" / "cat" / "late.png"
    extra.write_bytes((images / "train" / "cat" / "0.png").read_bytes())
    output = bench.finish("train", out)
    assert "have changed since" in output and "24 images then, 25 now" in output


def test_changed_validation_images_are_warned(bench: Bench) -> None:
    out = bench.folder / "fewer"
    images = write_images(bench.folder / "fewer_images")
    words = ["train", "fewer_images", "--config", "train.yaml", "--out", str(out)]
    assert bench.server.run(*words, kill_at=30, inside=out)[0] == -signal.SIGKILL
    before = json.loads((out / "data.json").read_text())["evaluation"]["val"]["files"]
    (images / "val" / "cat" / "0.png").unlink()
    output = bench.finish("train", out)
    assert f"val of fewer_images has changed since {out} started ({before} files then, {before - 1} now)" in output
    assert "the images or annotations of" not in output  # those of train have not


def test_a_new_test_split_is_warned(bench: Bench) -> None:
    """A split that did not exist at the start is named, with 0 files then."""
    out = bench.folder / "grown"
    images = write_images(bench.folder / "grown_images")
    words = ["train", "grown_images", "--config", "train.yaml", "--out", str(out)]
    assert bench.server.run(*words, kill_at=30, inside=out)[0] == -signal.SIGKILL
    assert set(json.loads((out / "data.json").read_text())["evaluation"]) == {"val"}
    shutil.copytree(images / "val", images / "test")
    output = bench.finish("train", out)
    files = sum(path.is_file() for path in (images / "test").rglob("*"))
    assert f"test of grown_images has changed since {out} started (0 files then, {files} now)" in output
    assert "val of grown_images has changed" not in output


def test_threads_of_the_start_are_restored(bench: Bench) -> None:
    """Another number of CPU threads gives other last bits: a resumed run computes with the number of its start."""
    out = bench.folder / "threads"
    words = ["train", "images", "--config", "train.yaml", "--out", str(out)]
    assert bench.server.run(*words, kill_at=35, inside=out)[0] == -signal.SIGKILL
    facts = json.loads((out / "data.json").read_text())
    assert facts["threads"] == torch.get_num_threads()
    (out / "data.json").write_text(json.dumps(facts | {"threads": facts["threads"] + 1}))
    assert f"using {facts['threads'] + 1} CPU threads, as at the start" in bench.finish("train", out)
    before = torch.get_num_threads()
    try:
        restore_threads(RunFolder(out, writer=False), Fabric(accelerator="cpu", devices=1))
        assert torch.get_num_threads() == facts["threads"] + 1
    finally:
        torch.set_num_threads(before)


def test_other_classes_are_refused(bench: Bench) -> None:
    out = bench.folder / "classes"
    images = write_images(bench.folder / "growing")
    words = ["train", "growing", "--config", "train.yaml", "--out", str(out)]
    assert bench.server.run(*words, kill_at=30, inside=out)[0] == -signal.SIGKILL
    for split in ("train", "val"):
        (images / split / "cat").rename(images / split / "horse")
    status, output = bench.server.run("train", "--resume", str(out))
    assert status == 2 and "classes of growing have changed" in output
