"""The defaults of the learning rate, batch, length and the like: each number by hand from the rule beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from frugalvit.config import defaults
from frugalvit.config.defaults import Facts
from frugalvit.data.image_size import input_size
from frugalvit.engine.step import total_steps

SWIN_T, NANO = 28_000_000, 400_000
FLOWERS, CIFAR = Facts(2_040, 102, 224, "cuda"), Facts(50_000, 100, 32, "cuda")


@pytest.mark.parametrize(
    ("batch", "parameters", "finetune", "lr"),
    [
        (1024, SWIN_T, False, 1e-3),
        (128, SWIN_T, False, 3.5e-4),
        (1024, SWIN_T, True, 5e-4),
        (16, NANO, False, 5e-4),
        (1024, NANO, True, 2e-3),
        (1024, 0, False, 1e-3),
    ],
)
def test_supervised_lr(batch: int, parameters: int, finetune: bool, lr: float) -> None:
    value, reason = defaults.supervised_lr(batch, parameters, finetune=finetune)
    assert value == lr and ("small network" in reason) == (parameters == NANO)


@pytest.mark.parametrize(
    ("images", "device", "batch", "epochs"),
    [(500, "cpu", 16, 96), (2040, "cpu", 64, 96), (2040, "cuda", 64, 322), (50_000, "cuda", 256, 100)],
)
def test_supervised_batch_and_epochs(images: int, device: str, batch: int, epochs: int) -> None:
    facts = Facts(images, 10, 224, device)
    assert defaults.supervised_batch(facts)[0] == batch
    assert defaults.supervised_epochs(facts, batch)[0] == epochs


@pytest.mark.parametrize(
    ("rule", "arguments", "value"),
    [
        *((defaults.ema_rate, (steps,), rate) for steps, rate in ((10, 0.9), (2_976, 0.99328), (10**6, 0.9998))),
        (defaults.teacher_momentum, (400, 224), 0.98),
        (defaults.teacher_momentum, (6_300, 112), 0.9921),
        (defaults.teacher_momentum, (750_000, 224), 0.996),
        (defaults.teacher_momentum, (400, 32), 0.98),
        (defaults.teacher_momentum, (2_610, 32), 0.996),
        (lambda: defaults.TEACHER_CENTERING, (), "mean"),
        (defaults.teacher_temperature, (50, 224), 0.07),
        (defaults.teacher_temperature, (49.9, 224), 0.04),
        (defaults.teacher_temperature, (300, 33), 0.07),
        (defaults.teacher_temperature, (300, 32), 0.04),
        *((defaults.pretraining_lr, (batch,), lr) for batch, lr in ((8, 0.00013), (64, 0.00013), (256, 5e-4))),
        *((defaults.prototype_count, (n,), count) for n, count in ((100, 256), (50_000, 4096), (1_281_167, 65536))),
        (defaults.pretraining_batch, (Facts(100, 2, 64, "cpu"),), 8),
        (defaults.pretraining_batch, (FLOWERS,), 32),
        (defaults.pretraining_batch, (CIFAR,), 256),
        (defaults.pretraining_epochs, (Facts(2_040, 102, 64, "cpu"),), 19),  # 40,000 images
        (defaults.pretraining_epochs, (FLOWERS,), 800),
        (defaults.pretraining_epochs, (CIFAR,), 160),  # eight million small images
        (defaults.pretraining_epochs, (Facts(8_189, 0, 112, "cuda"),), 244),  # two million
        (defaults.pretraining_epochs, (CIFAR, 64), 100),
    ],
)
def test_values(rule: Callable[..., tuple[float | str, str]], arguments: tuple[Any, ...], value: float | str) -> None:
    assert rule(*arguments)[0] == value


LAMBDAS = {"swin": 0.5, "t2t": 0.1, "cvt": 0.1, "vit": 0.01, "resnet": 0.1, "hybrid": 0.1, "": 0.1}


@pytest.mark.parametrize(("family", "weight"), LAMBDAS.items())
def test_localization_is_on_where_it_helps_or_was_asked_for(family: str, weight: float) -> None:
    """Only a large Swin from random weights gained; an option of the loss turns it on for every network."""
    facts = Facts(2_040, 102, 224, "cuda", family, 27_500_000)
    expected = weight if family == "swin" else 0.0
    assert defaults.localization_weight(facts, from_scratch=True)[0] == expected
    assert defaults.localization_weight(facts, from_scratch=False)[0] == 0.0
    assert defaults.localization_weight(replace(facts, parameters=NANO), from_scratch=True)[0] == 0.0
    assert defaults.localization_weight(facts, from_scratch=False, wanted=True)[0] == weight


def test_hybrids_have_their_own_rate_and_mix_earlier() -> None:
    assert defaults.supervised_lr(64, 12_000_000, family="hybrid")[0] == 2 * defaults.supervised_lr(64, 12_000_000)[0]
    assert [defaults.mixing_probability(70, (), family)[0] for family in ("swin", "hybrid")] == [0.0, 0.5]
    assert defaults.mixing_probability(12, (), "hybrid")[0] == 0.0


@pytest.mark.parametrize(
    ("steps", "per_epoch", "batch", "eval_images", "interval"),
    [
        (2976, 31, 64, 204, 60),  # 2,040 images on a CPU: fifty evaluations
        (19_500, 195, 256, 5_000, 390),  # 50,000 images, 100 epochs: every other epoch
        (300, 100, 16, 1_000, 100),  # three epochs: after each
        (1_000, 10, 32, 100_000, 250),  # never fewer than four
        (1_000, 10, 32, 2_000, 84),  # a quarter of the time is twelve
        (1_000, 10, 32, 0, 20),
    ],
)
def test_evaluation_interval(steps: int, per_epoch: int, batch: int, eval_images: int, interval: int) -> None:
    assert defaults.evaluation_interval(steps, per_epoch, batch, eval_images) == interval


@pytest.mark.parametrize(
    ("options", "images", "steps"),
    [
        ({"epochs": 1.5}, 105, 15),  # an epoch is ten full batches
        ({"epochs": 0.01}, 100, 1),
        ({"epochs": 2}, 7, 2),  # fewer images than a batch are one
        ({"steps": 7, "epochs": 3}, 100, 7),
    ],
)
def test_total_steps(options: dict[str, float], images: int, steps: int) -> None:
    assert total_steps(options.get("steps"), options.get("epochs", 0.0), images, 10) == steps


@pytest.mark.parametrize(
    ("side", "device", "size"),
    [(28, "cuda", 28), (64, "cuda", 64), (95, "cuda", 64), (96, "cuda", 96), (255, "cuda", 224), (500, "cuda", 224),
     (50, "cpu", 50), (500, "cpu", 64), (200, "mps", 192)],
)  # fmt: skip
def test_input_size(side: int, device: str, size: int) -> None:
    """Small images keep their size, others get a multiple of 32: nothing is enlarged."""
    assert input_size(side, device) == size
