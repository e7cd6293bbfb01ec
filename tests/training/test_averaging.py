"""Moving averages against the loop they stand for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from frugalvit.training.averaging import MovingAverage


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("buffers", [True, False])
def test_it_follows_as_written(buffers: bool) -> None:
    followed, follower = network(0), network(1).requires_grad_(False)
    oracle = copy.deepcopy(follower)
    average = MovingAverage(follower, followed, buffers=buffers)
    for step, momentum in enumerate((0.5, 0.9, 0.99)):
        followed(torch.full((5, 3), float(step)) + torch.arange(5)[:, None])  # moves the statistics
        with torch.no_grad():
            for parameter in followed.parameters():
                parameter += 0.1
            for mine, other in zip(oracle.parameters(), followed.parameters(), strict=True):
                mine.copy_(momentum * mine + (1 - momentum) * other)
        average.follow(momentum)
        torch.testing.assert_close(dict(follower.named_parameters()), dict(oracle.named_parameters()))
        kept = dict((followed if buffers else oracle).named_buffers())
        torch.testing.assert_close(dict(follower.named_buffers()), kept, rtol=0, atol=0)


def test_networks_may_move_before_the_first_step() -> None:
    """A run puts its networks onto the device after the task is made; conversions replace buffers."""
    followed, follower = network(0), network(1)
    average = MovingAverage(follower, followed, buffers=True)
    for one in (followed, follower):
        one.double()
    average.follow(0.0)
    torch.testing.assert_close(follower.state_dict(), followed.state_dict())
