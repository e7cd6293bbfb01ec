"""Compiled runs: when, how, and with the same outcome."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from lightning_fabric import Fabric
from torch import nn

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import BenchStepConfig
from frugalvit.config.train import TrainConfig
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.training import stepbench
from frugalvit.training.compiling import PAYS_FROM, compile_parts, compile_task
from frugalvit.training.localizing import Share, measure
from frugalvit.training.schedules import Constant
from frugalvit.training.stepping import Plan


class Noted(nn.Module):
    """Writes down how it was compiled."""

    how: dict[str, Any] | None = None

    def compile(self, **how: Any) -> None:
        self.how = how


def compiled(steps: int = PAYS_FROM, accumulate: int = 1, kind: type = TrainConfig, **values: Any) -> Any:
    task = SimpleNamespace(networks=[Noted()], localization=Noted())
    plan, fabric = Plan(steps, steps, Constant(0.1), accumulate=accumulate), Fabric(accelerator="cpu", devices=1)
    compile_task(task, kind.parse({"data": "photos", **values}), plan, fabric)
    assert task.localization.how == (None if task.networks[0].how is None else {"dynamic": False})
    return task.networks[0].how


def test_a_cpu_compiles_only_when_told() -> None:
    assert compiled() is None
    assert compiled(compile=False) is None
    assert compiled(compile=True) == {"dynamic": False, "mode": None}


def test_graphs_are_left_out_where_they_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(compile="graphs") == {"dynamic": False, "mode": None}
    assert "there is no CUDA device" in capsys.readouterr().err
    assert compiled(kind=PretrainConfig, compile="graphs", crops_at_once=2) is not None


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("pairs", [8, "all"])
def test_a_step_judges_pairs_with_the_compiled_head(dense: bool, pairs: Any) -> None:
    """The compiled head is what a step calls, and says the same, gradients included."""
    torch.manual_seed(0)
    grid = torch.randn(2, 5, 4, 4, requires_grad=True)
    head = DenseLocalization([5], pairs=pairs, hidden=8) if dense else RelativeLocalization(5, pairs=pairs, hidden=8)

    def answer() -> tuple[torch.Tensor, ...]:
        loss, error = measure(head, [grid] if dense else grid, step=3, share=Share())
        return loss, error, *torch.autograd.grad(loss, grid)

    plain, counter = answer(), torch._dynamo.testing.CompileCounter()
    head.compile(dynamic=False, backend=counter, fullgraph=True)
    torch.testing.assert_close(answer(), plain)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["train", "pretrain"])
def test_graphs_train_as_without_them(kind: str) -> None:
    """The same losses, step by step, as far as random depth allows; and weights that move."""
    curves = []
    for graphs in (False, True):
        torch._dynamo.reset()
        config = BenchStepConfig.parse(
            {"kind": kind, "backbone": "swin_nano", "img_size": 64, "batch": 16, "prototypes": 64, "device": "cuda"}
        )
        fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
        store, classes, _ = stepbench._store(config, fabric.device)
        stepper = stepbench._stepper(config, stepbench._batches(config, store, classes), classes, fabric, False)
        compile_parts(stepper.task, graphs)
        losses = []
        for step in range(12):
            stepper.step, stepper.window = step, {}
            stepper.one_step()
            losses.append(float(stepper.window["loss"][0]))
        curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], rel=0.05)
    assert curves[1][0] != curves[1][-1]
