"""The numbers that "auto" chooses where nobody asks: each by hand from the rule that is written beside it."""

from typing import Any

import pytest

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.image_size import input_size
from frugalvit.engine.step import total_steps
from frugalvit.experiment.auto_values import (
    AutoValues,
    Facts,
    localization_weight,
    resolve_pretraining,
    resolve_training,
    teacher_temperature,
)

KINDS: dict[str, tuple[Facts, dict[str, Any]]] = {
    # 32 images a step are counted as 64, rates have two digits; 2 million are seen, in 800 epochs at most.
    "flowers": (
        Facts(2_040, 102, 224, "cuda"),
        {"batch": 32, "epochs": 800, "lr": 0.00013, "prototypes": 256, "momentum": 0.996, "teacher_temp": 0.07},
    ),
    # One prototype for sixteen images is 3,125, between 2,048 and 4,096; 8 million small images are seen.
    "cifar": (
        Facts(50_000, 100, 32, "cuda"),
        {"batch": 256, "epochs": 160, "lr": 5e-4, "prototypes": 4096, "momentum": 0.996, "teacher_temp": 0.04},
    ),
    "imagenet": (
        Facts(1_281_167, 1000, 400, "cuda"),
        {"batch": 256, "epochs": 100, "lr": 5e-4, "prototypes": 65536, "momentum": 0.996, "teacher_temp": 0.07},
    ),
    # Forty thousand images are seen, 1,197 steps: the teacher follows as fast as it may.
    "cpu": (
        Facts(2_040, 102, 64, "cpu"),
        {"batch": 32, "epochs": 19, "lr": 0.00013, "prototypes": 256, "momentum": 0.98, "teacher_temp": 0.04},
    ),
    "few": (
        Facts(100, 2, 64, "cpu"),
        {"batch": 8, "epochs": 100, "lr": 0.00013, "prototypes": 256, "momentum": 0.98, "teacher_temp": 0.07},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pretraining_values(kind: str) -> None:
    facts, expected = KINDS[kind]
    config = PretrainConfig.parse({"data": "x", "img_size": min(facts.side, 224)})
    config = resolve_pretraining(config, facts, AutoValues())
    found = {name: getattr(config, name) for name in ("batch", "epochs", "lr")}
    found |= {name: getattr(config.matching, name) for name in ("prototypes", "momentum", "teacher_temp")}
    assert found == expected


@pytest.mark.parametrize(
    ("epochs", "side", "temperature"), [(50, 224, 0.07), (49.9, 224, 0.04), (300, 33, 0.07), (300, 32, 0.04)]
)
def test_teacher_temperature(epochs: float, side: int, temperature: float) -> None:
    assert teacher_temperature(epochs, side)[0] == temperature


@pytest.mark.parametrize(("steps", "rate"), [(10, 0.9), (200, 0.9), (2_976, 0.99328), (10_000, 0.998), (10**6, 0.9998)])
def test_ema_rate(steps: int, rate: float) -> None:
    config = TrainConfig.parse({"data": "x", "steps": steps})
    config = resolve_training(config, Facts(2_040, 102, 224, "cuda", "swin", 28_000_000), AutoValues())
    assert config.ema == rate


@pytest.mark.parametrize(
    ("given", "images", "steps"),
    [
        ({"epochs": 1.5}, 105, 15),  # an epoch is ten full batches
        ({"epochs": 0.29}, 100, 3),
        ({"epochs": 0.01}, 100, 1),
        ({"epochs": 2}, 7, 2),  # fewer images than a batch are one
        ({"steps": 7, "epochs": 3}, 100, 7),
    ],
)
def test_total_steps(given: dict[str, float], images: int, steps: int) -> None:
    assert total_steps(given.get("steps"), given.get("epochs", 0.0), images, 10) == steps


@pytest.mark.parametrize(
    ("side", "device", "size"),
    [
        (28, "cuda", 28), (64, "cuda", 64), (65, "cuda", 64), (95, "cuda", 64), (96, "cuda", 96), (255, "cuda", 224),
        (500, "cuda", 224), (50, "cpu", 50), (95, "cpu", 64), (500, "cpu", 64), (200, "mps", 192),
    ],
)  # fmt: skip
def test_input_size(side: int, device: str, size: int) -> None:
    """Small images stay, others come down to a multiple of 32: nothing is enlarged."""
    assert input_size(side, device) == size


@pytest.mark.parametrize(
    ("family", "weight"), [("swin", 0.5), ("t2t", 0.1), ("cvt", 0.1), ("vit", 0.01), ("resnet", 0.1), ("", 0.1)]
)
def test_drloc_weight(family: str, weight: float) -> None:
    assert localization_weight(family)[0] == weight
