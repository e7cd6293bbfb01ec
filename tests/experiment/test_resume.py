"""A run that is killed and resumed ends with the same bits as one that was not."""

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

from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils.signals import stop_signals
from helpers.fork_server import ForkServer
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, write_config, write_images

VERBS = ("train", "pretrain")


@dataclass
class Bench:
    """Data, settings, the processes, and one undisturbed run of each kind with the seconds it took."""

    folder: Path
    server: ForkServer
    seconds: dict[str, float]

    def words(self, verb: str, out: Path) -> list[str]:
        """The command that starts ``out``, or goes on with it where it has begun."""
        if (out / "config.yaml").exists():
            return [verb, "--resume", str(out)]
        cache = (
            ["--cache.where", "disk", "--cache.folder", str(out.with_suffix(".cache"))] if verb == "pretrain" else []
        )
        return [verb, "images", "--config", f"{verb}.yaml", "--out", str(out), *cache]

    def finish(self, verb: str, out: Path) -> str:
        status, said = self.server.run(*self.words(verb, out))
        assert status == 0, said
        return said

    def while_saving(self, which: int, verb: str, out: Path, number: signal.Signals, *more: str) -> tuple[int, str]:
        """A new run that sends itself a signal as it begins to write its first, second … ``last.pt``."""
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
        """From the run that was left alone; half-written files that were left behind count too."""
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
    server.run("--version")  # answers once everything is imported, so that the first times are fair
    return Bench(folder, server, {})


def kill_at_random(bench: Bench, verb: str, seed: int, kills: int) -> list[str]:
    """One run, killed again and again: at any time of its life, at start-up and at the end too. What differs then."""
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
        killed += status != 0  # one that came too late met a run that had ended
    print(f"{verb}: {killed} kills at random moments, seed {seed}")
    bench.finish(verb, out)
    return bench.differences(verb, out)


def kill_at_write(bench: Bench, verb: str, number: int) -> bool:
    """A run of its own that dies at its n-th operation on files; whether it came that far."""
    out = Path(mkdtemp(dir=bench.folder, prefix=f"{verb}_write_{number}_")) / "run"
    status, said = bench.server.run(*bench.words(verb, out), kill_at=number, inside=out)
    assert status in (0, -signal.SIGKILL), said
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
    """What was tried with lies in the folder of checkpoints, where it is no checkpoint of anybody's."""
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
        pytest.skip(f"{number.name} is ignored here (nohup), and so it is by a run")
    out = bench.folder / f"{verb}_{number.name}"
    status, said = bench.while_saving(2, verb, out, number)
    assert status == 3, said
    assert f"{number.name}: saved; resume with 'frugalvit {verb} --resume {out}'" in said
    step = torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"]
    assert step == 7 and f"at step {step} of 10" in bench.finish(verb, out)
    bench.check(verb, out)


def test_a_signal_in_the_last_step_stops_the_comparison(bench: Bench) -> None:
    """The run has nothing left to stop, but a comparison has: its next run is not begun."""
    out = bench.folder / "compared"
    settings = ["--with", "lr=0.001", "--without", "lr=0.002", "--seeds", "1", "--steps", "1"]
    words = ["compare", "images", "--config", "train.yaml", *settings, "--out", str(out)]
    last = out / "with" / "seed_0" / "checkpoints" / ".last.pt"
    status, said = bench.server.run(*words, kill_at=0, inside=last, signals=[signal.SIGINT])
    assert status == 3 and "stopped; the same command continues." in said, said
    assert (out / "with" / "seed_0" / "summary.json").exists() and not (out / "without").exists()
    assert bench.server.run(*words)[0] == 0 and (out / "comparison.md").exists()


def test_a_second_signal_stops_at_once(bench: Bench) -> None:
    out = bench.folder / "twice"
    child = bench.server.start(*bench.words("train", out), "--steps", "100000")
    child.wait_for(out / "metrics.jsonl")
    # While it is stopped both signals wait; then they arrive within one step.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        child.send(number)
    assert child.wait() == 130 and "stopped." in child.output() and "Traceback" not in child.output()


