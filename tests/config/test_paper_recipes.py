"""The papers' recipes hold the papers' values, whatever the data."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from frugalvit import create_backbone
from frugalvit.config.defaults import Facts
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.engine.schedules import Cosine
from frugalvit.experiment.resolve import AutoValues, resolve_pretraining, resolve_training
from frugalvit.tasks.classification.train import make_plan, make_task

FLOWERS = Facts(2040, 102, 500, "cuda", "swin", 27_500_000)
IMAGENET = Facts(1_281_167, 1000, 375, "cuda", "swin", 27_500_000)


@pytest.mark.parametrize(
    ("recipe", "lr", "warmup"), [("drloc-paper", 1e-3, 20), ("drloc-released", 1e-3, 20), ("drloc-finetune", 5e-4, 10)]
)
@pytest.mark.parametrize("facts", [FLOWERS, IMAGENET])
def test_drloc(recipe: str, lr: float, warmup: int, facts: Facts) -> None:
    config = TrainConfig.parse({"data": "x", "recipe": recipe})
    config = resolve_training(config, facts, AutoValues())
    assert (config.batch, config.lr, config.epochs, config.img_size) == (1024, lr, 100, 224)
    assert (config.optimizer.warmup, config.optimizer.weight_decay, config.ema) == (warmup, 0.05, 0)
    assert (config.mixing.prob, config.augment.operations, config.localization.weight) == (1.0, 2, 0.5)
    assert config.split == ("train+val" if recipe == "drloc-paper" else "given")


@pytest.mark.parametrize(
    ("recipe", "epochs", "warmup"),
    [("esvit-paper", 300, 10), ("esvit-webvision", 150, 5), ("esvit-openimages", 50, 2), ("esvit-imagenet22k", 30, 1)],
)
@pytest.mark.parametrize(("values", "lr"), [({}, 1e-3), ({"batch": 1024}, 2e-3)])
def test_esvit(recipe: str, epochs: int, warmup: int, values: dict[str, Any], lr: float) -> None:
    config = PretrainConfig.parse({"data": "x", "recipe": recipe} | values)
    config = resolve_pretraining(config, IMAGENET, AutoValues())
    assert (config.batch, config.lr, config.epochs) == (values.get("batch", 512), lr, epochs)
    matching, optimizer = config.matching, config.optimizer
    assert (matching.prototypes, matching.momentum, matching.teacher_temp) == (65536, 0.996, 0.07)
    assert (optimizer.warmup, optimizer.weight_decay, config.weight_decay_end) == (warmup, 0.04, 0.4)
    assert matching.weights() == (0.5, 0.5) and config.split == "given"


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({}, (0.5, 0.5)),
        ({"region_weight": 0}, (1.0, 0.0)),  # DINO
        ({"view_weight": 0.3, "region_weight": 0}, (0.3, 0.0)),
        ({"view_weight": 0}, (0.0, 0.5)),
    ],
)
def test_weights_of_view_and_region_loss(given: dict[str, float], weights: tuple[float, float]) -> None:
    assert PretrainConfig.parse({"data": "x", "matching": given}).matching.weights() == weights


def test_the_released_schedule_ends_at_three_quarters() -> None:
    """100 epochs of a 300-epoch cosine that starts with the warm-up: (1 + cos(π/3)) / 2, towards 1 % of the peak."""
    config = TrainConfig.parse({"data": "x", "recipe": "drloc-released", "device": "cpu"})
    config = resolve_training(config, Facts(50_000, 100, 224, "cuda", "swin", 27_500_000), AutoValues())
    plan = make_plan(config, 50_000, 1)
    assert plan.lr.at(plan.steps) == pytest.approx(1e-3 * (0.01 + 0.99 * 0.75))
    assert Cosine(1.0, 0.0, 10, warmup=4).at(7) == 0.5 == Cosine(1.0, 0.0, 10, warmup=4, from_zero=True).at(5)


@pytest.mark.parametrize(("form", "zeroed"), [("released", True), ("paper", False)])
def test_initialization_of_the_released_head(form: str, zeroed: bool) -> None:
    torch.manual_seed(0)
    values = {"data": "x", "device": "cpu", "steps": 2, "batch": 2, "lr": 0.1, "ema": 0, "img_size": 64}
    config = TrainConfig.parse(values | {"localization": {"form": form, "weight": 0.5}})
    config = resolve_training(config, FLOWERS, AutoValues())
    backbone = create_backbone("swin_nano", img_size=64, num_classes=2)
    task = make_task(config, backbone, make_plan(config, 8, 1))
    layers = [module for module in task.localization.modules() if isinstance(module, nn.Linear)]
    assert layers and all(bool((layer.bias == 0).all()) is zeroed for layer in layers)
    assert not zeroed or all(layer.weight.std().item() == pytest.approx(0.02, rel=0.15) for layer in layers)


@pytest.mark.parametrize(
    ("images", "values", "weight"),
    [
        (50_000, {}, 0.0),
        (1_281_167, {"epochs": 300}, 0.5),
        (1_281_167, {"epochs": 30}, 0.0),
        (50_000, {"matching": {"regions_from": 2.0}}, 0.5),
        (50_000, {"matching": {"view_weight": 0.0}}, 0.5),
        (50_000, {"recipe": "esvit-paper", "epochs": 1}, 0.5),
    ],
)
def test_region_loss_is_on_in_very_long_runs(images: int, values: dict[str, Any], weight: float) -> None:
    config = PretrainConfig.parse({"data": "x", **values})
    resolved = resolve_pretraining(config, replace(IMAGENET, images=images), AutoValues())
    assert resolved.matching.region_weight == weight
