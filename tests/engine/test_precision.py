"""Mixed precision rounds products, not inputs; gradients are unscaled once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones import create_backbone
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.loader import Batch
from frugalvit.engine import step
from frugalvit.engine.hardware import make_precision
from frugalvit.engine.schedules import Constant
from frugalvit.engine.step import TrainStep, make_optimizer
from frugalvit.tasks.classification import task as supervised
from frugalvit.tasks.classification.task import ClassificationTask
from helpers.toy_task import ToyTask, toy_plan


class RecordingLinear(nn.Linear):
    def forward(self, batch: Batch) -> Tensor:
        self.seen = (batch.images.dtype, batch.targets.dtype)  # type: ignore[union-attr]
        self.inside = super().forward(batch.images).dtype
        return super().forward(batch.images)


@pytest.mark.parametrize(("wanted", "inside"), [("bf16", torch.bfloat16), ("32", torch.float32)])
def test_inputs_are_not_rounded(wanted: str, inside: torch.dtype) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=make_precision(wanted, "cpu"))
    network = RecordingLinear(3, 2)
    batch = Batch(torch.randn(2, 3), torch.rand(2, 5), None, torch.arange(2))
    fabric.setup_module(network)(batch)
    assert network.seen == (torch.float32, torch.float32) and network.inside == inside


@pytest.mark.parametrize("fused", [False, True], ids=["as on a CPU", "fused, as on a GPU"])
@pytest.mark.parametrize("clip_per", ["global", "tensor"])
def test_fp16_gradients_are_unscaled_once(clip_per: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer gets fp32's gradients up to fp16's rounding."""
    monkeypatch.setattr(step, "_fused", lambda fabric: fused)
    moments = {}
    for wanted in ("32", "fp16"):
        fabric = Fabric(accelerator="cpu", devices=1, plugins=make_precision(wanted, "cpu"))
        if scaler := getattr(fabric.strategy.precision, "scaler", None):
            scaler._init_scale = 64.0  # from 65,536 it would first have to come down
        task, plan = ToyTask(), toy_plan(clip=0.5, clip_per=clip_per)
        module, optimizer = fabric.setup(task, make_optimizer(task, plan, fabric))
        TrainStep(task, module, optimizer, plan, fabric).one_step()  # type: ignore[arg-type]
        moments[wanted] = [state["exp_avg"] for state in optimizer.optimizer.state.values()]
    torch.testing.assert_close(moments["fp16"], moments["32"], rtol=1e-2, atol=1e-4)
    assert all(moment.norm() > 1e-3 for moment in moments["32"][:1])


@pytest.mark.parametrize("wanted", ["bf16", "32"])
def test_logits_are_compared_in_full_precision(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 1 and 1.001 are equal in bf16; the second is right."""
    shape: dict[str, Any] = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
    backbone = create_backbone("swin_nano", img_size=32, num_classes=3, **shape)
    classifier = backbone.model.get_classifier()  # type: ignore[operator]
    with torch.no_grad():
        classifier.weight.zero_()
        classifier.bias.copy_(torch.tensor([1.0, 1.001, 0.0]))
    task = ClassificationTask(backbone, None, LocalizationConfig(), Constant(0.0))
    task.fabric = Fabric(accelerator="cpu", devices=1, plugins=make_precision(wanted, "cpu"))
    batch = (torch.randn(4, 3, 32, 32), torch.ones(4, dtype=torch.long), torch.arange(4))
    monkeypatch.setattr(supervised, "eval_batches", lambda *_, **__: iter([batch]))
    dataset = SimpleNamespace(store=[None] * 4, transform=None, batch=4, batches=1)
    assert task.scores(dataset).summary()["top1"] == 100
