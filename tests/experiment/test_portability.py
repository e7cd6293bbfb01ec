"""Other machines: Apple's GPU (a fake), the spawn start method, names and locks of Windows."""

import ast
import re
from pathlib import Path

import pytest
import torch

import frugalvit
from frugalvit.config.data import AugmentConfig, CropsConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation import operations
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import EvalTransform, TrainAugment
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.engine.hardware import numbered_device, pick_device, precision_name
from frugalvit.engine.health import effective_rank, feature_deviation
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.runs.run_folder import new_run_folder
from frugalvit.tasks.classification.metrics import ClassificationScores
from helpers.fake_mps import MPS, AppleGpu
from helpers.fork_server import ForkServer
from helpers.tiny_runs import TRAIN, differences, write_config, write_images

SOURCE = Path(frugalvit.__file__).parent


# -- Apple's GPU


@pytest.mark.parametrize(
    ("cuda", "mps", "expected", "precision"),
    [(True, True, "cuda", "bf16-mixed"), (False, True, "mps", "32-true"), (False, False, "cpu", "32-true")],
)
def test_device_auto(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str, precision: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert pick_device("auto") == expected
    assert precision_name("auto", expected) == precision
    if not mps:
        with pytest.raises(UserError, match="no mps device"):
            pick_device("mps")


def test_one_process_on_apples_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match="--devices 1"):
        builders.make_fabric(TrainConfig(device="mps", devices=2))


def test_metrics_need_no_float64() -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(20, 6), torch.arange(20) % 3
    expected = (effective_rank(features), feature_deviation(features))
    here = ClassificationScores(3, torch.device("cpu"))
    here.add(features[:, :3], labels, torch.arange(20))
    with AppleGpu():
        there = features.to(MPS)
        assert (effective_rank(there), feature_deviation(there)) == pytest.approx(expected)
        scores = ClassificationScores(3, MPS)
        scores.add(there[:, :3], labels.to(MPS), torch.arange(20))
        assert scores.summary() == here.summary()


@pytest.mark.parametrize("kind", ["train", pytest.param("crops", marks=pytest.mark.slow), "eval"])
def test_augmentation_needs_no_float64(kind: str) -> None:
    """Parameters are drawn as doubles on the CPU; what reaches the device are floats."""
    images = torch.randint(0, 255, (6, 3, 24, 30), dtype=torch.uint8)
    sizes = torch.tensor([[24, 30]] * 6)
    means = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    everything = AugmentConfig(jitter=(0.4, 0.4, 0.4, 0.1), grayscale=0.5, blur=0.5, erasing=0.5, operation_prob=1.0)
    make = {
        "train": lambda: TrainAugment(everything, 16, **means),
        "crops": lambda: MultiCrop(CropsConfig(local_crops=2, local_size=8), 16, **means),
        "eval": lambda: EvalTransform(16, **means),
    }[kind]

    def views(pixels: torch.Tensor) -> list[torch.Tensor]:
        augment = make()
        if isinstance(augment, EvalTransform):
            return [augment(pixels[..., :16, :16])]
        numbers = uniform(6, augment.columns, generator_for(0, "augment", 3))
        made = augment.apply(pixels, sizes, numbers)
        return made if isinstance(made, list) else [made]

    expected = views(images)
    with AppleGpu():
        for view, wanted in zip(views(images.to(MPS)), expected, strict=True):
            torch.testing.assert_close(view.cpu(), wanted, rtol=1e-3, atol=1e-3)


def test_bicubic_sampling_on_mps() -> None:
    """MPS has no bicubic sampling; the replacement differs by half a per cent on noise."""
    images, fill = torch.rand(6, 3, 24, 30), torch.full((3,), 0.5)
    maps = operations.rotation(torch.linspace(-30, 30, 6))
    expected = operations.affine(images, maps, fill, "bicubic")
    with AppleGpu():
        found = operations.affine(images.to(MPS), maps.to(MPS), fill.to(MPS), "bicubic")
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0.02)


def test_mixing_needs_no_float64() -> None:
    config = TrainConfig()
    mixing = Mixing(config.mixing, 3)
    blend = mixing.draw((16, 16), generator_for(0, "mixing", 1))
    images, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    expected = mixing.apply(images, labels, blend)
    with AppleGpu():
        mixed = mixing.apply(images.to(MPS), labels.to(MPS), blend)
        for one, other in zip(mixed, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)


def test_float64_is_copied_as_float32() -> None:
    with AppleGpu():
        shipped = to_device_packed([torch.rand(3, dtype=torch.float64), torch.arange(3)], MPS)
    assert [tensor.dtype for tensor in shipped] == [torch.float32, torch.int64]


# -- processes


@pytest.mark.slow
def test_spawned_workers_decode_the_same(tmp_path: Path) -> None:
    server = ForkServer(tmp_path)
    write_images(tmp_path / "images")
    config = write_config(tmp_path / "config.yaml", TRAIN, cache={"location": "off"}, steps=4)
    for workers in ("0", "1"):
        words = ["train", "images", "--config", str(config), "--out", f"with_{workers}", "--workers", workers]
        status, output = server.run(*words)
        assert status == 0, output
    assert differences(tmp_path / "with_0", tmp_path / "with_1") == []


def test_nothing_forks() -> None:
    """A fork of a process with threads can hang, and Windows has no fork: every pool is spawned."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "os.fork" not in text and 'get_context("fork")' not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ProcessPoolExecutor":
                assert "spawn" in ast.unparse(node), f"{path} does not spawn its processes"


# -- Windows


@pytest.mark.parametrize("word", ["hf:org/data", "C:\\photos", "https://far/{0..3}.tar?x=1", 'a<b>|"c"*', "x" * 400])
def test_run_folder_names_are_portable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = new_run_folder(None, "train", word).name
    assert not re.search(r'[<>:"/\\|?*\x00-\x1f]', name) and not name.endswith((".", " ")) and len(name) < 200


_POSIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "tty"}
_POSIX_CALLS = re.compile(
    r"\b(os\.(fork|geteuid|getuid|setsid|killpg|getpgid|mkfifo|sched_getaffinity|posix_\w+)|"
    r"signal\.(SIGKILL|SIGHUP|SIGUSR\d|SIGALRM|SIGSTOP|SIGCONT|SIGCHLD)|O_DIRECTORY)\b"
)


def test_posix_calls_are_guarded() -> None:
    """POSIX modules are imported inside functions, and POSIX calls are guarded by a check."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not _POSIX_ONLY & set(names), f"{path} imports {names}, which Windows does not have"
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if _POSIX_CALLS.search(line):
                before = "\n".join(lines[max(0, number - 8) : number + 1])
                assert "hasattr(os" in before or "os.name" in before, f"{path}:{number + 1} is for POSIX only: {line}"


@pytest.mark.parametrize("wanted", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_device_with_index(wanted: str | torch.device) -> None:
    assert numbered_device(wanted) == ("cpu", 0)


@pytest.mark.parametrize("wanted", ["cpu:1", "cpu:x", "auto:0", "gpu"])
def test_missing_device(wanted: str) -> None:
    with pytest.raises(UserError, match=r"no device|Unknown device"):
        numbered_device(wanted)
