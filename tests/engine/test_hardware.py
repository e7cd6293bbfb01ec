"""Settings of PyTorch for the processor."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from frugalvit.engine import hardware


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    enabled, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    hardware._onednn_is_slow.cache_clear()
    yield
    hardware._onednn_is_slow.cache_clear()
    hardware.configure_cpu()  # says its line here, not in the midst of the next test
    torch.backends.mkldnn.enabled = enabled
    torch.set_num_threads(threads)


ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd {more}\nCPU part\t: 0xd0c\n"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN to leave out")
@pytest.mark.parametrize(
    ("machine", "features", "kept"),
    [
        ("aarch64", {"asimd"}, False),
        ("aarch64", {"asimd", "sve"}, True),
        ("arm64", set(), True),
        ("x86_64", {"x"}, True),
    ],
)
def test_onednn_is_off_without_its_own_kernels(
    machine: str,
    features: set[str],
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(hardware, "_arm_features", lambda: features)
    for _ in range(2):  # between two runs of a process ``fv.train`` gave the caller oneDNN back
        torch.backends.mkldnn.enabled = True
        hardware.configure_cpu()
        assert torch.backends.mkldnn.enabled == kept
    assert capsys.readouterr().err.count("oneDNN is off") == (0 if kept else 1)


def test_read_processor_features(tmp_path: Path) -> None:
    said = tmp_path / "cpuinfo"
    assert hardware._arm_features(said) == set(), "another system"
    said.write_text(ARM.format(more="sve") * 2)
    assert hardware._arm_features(said) == {"fp", "asimd", "sve"}
    said.write_text("flags\t\t: fpu avx2\n")
    assert hardware._arm_features(said) == set()


def test_settings_do_not_depend_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement would make resumed runs differ."""
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a clock was asked"))
    decided = set()
    for _ in range(3):
        hardware._onednn_is_slow.cache_clear()
        decided.add(hardware._onednn_is_slow())
    assert len(decided) == 1


def test_gpu_run_uses_one_thread() -> None:
    torch.set_num_threads(2)
    hardware.configure_cuda()
    assert torch.get_num_threads() == 1
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("device", "tuned"), [("cpu", [1]), ("cuda", [])])
def test_cpu_commands_tune_pytorch(device: str, tuned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(hardware, "configure_cpu", lambda: calls.append(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hardware.pick_device(device) == device and calls == tuned


def test_default_settings_context() -> None:
    torch.backends.mkldnn.enabled = False
    with hardware.default_onednn():
        assert torch.backends.mkldnn.enabled
    assert not torch.backends.mkldnn.enabled