def test_a_second_signal_waits_for_the_checkpoint(bench: Bench) -> None:
    """An exception from the midst of torch.save was swallowed there, or ended the run as a fault of the disk."""
    out = bench.folder / "twice_while_saving"
    both = {"kill_at": 0, "inside": out / "checkpoints" / ".last.pt", "signals": [signal.SIGINT, signal.SIGTERM]}
    status, said = bench.server.run(*bench.words("train", out), **both)
    assert status == 130 and "stopped." in said and "Could not save" not in said, said
    assert torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"] == 3
    bench.finish("train", out)
    bench.check("train", out)


def test_a_third_signal_is_not_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's writer, left half-way, raises an error of its own on top of the signal's."""

    def left_half_way(state: object, handle: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 114496 vs 114392")

    monkeypatch.setattr(torch, "save", left_half_way)
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
    """What a queue needs: one command, whatever has become of the run."""
    out = bench.folder / f"{verb}_auto"
    words = [*bench.words(verb, out), "--resume", "auto"]
    assert bench.while_saving(2, verb, out, signal.SIGKILL, "--resume", "auto")[0] == -signal.SIGKILL
    status, said = bench.server.run(*words)
    assert status == 0 and "resuming" in said, said
    bench.check(verb, out)
    status, said = bench.server.run(*words)
    assert status == 0 and "is finished: this is its result" in said


def test_a_second_process_is_refused(bench: Bench) -> None:
    out = bench.folder / "shared"
    child = bench.server.start(*bench.words("train", out), "--steps", "100000")
    child.wait_for(out / "checkpoints" / "last.pt")
    status, said = bench.server.run("train", "--resume", str(out))
    assert status == 2 and f"Another process works in {out}" in said
    status, said = bench.server.run("train", "images", "--config", "train.yaml", "--out", str(out))
    assert status == 2 and "already holds a run" in said and "--resume auto" in said
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    status, said = bench.server.run("train", "--resume", str(out), kill_at=20, inside=out)
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
    said = bench.finish("train", out)
    assert "last.pt is damaged" in said and "going back to" in said and "previous.pt, step" in said
    bench.check("train", out)


def test_no_intact_checkpoint_is_one_line(bench: Bench) -> None:
    out = bench.folder / "hopeless"
    assert bench.while_saving(3, "train", out, signal.SIGKILL)[0] == -signal.SIGKILL
    for name in ("last.pt", "previous.pt"):
        (out / "checkpoints" / name).write_bytes(b"nothing")
    metrics = (out / "metrics.jsonl").read_bytes()
    status, said = bench.server.run("train", "--resume", str(out))
    assert status == 2 and "No checkpoint of" in said and "Traceback" not in said
    assert (out / "metrics.jsonl").read_bytes() == metrics, "what was earned must stay"


def test_a_finished_run_is_shown(bench: Bench) -> None:
    out = bench.reference("train")
    before = (out / "summary.json").read_bytes()
    assert "is finished: this is its result" in bench.finish("train", out)
    assert (out / "summary.json").read_bytes() == before


def test_init_is_not_needed_twice(bench: Bench) -> None:
    """Once there is a checkpoint, the weights a run began with may be gone."""
    out, start = bench.folder / "begun", bench.folder / "start"
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
    status, said = bench.server.run(*words, kill_at=30, inside=out)
    assert status == -signal.SIGKILL, said
    extra = images / "train" / "cat" / "late.png"
    extra.write_bytes((images / "train" / "cat" / "0.png").read_bytes())
    said = bench.finish("train", out)
    assert "have changed since" in said and "24 then, 25 now" in said


def test_other_classes_are_refused(bench: Bench) -> None:
    out = bench.folder / "classes"
    images = write_images(bench.folder / "growing")
    words = ["train", "growing", "--config", "train.yaml", "--out", str(out)]
    assert bench.server.run(*words, kill_at=30, inside=out)[0] == -signal.SIGKILL
    for split in ("train", "val"):
        (images / split / "cat").rename(images / split / "horse")
    status, said = bench.server.run("train", "--resume", str(out))
    assert status == 2 and "classes of growing have changed" in said
