"""One step against what it stands for: clipping, parts, BatchNorm's statistics, averages, chance."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from tiny import PRETRAIN
from torch import Tensor, nn
from toys import ToyBatch, ToyTask, toy_plan

from frugalvit.backbones import create_backbone
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.loader import Batch
from frugalvit.objectives import RelativeLocalization, update_average
from frugalvit.objectives.heads import _move_unless
from frugalvit.training import pretrain
from frugalvit.training.schedules import Constant
from frugalvit.training.stepping import Plan, Stepper, make_optimizer, seed_step
from frugalvit.training.supervised import SupervisedTask

# Networks with BatchNorm: timm's, which computes activations again in its own way, and one of ours.
SMALL: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "cvt_13": {"embed_dim": (8, 16), "depths": (1, 1), "num_heads": (1, 1), "head_dim": 8},
}


def stepper_of(task: Any, plan: Plan) -> Stepper:
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(task, make_optimizer(task, plan, fabric))
    return Stepper(task, module, optimizer, plan, fabric)


def supervised(backbone: str, *, ema: float = 0.0) -> SupervisedTask:
    """A classifier of four images, the same at every step."""
    torch.manual_seed(0)
    network = create_backbone(backbone, img_size=32, num_classes=2, **SMALL.get(backbone, {}))
    task = SupervisedTask(network, None, LocalizationConfig(), Constant(0.0), ema=ema).train()
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    task.batch_at = lambda step: Batch(images, labels, labels, torch.arange(4))
    return task


def label_free(backbone: str, **more: Any) -> Any:
    """A student and its teacher on two global crops and a local one, the same at every step."""
    torch.manual_seed(0)
    config = PretrainConfig.parse(
        PRETRAIN | {"data": "x", "backbone": backbone, "backbone_args": {}, "img_size": 32} | more
    )
    config.localization.weight = 0.0
    config.matching.teacher_temp = 0.07
    task: Any = pretrain.make_task(config, pretrain.make_network(config), Plan(10, 10, Constant(0.1))).train()
    task.batches = SimpleNamespace(augment=SimpleNamespace(config=config.crops))
    task.momentum, task.regions_from, task.hold_last = Constant(0.5), 0, 0
    crops = [torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32), torch.randn(4, 3, 16, 16)]
    task.batch_at = lambda step: Batch(crops, None, None, torch.arange(4))
    return task


# -- gradients


@pytest.mark.parametrize(
    ("per", "limit", "norms"),
    [
        ("global", 0.0, [3.0, 4.0]),
        ("global", 10.0, [3.0, 4.0]),
        ("global", 1.0, [0.6, 0.8]),
        ("tensor", 0.0, [3.0, 4.0]),
        ("tensor", 3.5, [3.0, 3.5]),
        ("tensor", 1.0, [1.0, 1.0]),
    ],
)
def test_gradients_are_clipped_together_or_each(per: str, limit: float, norms: list[float]) -> None:
    """Lengths of 3 and 4 are 5 together, which is what is logged however they are clipped; directions stay."""
    stepper = stepper_of(ToyTask(), toy_plan(clip=limit, clip_per=per))
    weight, bias = stepper.learning[:2]
    for parameter in stepper.learning:
        parameter.grad = torch.zeros_like(parameter)
    weight.grad, bias.grad = torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([-4.0])
    assert stepper._clip().item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.grad, torch.tensor([[norms[0], 0.0, 0.0]]), rtol=1e-5, atol=0)
    torch.testing.assert_close(bias.grad, torch.tensor([-norms[1]]), rtol=1e-5, atol=0)


class Shared(ToyTask):
    """The same eight points at every step, in so many parts; without a norm, whose statistics are a part's own."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.norm = parts, nn.Identity()

    def batch_at(self, step: int) -> ToyBatch:
        points = torch.randn(8, 3, generator=torch.Generator().manual_seed(step // self.parts))
        return ToyBatch(points.chunk(self.parts)[step % self.parts], torch.arange(8 // self.parts))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_a_step_have_the_gradients_of_the_whole(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor]] = []
    clip = Stepper._clip

    def look(self: Stepper) -> Tensor:
        seen.append([parameter.grad.clone() for parameter in self.learning if parameter.grad is not None])
        return clip(self)

    monkeypatch.setattr(Stepper, "_clip", look)
    for count in (1, parts):
        stepper = stepper_of(Shared(count), toy_plan(accumulate=count))
        for step in range(2):
            stepper.step = step
            stepper.one_step()
    assert len(seen) == 4
    torch.testing.assert_close(seen[2:], seen[:2])


# -- statistics of BatchNorm


@pytest.mark.parametrize("kind", [*SMALL, "crops at once"])
def test_images_computed_again_are_counted_once(kind: str) -> None:
    """After a step the statistics are those that its forward pass left, though the backward pass repeats it."""
    if kind == "crops at once":
        task = label_free("resnet10t", crops_at_once=1)
    else:
        task = supervised(kind)
        task.backbone.model.set_grad_checkpointing(True)
    plan = Plan(10, 10, Constant(0.0))
    oracle = copy.deepcopy(task)
    oracle(task.batch_at(0), 0)
    stepper_of(task, plan).one_step()
    wanted = {name: buffer for name, buffer in oracle.named_buffers() if "running" in name or "tracked" in name}
    got = {name: buffer for name, buffer in task.named_buffers() if name in wanted}
    assert wanted and all(buffer > 0 for name, buffer in wanted.items() if "tracked" in name)
    torch.testing.assert_close(got, wanted)


def test_an_average_has_the_statistics_of_the_network_it_follows() -> None:
    task = supervised("resnet10t", ema=0.9)
    assert task.average is not None
    stepper_of(task, Plan(10, 10, Constant(0.1))).one_step()
    followed, follower = (dict(network.named_buffers()) for network in (task.backbone, task.average))
    assert any(name.endswith("running_mean") and buffer.any() for name, buffer in followed.items())
    torch.testing.assert_close(follower, followed, rtol=0, atol=0)


# -- steps that are skipped


@pytest.mark.parametrize("kind", ["train", "pretrain"])
def test_a_skipped_step_leaves_everything(kind: str) -> None:
    """Weights, BatchNorm and centres, and the averages that would otherwise go on towards the weights."""
    task: Any = supervised("resnet10t", ema=0.9) if kind == "train" else label_free("resnet10t")
    stepper = stepper_of(task, Plan(10, 10, Constant(0.1)))
    batch_at, states = task.batch_at, []
    for step, bad in enumerate((False, True, False)):
        task.batch_at = lambda step, bad=bad: spoilt(batch_at(step)) if bad else batch_at(step)
        stepper.step = step
        stepper.one_step()
        states.append({name: value.clone() for name, value in task.state_dict().items()})
    assert stepper.guard.tolist() == [0, 1]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    averaged = [name for name in states[0] if name.startswith(("average", "teacher", "views.teacher"))]
    averaged = [name for name in averaged if name.endswith("weight")]
    assert averaged and all(not torch.equal(states[2][name], states[1][name]) for name in averaged)


def spoilt(batch: Batch) -> Batch:
    images = [view * math.nan for view in batch.images] if isinstance(batch.images, list) else batch.images * math.nan
    return Batch(images, batch.targets, batch.labels, batch.index)


@pytest.mark.parametrize("skipped", [True, False])
def test_an_average_that_is_told_on_a_device(skipped: bool) -> None:
    """What a GPU does without being asked whether the step was skipped: the same average, or the very same numbers."""
    torch.manual_seed(0)
    follower, followed = nn.Linear(3, 2), nn.Linear(3, 2)
    oracle = copy.deepcopy(follower)
    with torch.no_grad():
        _move_unless(torch.tensor(skipped), list(follower.parameters()), list(followed.parameters()), 0.1)
    update_average(oracle, followed, 0.9, torch.tensor(skipped))
    assert torch.equal(oracle.weight, follower.weight) or not skipped
    torch.testing.assert_close(follower.state_dict(), oracle.state_dict())


# -- chance and losses


def test_chance_follows_from_seed_step_and_process() -> None:
    drawn = []
    for place in [(0, 3, 0), (0, 3, 0), (0, 3, 1), (0, 4, 0), (1, 3, 0)]:
        seed_step(*place)
        drawn.append(nn.functional.dropout(torch.ones(64), 0.5).tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(one) for one in drawn}) == 4


@pytest.mark.parametrize("weight", [0.3, 2.0])
def test_the_loss_is_the_sum_it_stands_for(weight: float) -> None:
    """L_tot = L_ce + λ · L_drloc, of one forward pass."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
    backbone = create_backbone("swin_nano", img_size=32, num_classes=2, **shape)
    head = RelativeLocalization(backbone.dim, pairs=8, hidden=8)
    task = SupervisedTask(backbone, head, LocalizationConfig(), Constant(weight)).train()
    labels = torch.tensor([0, 1, 0, 1])
    batch = Batch(torch.randn(4, 3, 32, 32), labels, labels, torch.arange(4))
    seed_step(0, 0, 0)
    losses = task(batch, 0)
    seed_step(0, 0, 0)
    logits = backbone.classify(backbone(batch.images).pooled)
    torch.testing.assert_close(losses["cross_entropy"], nn.functional.cross_entropy(logits, labels))
    assert losses["localization"] > 0
    torch.testing.assert_close(losses["loss"], losses["cross_entropy"] + weight * losses["localization"])
