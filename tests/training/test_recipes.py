"""What "auto" chooses for a supervised run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frugalvit.backbones import create_backbone
from frugalvit.training.parameters import merged
from frugalvit.training.recipes import Facts, supervised_batch, supervised_epochs, supervised_lr

SWIN_T, NANO = 28_000_000, 400_000


@pytest.mark.parametrize(
    ("batch", "parameters", "finetune", "lr"),
    [
        (1024, SWIN_T, False, 1e-3),
        (128, SWIN_T, False, 3.5e-4),
        (1024, SWIN_T, True, 5e-4),
        (16, NANO, False, 5e-4),
        (64, NANO, False, 1e-3),
        (1024, NANO, True, 2e-3),
        (1024, 0, False, 1e-3),
    ],
)
def test_learning_rate(batch: int, parameters: int, finetune: bool, lr: float) -> None:
    found, reason = supervised_lr(batch, parameters, finetune=finetune)
    assert found == lr
    assert ("small network" in reason) == (parameters == NANO)


@pytest.mark.parametrize(
    ("images", "device", "batch", "epochs"),
    [(500, "cpu", 16, 96), (2040, "cpu", 64, 96), (2040, "cuda", 64, 322), (50_000, "cuda", 256, 100)],
)
def test_batch_and_length(images: int, device: str, batch: int, epochs: int) -> None:
    facts = Facts(images, 10, 224, device)
    assert supervised_batch(facts)[0] == batch
    assert supervised_epochs(facts, batch)[0] == epochs


def test_groups_that_learn_alike_are_one() -> None:
    """Every parameter keeps its decay and its share of the learning rate."""
    names = [(f"p{number}", nn.Parameter(torch.zeros(2, 2))) for number in range(6)]
    groups = [
        {"params": [names[0]], "weight_decay": 0.1, "decayed": True, "lr_scale": 1.0},
        {"params": [names[1]], "weight_decay": 0.0, "decayed": False, "lr_scale": 1.0},
        {"params": [names[2]], "weight_decay": 0.1, "decayed": True, "lr_scale": 0.5},
        {"params": names[3:5], "weight_decay": 0.1, "decayed": True, "lr_scale": 1.0},
        {"params": [names[5]], "weight_decay": 0.1, "decayed": True, "lr_scale": 10.0},
    ]

    def learning(groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
        return {name: (group["weight_decay"], group["lr_scale"]) for group in groups for name, _ in group["params"]}

    before = learning(groups)
    found = merged(groups)
    assert len(found) == 4
    assert learning(found) == before == learning(groups)


def test_what_a_backbone_adds() -> None:
    facts = Facts(500, 10, 64, "cpu").knowing(create_backbone("swin_nano", img_size=32, num_classes=10))
    assert facts.family == "swin" and 300_000 < facts.parameters < 500_000 and facts.images == 500
