"""What "auto" chooses for a supervised run."""

from __future__ import annotations

import pytest

from frugalvit.backbones import create_backbone
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
        (1024, NANO, True, 5e-4),
        (1024, 0, False, 1e-3),
    ],
)
def test_learning_rate(batch: int, parameters: int, finetune: bool, lr: float) -> None:
    found, reason = supervised_lr(batch, parameters, finetune)
    assert found == lr
    assert ("small network" in reason) == (parameters == NANO and not finetune)


@pytest.mark.parametrize(
    ("images", "device", "batch", "epochs"),
    [(500, "cpu", 16, 96), (2040, "cpu", 64, 96), (2040, "cuda", 64, 322), (50_000, "cuda", 256, 100)],
)
def test_batch_and_length(images: int, device: str, batch: int, epochs: int) -> None:
    facts = Facts(images, 10, 224, device)
    assert supervised_batch(facts)[0] == batch
    assert supervised_epochs(facts, batch)[0] == epochs


def test_what_a_backbone_adds() -> None:
    facts = Facts(500, 10, 64, "cpu").knowing(create_backbone("swin_nano", img_size=32, num_classes=10))
    assert facts.family == "swin" and 300_000 < facts.parameters < 500_000 and facts.images == 500
