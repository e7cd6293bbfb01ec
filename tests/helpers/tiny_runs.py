"""The smallest data and settings that use every part of training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from frugalvit.config.defaults import Facts
from frugalvit.experiment import resolve as resolving

# The shape that frugalvit chooses for 16 pixels; explicit, because each choice builds several networks.
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": 2, "window_size": 8}
TRAIN = {
    "backbone": "swin_nano",
    "backbone_args": SWIN,
    "img_size": 16,
    "steps": 10,
    "batch": 8,
    "lr": 1e-3,
    "log_every": 2,
    "save_every": 3,
    "evaluate_every": 4,
    "ema": 0.9,
    "report": False,
    "localization": {"weight": 0.5, "hidden": 8, "pairs": 4},
}
PRETRAIN = {
    "backbone": "swin_nano",
    "backbone_args": SWIN,
    "img_size": 16,
    "steps": 10,
    "batch": 8,
    "lr": 1e-3,
    "save_every": 3,
    "report": False,
    "crops": {"local_crops": 2, "local_size": 8},
    "matching": {"prototypes": 16, "hidden": 8, "bottleneck": 4, "momentum": 0.9, "regions_from": 1.0},
    "health": {"images": 16},
}
DISTIL = {name: PRETRAIN[name] for name in PRETRAIN if name not in ("crops", "matching")}
_TIMES = ("images_per_second", "seconds", "seconds_per_step", "run")


def write_images(folder: Path, *, train: int = 12, val: int = 5, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """Write class folders of small noisy images; the brightness shows the class."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 128, (16, 16, 3)) + 100 * (number % 2)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return folder


def write_config(path: Path, values: dict[str, Any], **more: Any) -> Path:
    path.write_text(yaml.safe_dump(values | more), encoding="utf-8")
    return path


def run_tiny(verb: str, **values: Any) -> Any:
    """Run ``train`` or ``pretrain`` on a CPU with tiny settings; a resumed run gets only ``values``."""
    from frugalvit.config.pretrain import PretrainConfig
    from frugalvit.config.train import TrainConfig
    from frugalvit.tasks.classification.train import train
    from frugalvit.tasks.pretraining.train import pretrain

    tiny: dict[str, Any] = {} if "resume" in values else {"train": TRAIN, "pretrain": PRETRAIN}[verb]
    values = tiny | {"device": "cpu"} | {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
    return train(TrainConfig.parse(values)) if verb == "train" else pretrain(PretrainConfig.parse(values))


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Interrupt the run inside the block before this step."""
    from frugalvit.engine.step import TrainStep

    one_step = TrainStep.one_step

    def until(self: TrainStep) -> None:
        if self.step == step:
            raise KeyboardInterrupt
        one_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "one_step", until)
        with pytest.raises(KeyboardInterrupt):
            yield


def load_state(run: Path, name: str = "last.pt") -> dict[str, Any]:
    """Load a checkpoint of a run."""
    return torch.load(run / "checkpoints" / name, weights_only=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in lines]


def differences(first: Path, second: Path) -> list[str]:
    """List the differences between two finished runs, to the bit, without times."""
    result = [] if read_metrics(first) == read_metrics(second) else ["metrics.jsonl"]
    for name in ("last.pt", "previous.pt", "best.pt"):
        paths = [run / "checkpoints" / name for run in (first, second)]
        if paths[0].exists() != paths[1].exists():
            result.append(f"{name} exists in one only")
        elif paths[0].exists() and name != "previous.pt":  # an interrupted run may have saved at other steps before
            one, other = (torch.load(path, weights_only=True) for path in paths)
            result += [f"{name}: {where}" for where in unequal_parts(one, other)]
    if (first / "model" / "model.safetensors").read_bytes() != (second / "model" / "model.safetensors").read_bytes():
        result.append("model.safetensors")
    one, other = (json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (first, second))
    result += [f"summary.json: {key}" for key in one | other if key not in _TIMES and one.get(key) != other.get(key)]
    return result


def unequal_parts(one: Any, other: Any, where: str = "") -> list[str]:
    """List the parts of two states that differ, to the bit."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict):
        keys = [key for key in one | other if key not in _TIMES]
        return [path for key in keys for path in unequal_parts(one.get(key), other.get(key), f"{where}/{key}")]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=True))
        return [path for number, (a, b) in pairs for path in unequal_parts(a, b, f"{where}/{number}")]
    return [] if one == other else [where]


def resolve(config: Any, images: int = 64, **facts: Any) -> Any:
    """The resolved configuration of a run on this many images of two classes, on a CPU."""
    from frugalvit.experiment import resolve_dense

    known, auto = Facts(images, 2, 32, "cpu", **facts), resolving.AutoValues()
    if config.recipe_task == "train":
        return resolving.resolve_training(config, known, auto)
    if config.recipe_task == "pretrain":
        return resolving.resolve_pretraining(config, known, auto)
    if config.recipe_task == "distil":
        return resolving.resolve_distillation(config, known, auto)
    if config.recipe_task == "segment":
        return resolve_dense.resolve_segmentation(config, known, auto)
    return resolve_dense.resolve_detection(config, known, [4, 8, 16, 32, 64], (0, 9), auto)
