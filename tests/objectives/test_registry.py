"""Objectives have names, and an objective outside the package plugs in."""

import importlib.util
from pathlib import Path

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
    with pytest.raises(UserError, match=r"'localization'.*Did you mean 'localization'"):
        get_objective("localization")


def test_name_of_another_class_is_refused() -> None:
    with pytest.raises(UserError, match="'localization'"):
        register_objective("localization")(type("Other", (Objective,), {}))
    assert register_objective("localization")(get_objective("localization")) is get_objective("localization")
    assert "localization" in list_objectives()


def test_changed_notebook_cell_replaces_its_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version of a cell has its own file name; the module stays ``__main__``."""
    monkeypatch.setattr("frugalvit.objectives.registry._OBJECTIVES", {})
    forward = "def forward(self, features, context):\n    return features.grid.mean()"
    for file in ("/tmp/ipykernel_1/1.py", "/tmp/ipykernel_1/2.py"):
        body = {"__module__": "__main__"}
        exec(compile(forward, file, "exec"), {}, body)
        cls = register_objective("of_a_cell")(type("OfACell", (Objective,), body))
        assert get_objective("of_a_cell") is cls


def test_localization_equals_its_module() -> None:
    made = get_objective("localization")(6, pairs="all", hidden=8)
    module = RelativeLocalization(6, pairs="all", hidden=8)
    module.load_state_dict({name.removeprefix("localization."): value for name, value in made.state_dict().items()})
    batch = features()
    assert torch.equal(made(batch, ObjectiveContext(images=torch.zeros(3, 3, 8, 8))), module(batch.grid))


def test_example_objective_equals_loops_with_gradients() -> None:
    """examples/own_objective.py registers itself when imported."""
    path = Path(__file__).parents[2] / "examples" / "own_objective.py"
    spec = importlib.util.spec_from_file_location("example_own_objective", path)
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    objective = get_objective("variance_covariance")(6, gamma=1.2, covariance_weight=0.3)

    batch = features()
    loss = objective(batch, ObjectiveContext(images=torch.zeros(3, 3, 8, 8)))
    tokens = [batch.grid[b, :, i, j] for b in range(3) for i in range(4) for j in range(5)]
    mean = sum(tokens) / len(tokens)
    expected = torch.zeros(())
    for d in range(6):
        for e in range(6):
            entry = sum((z[d] - mean[d]) * (z[e] - mean[e]) for z in tokens) / (len(tokens) - 1)
            term = (1.2 - (entry + 1e-4).sqrt()).clamp(min=0) if d == e else 0.3 * entry**2
            expected = expected + term / 6
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, batch.grid), torch.autograd.grad(expected, batch.grid))
