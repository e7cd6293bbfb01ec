"""What PyTorch is told about the processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from frugalvit.training import devices, processors


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    processors._onednn_is_slow.cache_clear()
    yield
    processors._onednn_is_slow.cache_clear()
    torch.backends.mkldnn.enabled = enabled
    torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN to leave out")
@pytest.mark.parametrize(("with_it", "without", "kept"), [(40.0, 1.0, False), (1.2, 1.0, True), (0.5, 1.0, True)])
def test_onednn_is_left_out_where_it_is_much_slower(
    with_it: float, without: float, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.backends.mkldnn.enabled = True
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(processors, "_seconds", lambda: with_it if torch.backends.mkldnn.enabled else without)
    processors.tune_for_cpu()
    assert torch.backends.mkldnn.enabled == kept
    assert ("oneDNN is left out" in capsys.readouterr().err) != kept


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN to leave out")
def test_a_second_run_of_a_process_finds_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two, ``fv.train`` gave the caller oneDNN back."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    measured = iter([40.0, 1.0])
    monkeypatch.setattr(processors, "_seconds", lambda: next(measured))
    for _ in range(2):
        torch.backends.mkldnn.enabled = True
        processors.tune_for_cpu()
        assert not torch.backends.mkldnn.enabled


def test_other_processors_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    measured: list[int] = []
    monkeypatch.setattr(processors, "_seconds", lambda: measured.append(1) or 1.0)
    before = torch.backends.mkldnn.enabled
    processors.tune_for_cpu()
    assert not measured
    assert torch.backends.mkldnn.enabled == before


def test_the_measurement_leaves_the_threads_alone() -> None:
    torch.set_num_threads(2)
    assert processors._seconds() > 0
    assert torch.get_num_threads() == 2


def test_a_gpu_is_queued_for_by_one_thread() -> None:
    torch.set_num_threads(2)
    processors.tune_for_gpu()
    assert torch.get_num_threads() == 1
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("device", "tuned"), [("cpu", [1]), ("cuda", [])])
def test_whoever_computes_on_the_cpu_has_it_tuned(
    device: str, tuned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(devices, "tune_for_cpu", lambda: calls.append(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.pick_device(device) == device and calls == tuned


def test_pytorch_as_it_comes_for_a_while() -> None:
    torch.backends.mkldnn.enabled = False
    with processors.as_pytorch_comes():
        assert torch.backends.mkldnn.enabled
    assert not torch.backends.mkldnn.enabled
