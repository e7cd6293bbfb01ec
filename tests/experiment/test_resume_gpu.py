"""Exact resume on a GPU, with kernels, torch.compile and CUDA graphs."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.engine.step import TrainStep
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, write_images

# Heads as wide as the window kernel wants them, and enough prototypes for the chunked loss and its softmax kernel.
SHAPE = {"backbone_args": {"embed_dim": 32, "depths": [2, 2], "num_heads": [1, 2]}, "img_size": 32}
WIDE = {"matching": PRETRAIN["matching"] | {"prototypes": 65536}, "crops": {"local_crops": 4}}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "train": (train, TrainConfig, TRAIN | SHAPE),
    "pretrain": (pretrain, PretrainConfig, PRETRAIN | SHAPE | WIDE),
}


class Cut(Exception):
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True, "graphs"])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_and_resumed(kind: str, compiled: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, config, values = KINDS[kind]
    values = values | {"data": str(write_images(tmp_path / "images")), "device": "cuda", "compile": compiled}
    command(config.parse(values | {"out": str(tmp_path / "whole")}))

    step = TrainStep.one_step

    def until_seven(self: TrainStep) -> None:
        if self.step == 7:
            raise Cut
        step(self)

    cut = config.parse(values | {"out": str(tmp_path / "cut")})
    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "one_step", until_seven)
        with pytest.raises(Cut):
            command(cut)
    command(config.parse({"resume": str(tmp_path / "cut"), "device": "cuda"}))
    assert differences(tmp_path / "whole", tmp_path / "cut") == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_and_resumed_in_fp16(kind: str, tmp_path: Path) -> None:
    """What GPUs without bf16 do by themselves: the fused optimiser, and a scale that is looked for."""
    command, config, values = KINDS[kind]
    values = values | {"data": str(write_images(tmp_path / "images")), "device": "cuda", "precision": "fp16"}
    if kind == "pretrain":  # with heads of the usual width: one of eight needs a scale that takes longer to find
        values = values | {"matching": {"prototypes": 65536}}
    outcome = command(config.parse(values | {"compile": False, "out": str(tmp_path / "run")})).data
    assert outcome["skipped_steps"] < outcome["steps"]
