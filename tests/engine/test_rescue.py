"""A collapsed run goes back to good weights with a lower rate; killed at any moment, it resumes to the same bits."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.engine.health import Alarm, RunHealth
from frugalvit.engine.loop import GENTLER, Trainer
from frugalvit.engine.schedules import Constant, Gentler
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from helpers.tiny_runs import interrupted_at, load_state, read_metrics, unequal_parts
from helpers.toy_task import ToyTask, run_toy

PLAN: dict[str, Any] = {"steps": 320, "rescues": 2, "log_every": 10, "save_every": 30, "evaluate_every": 50}


class ToyHealth(RunHealth):
    """Raise an alarm at a high loss."""

    loss = math.inf

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        if "lr_scale" in metrics:
            self.raised.clear()
        self.loss = metrics.get("loss", self.loss)
        alarm = Alarm("high loss", f"it is {self.loss:.3g}", "Lower --lr")
        return [alarm] if "loss" in metrics and self.loss > 100 and self._is_new(alarm) else []

    @property
    def collapsed(self) -> bool:
        return bool(self.raised)

    @property
    def is_good(self) -> bool:
        return self.loss < 100


class CollapsingTask(ToyTask):
    """Weights jump at the steps of ``spoil``."""

    def __init__(self, *steps: int, value: float = 100.0) -> None:
        super().__init__(dict.fromkeys(steps, "weights"))
        self.health = ToyHealth(patience=1)
        self.value = value

    def after_step(self, step: int, skipped: Any = None) -> None:
        if step in self.spoil:
            with torch.no_grad():
                self.linear.weight.fill_(self.value)

    def evaluate(self, step: int) -> dict[str, float]:
        return {"top1": 1.0}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        assert self.health is not None
        self.health.warn(step, metrics)
        return False


def assert_same(one: Path, other: Path) -> None:
    assert read_metrics(one) == read_metrics(other)
    assert unequal_parts(load_state(one), load_state(other)) == []


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that collapses early, before good weights exist, and again after that."""
    folder = tmp_path_factory.mktemp("rescue") / "run"
    outcome = run_toy(folder, CollapsingTask(92, 255), **PLAN)
    assert outcome["rescues"] == [
        {"step": 100, "reason": "high loss", "from_step": 0, "lr_scale": GENTLER},
        {"step": 260, "reason": "high loss", "from_step": 200, "lr_scale": GENTLER**2},
    ]
    return folder


def test_rescued_run(reference: Path) -> None:
    lines = read_metrics(reference)
    rescues = [line for line in lines if line["split"] == "rescue"]
    assert [(line["step"], line["from_step"], line["reason"]) for line in rescues] == [
        (100, 0, "high loss"),
        (260, 200, "high loss"),
    ]
    train = {line["step"]: line for line in lines if line["split"] == "train"}
    assert list(train) == list(range(10, 321, 10))  # no step is repeated
    assert train[260]["loss"] > 100 > train[270]["loss"]
    # 0.1 times the factor, reached over a twentieth of the run
    assert [train[step]["lr"] for step in (100, 260)] == pytest.approx([0.1, 0.1 * GENTLER])
    assert train[270]["lr"] == pytest.approx(0.1 * GENTLER**2 * 10 / 16)
    assert train[320]["lr"] == pytest.approx(0.1 * GENTLER**2)
    assert not (reference / "checkpoints" / "good.pt").exists()


@pytest.mark.parametrize("step", [105, 205, 259])
def test_killed_around_a_rescue(reference: Path, tmp_path: Path, step: int) -> None:
    with interrupted_at(step):
        run_toy(tmp_path / "run", CollapsingTask(92, 255), **PLAN)
    run_toy(tmp_path / "run", CollapsingTask(92, 255), **PLAN)
    assert_same(reference, tmp_path / "run")


@pytest.mark.parametrize(("number", "moment"), [(0, "save"), (1, "log"), (1, "save"), (1, "saved")])
def test_killed_in_a_rescue(reference: Path, tmp_path: Path, number: int, moment: str) -> None:
    owner, name = {"load": (CollapsingTask, "load_state_dict"), "log": (RunFolder, "log")}.get(
        moment, (Trainer, "save")
    )
    real, rescue, state = getattr(owner, name), Trainer.rescue, {"rescues": 0, "inside": False}

    def enter(self: Trainer) -> None:
        state["inside"] = state["rescues"] == number
        state["rescues"] += 1
        rescue(self)

    def killed(*arguments: Any, **keywords: Any) -> Any:
        if state["inside"] and moment != "saved":
            raise KeyboardInterrupt
        result = real(*arguments, **keywords)
        if state["inside"]:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "rescue", enter)
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run_toy(tmp_path / "run", CollapsingTask(92, 255), **PLAN)
    run_toy(tmp_path / "run", CollapsingTask(92, 255), **PLAN)
    assert_same(reference, tmp_path / "run")


@pytest.mark.parametrize(("rescues", "steps"), [(0, []), (1, [100])])
def test_rescues_are_limited(rescues: int, steps: list[int], tmp_path: Path) -> None:
    outcome = run_toy(tmp_path / "run", CollapsingTask(92, 255, 295), **PLAN | {"rescues": rescues})
    assert [rescue["step"] for rescue in outcome["rescues"]] == steps


def test_nonfinite_gradients_are_rescued_and_then_an_error(tmp_path: Path) -> None:
    outcome = run_toy(tmp_path / "once", CollapsingTask(255, value=math.nan), **PLAN)
    reason = "non-finite gradients"
    assert outcome["rescues"] == [{"step": 270, "reason": reason, "from_step": 200, "lr_scale": GENTLER}]
    assert outcome["skipped"] == 14
    with interrupted_at(275):
        run_toy(tmp_path / "killed", CollapsingTask(255, value=math.nan), **PLAN)
    run_toy(tmp_path / "killed", CollapsingTask(255, value=math.nan), **PLAN)
    assert_same(tmp_path / "once", tmp_path / "killed")
    with pytest.raises(UserError, match="in a row had non-finite gradients"):
        run_toy(tmp_path / "often", CollapsingTask(*range(100, 320), value=math.nan), **PLAN)


def test_damaged_good_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with interrupted_at(250):
        run_toy(tmp_path / "run", CollapsingTask(255), **PLAN)
    (tmp_path / "run" / "checkpoints" / "good.pt").write_bytes(b"")
    assert run_toy(tmp_path / "run", CollapsingTask(255), **PLAN)["rescues"] == []
    assert "good.pt" in capsys.readouterr().err


def test_gentler_schedule() -> None:
    schedule = Gentler(Constant(2.0), 0.5, start=10, warmup=4)
    assert [schedule.at(step) for step in (10, 11, 13, 14, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
