"""EMA of weights against a loop."""

import copy

import pytest
import torch
from torch import nn

from frugalvit.backbones import create_backbone
from frugalvit.config.train import LocalizationConfig
from frugalvit.engine.ema import EMA
from frugalvit.engine.schedules import Constant
from frugalvit.tasks.classification.task import ClassificationTask


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("buffers", [True, False])
def test_ema_equals_the_formula(buffers: bool) -> None:
    source, average_model = network(0), network(1).requires_grad_(False)
    oracle = copy.deepcopy(average_model)
    average = EMA(average_model, source, buffers=buffers)
    for step, momentum in enumerate((0.5, 0.9, 0.99)):
        source(torch.full((5, 3), float(step)) + torch.arange(5)[:, None])  # moves the statistics
        with torch.no_grad():
            for parameter in source.parameters():
                parameter += 0.1
            for mine, other in zip(oracle.parameters(), source.parameters(), strict=True):
                mine.copy_(momentum * mine + (1 - momentum) * other)
        average.update(momentum)
        torch.testing.assert_close(dict(average_model.named_parameters()), dict(oracle.named_parameters()))
        expected = dict((source if buffers else oracle).named_buffers())
        torch.testing.assert_close(dict(average_model.named_buffers()), expected, rtol=0, atol=0)


def test_networks_may_move_before_the_first_step() -> None:
    """A run moves its networks to the device after it builds the task."""
    source, average_model = network(0), network(1)
    average = EMA(average_model, source, buffers=True)
    for one in (source, average_model):
        one.double()
    average.update(0.0)
    torch.testing.assert_close(average_model.state_dict(), source.state_dict())


def test_ema_warms_up() -> None:
    """The rate is min(ema, (1 + step) / (10 + step))."""
    shape = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
    backbone = create_backbone("swin_nano", img_size=32, num_classes=2, **shape)
    task = ClassificationTask(backbone, None, LocalizationConfig(), Constant(0.0), ema=0.95)
    assert task.average is not None
    source, average_model = (next(one.parameters()) for one in (task.backbone, task.average))
    rates = {}
    for step in (0, 8, 80, 1000):
        with torch.no_grad():
            source.zero_()
            average_model.fill_(1.0)
        task.after_step(step)
        rates[step] = average_model.mean().item()
    assert rates == pytest.approx({0: 0.1, 8: 0.5, 80: 0.9, 1000: 0.95}, abs=1e-5)
