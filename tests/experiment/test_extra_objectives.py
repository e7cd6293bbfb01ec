"""--objectives adds losses from the registry; --plugin imports the file that registers one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment.extra_objectives import load_plugins
from helpers.tiny_runs import load_state, read_metrics, run_tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_objective.py"


def run(command: str, photos: Path, out: Path, **values: Any) -> dict[str, Any]:
    """Return the last checkpoint of a tiny run with these options."""
    run_tiny(command, data=photos, out=out, **{"steps": 4} | values)
    return load_state(out)


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_example_plugs_in_without_touching_the_package(command: str, photos: Path, tmp_path: Path) -> None:
    options = {"variance_covariance": {"weight": 0.5, "gamma": 2.0}}
    run(command, photos, tmp_path / "run", plugin=[str(EXAMPLE)], objectives=options)
    line = next(line for line in read_metrics(tmp_path / "run") if line["split"] == "train")
    assert line["variance_covariance"] > 0
    plain = run(command, photos, tmp_path / "plain")
    assert not any(name.startswith("objectives.") for name in plain["task"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


def test_weight_zero_changes_no_weights(photos: Path, tmp_path: Path) -> None:
    plain = run("train", photos, tmp_path / "plain")
    zero = run("train", photos, tmp_path / "zero", plugin=[str(EXAMPLE)], objectives={"variance_covariance": 0})
    assert all(torch.equal(zero["task"][name], value) for name, value in plain["task"].items())


def test_a_resumed_run_needs_its_plugin_again(photos: Path, tmp_path: Path) -> None:
    """A stored file must never decide which code runs."""
    run("train", photos, tmp_path / "run", plugin=[str(EXAMPLE)], objectives={"variance_covariance": 0.1})
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match="--plugin"):
        run_tiny("train", resume=tmp_path / "run")
    run_tiny("train", resume=tmp_path / "run", plugin=[str(EXAMPLE)])


HEAD = """
import torch
from frugalvit.objectives import Objective, register_objective

@register_objective("head")
class Head(Objective):
    def __init__(self, dim, width=4):
        super().__init__(dim)
        self.layer = torch.nn.Linear(dim, width)

    def forward(self, features, context):
        assert (context.teacher is None) == (context.labels is not None)
        return self.layer(features.grid.mean((2, 3))).square().mean() * (1 + context.step)
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plugin with a trained layer; a name can be registered by one file only."""
    path = tmp_path_factory.mktemp("plugin") / "head.py"
    path.write_text(HEAD)
    return path


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_parameters_are_trained_and_resumed(command: str, head: Path, photos: Path, tmp_path: Path) -> None:
    """An interrupted run ends with the same weights as an uninterrupted one."""
    options = {"plugin": [str(head)], "objectives": {"head": {"weight": 0.5, "width": 3}}}
    straight = run(command, photos, tmp_path / "straight", **options)
    name = "objectives.head.layer.weight"
    assert straight["task"][name].shape[0] == 3
    run(command, photos, tmp_path / "cut", save_every=2, **options)
    checkpoints = tmp_path / "cut" / "checkpoints"
    (checkpoints / "previous.pt").replace(checkpoints / "last.pt")
    (tmp_path / "cut" / "summary.json").unlink()
    run_tiny(command, resume=tmp_path / "cut", plugin=options["plugin"])
    resumed = load_state(tmp_path / "cut")
    assert all(torch.equal(resumed["task"][name], value) for name, value in straight["task"].items())


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"objectives": {"nothing": 0.1}}, "nothing"),
        ({"plugin": [str(EXAMPLE)], "objectives": {"variance_covariance": {"wings": 2}}}, "wings"),
        ({"objectives": {"localization": 0.1}}, "--objectives localization"),
        ({"plugin": ["nowhere.py"]}, "--plugin nowhere.py"),
        ({"plugin": ["no_such_module"]}, "--plugin no_such_module"),
    ],
)
def test_mistakes_are_one_line(values: dict[str, Any], match: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        run("train", photos, tmp_path / "run", **values)


def test_weights_must_be_numbers() -> None:
    for weight in (-1, "heavy", True):
        with pytest.raises(UserError, match="objectives"):
            TrainConfig.parse({"data": "x", "objectives": {"variance_covariance": weight}})


def test_code_of_a_plugin_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no')\n")
    with pytest.raises(UserError, match=r"broken\.py failed: ValueError: no"):
        load_plugins([str(tmp_path / "broken.py")])
