"""Settings of PyTorch for the processor."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.cli import doctor
from frugalvit.engine import hardware


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    enabled, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    hardware.is_onednn_slow.cache_clear()
    yield
    hardware.is_onednn_slow.cache_clear()
    hardware.configure_cpu()  # logs its line now, not in the next test
    torch.backends.mkldnn.enabled = enabled
    torch.set_num_threads(threads)


ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd {more}\nCPU part\t: 0xd0c\n"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN to leave out")
@pytest.mark.parametrize(
    ("machine", "features", "is_enabled"),
    [
        ("aarch64", {"asimd"}, False),
        ("aarch64", {"asimd", "sve"}, True),
        ("arm64", set(), True),
        ("x86_64", {"x"}, True),
    ],
)
def test_onednn_is_off_without_its_own_kernels(
    machine: str, features: set[str], is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(hardware, "_arm_features", lambda: features)
    for _ in range(2):  # ``fv.train`` restores the setting of the caller between two runs
        torch.backends.mkldnn.enabled = True
        hardware.configure_cpu()
        assert torch.backends.mkldnn.enabled == is_enabled
    assert any("oneDNN is off" in device["units"] for device in doctor._devices()) != is_enabled


def test_read_processor_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert hardware._arm_features(cpuinfo) == set(), "another system"
    cpuinfo.write_text(ARM.format(more="sve") * 2)
    assert hardware._arm_features(cpuinfo) == {"fp", "asimd", "sve"}
    cpuinfo.write_text("flags\t\t: fpu avx2\n")
    assert hardware._arm_features(cpuinfo) == set()


def test_settings_do_not_depend_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement would make resumed runs differ."""
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a clock was read"))
    decided = set()
    for _ in range(3):
        hardware.is_onednn_slow.cache_clear()
        decided.add(hardware.is_onednn_slow())
    assert len(decided) == 1


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexed sums and everything else raise no error, and nothing is filled with NaN."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    try:
        hardware.use_deterministic_algorithms()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] and not memory.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = filled
