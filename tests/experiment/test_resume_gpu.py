"""Exact resume on a GPU, with kernels, torch.compile and CUDA graphs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frugalvit.engine import compile
from frugalvit.runs.run_folder import RunFolder
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, interrupted_at, run_tiny, write_config

# Heads as wide as the window kernel wants them, and enough prototypes for the chunked loss and its softmax kernel.
SHAPE = {"backbone_args": {"embed_dim": 32, "depths": [2, 2], "num_heads": [1, 2]}, "img_size": 32}
WIDE = {"matching": PRETRAIN["matching"] | {"prototypes": 65536}, "crops": {"local_crops": 4}}  # type: ignore[operator]
KINDS: dict[str, dict[str, Any]] = {"train": SHAPE, "pretrain": SHAPE | WIDE}
HYBRID = {"backbone": "hybrid_nano", "backbone_args": {}, "drop_path": 0.1}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True, "graphs"])
@pytest.mark.parametrize("verb", KINDS)
def test_cut_off_and_resumed(verb: str, compiled: bool | str, photos: Path, tmp_path: Path) -> None:
    values = KINDS[verb] | {"data": photos, "device": "cuda", "compile": compiled}
    run_tiny(verb, out=tmp_path / "complete", **values)
    with interrupted_at(7):
        run_tiny(verb, out=tmp_path / "cut", **values)
    run_tiny(verb, resume=tmp_path / "cut", device="cuda")
    assert differences(tmp_path / "complete", tmp_path / "cut") == []


@pytest.mark.gpu
@pytest.mark.parametrize("verb", KINDS)
def test_hybrids_replay_their_steps(verb: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--compile auto`` replays PyTorch's own kernels: the same losses as without graphs, and exact resume."""
    monkeypatch.setattr(compile, "REPLAYS_FROM", 0)
    values = KINDS[verb] | HYBRID | {"data": photos, "device": "cuda"}
    run_tiny(verb, out=tmp_path / "plain", **values, compile=False)
    run_tiny(verb, out=tmp_path / "complete", **values)
    with interrupted_at(7):
        run_tiny(verb, out=tmp_path / "cut", **values)
    run_tiny(verb, resume=tmp_path / "cut", device="cuda")
    assert differences(tmp_path / "complete", tmp_path / "cut") == []
    plain, replayed = (
        [row["loss"] for row in RunFolder(tmp_path / name).metrics() if "loss" in row] for name in ("plain", "complete")
    )
    assert replayed == pytest.approx(plain, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("network", [SHAPE, SHAPE | HYBRID], ids=["swin", "hybrid"])
@pytest.mark.parametrize("compiled", [False, True, "graphs"])
def test_same_seed_twice(network: dict[str, Any], compiled: bool | str, photos: Path, tmp_path: Path) -> None:
    """Two processes on one machine. They share the compiler's cache, which keeps the kernels it chose by time."""
    values = TRAIN | network | {"compile": compiled, "data": str(photos), "device": "cuda"}
    config = write_config(tmp_path / "train.yaml", values)
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    for number in "12":
        words = ["-m", "frugalvit.cli", "train", "--config", str(config), "--out", str(tmp_path / f"run_{number}")]
        subprocess.run([sys.executable, *words], check=True, env=os.environ | caches)
    assert differences(tmp_path / "run_1", tmp_path / "run_2") == []


@pytest.mark.gpu
@pytest.mark.parametrize("verb", KINDS)
def test_fp16_finds_its_scale(verb: str, photos: Path, tmp_path: Path) -> None:
    """On GPUs without bf16: the fused optimizer, and a gradient scale that is searched."""
    values = KINDS[verb] | {"data": photos, "device": "cuda", "precision": "fp16", "compile": False}
    if verb == "pretrain":  # a head of width eight needs a scale that takes longer to find
        values["matching"] = {"prototypes": 65536}
    outcome = run_tiny(verb, out=tmp_path / "run", **values).data
    assert outcome["skipped_steps"] < outcome["steps"]
