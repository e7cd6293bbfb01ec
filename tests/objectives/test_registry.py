"""Objectives are found by name, and one from outside the package plugs in."""

from __future__ import annotations

import pytest
import torch

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives import (
    Objective,
    ObjectiveContext,
    RelativeLocalization,
    get_objective,
    list_objectives,
    register_objective,
)


def features(dim: int = 6) -> Features:
    grid = torch.randn(3, dim, 4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return Features(grid, grid.mean((2, 3)))


def test_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(UserError, match=r"'localisation'.*Did you mean 'localization'"):
        get_objective("localisation")


def test_a_name_is_taken_only_once() -> None:
    with pytest.raises(UserError, match="'localization'"):
        register_objective("localization")(type("Other", (Objective,), {}))
    assert register_objective("localization")(get_objective("localization")) is get_objective("localization")
    assert "localization" in list_objectives()


def test_localization_equals_its_module() -> None:
    made = get_objective("localization")(6, pairs="all", hidden=8)
    module = RelativeLocalization(6, pairs="all", hidden=8)
    module.load_state_dict({name.removeprefix("localization."): value for name, value in made.state_dict().items()})
    batch = features()
    assert torch.equal(made(batch, ObjectiveContext(images=torch.zeros(3, 3, 8, 8))), module(batch.grid))
