"""One training step: clipping, accumulation, BatchNorm, EMA, random numbers and losses."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones import create_backbone
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.loader import Batch
from frugalvit.engine.schedules import Constant, Cosine, Linear
from frugalvit.engine.step import TrainPlan, TrainStep, make_optimizer, seed_step
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.pretraining import train
from helpers.tiny_runs import PRETRAIN, resolve
from helpers.toy_task import ToyBatch, ToyTask, toy_plan

# Networks with BatchNorm: timm's, which computes activations again in its own way, and one of ours.
SMALL: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "cvt_13": {"embed_dim": (8, 16), "depths": (1, 1), "num_heads": (1, 1), "head_dim": 8},
}


def stepper_of(task: Any, plan: TrainPlan) -> TrainStep:
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(task, make_optimizer(task, plan, fabric))
    return TrainStep(task, module, optimizer, plan, fabric)


def supervised(backbone: str, *, ema: float = 0.0) -> ClassificationTask:
    """A classifier of four images, the same at every step."""
    torch.manual_seed(0)
    network = create_backbone(backbone, img_size=32, num_classes=2, **SMALL.get(backbone, {}))
    task = ClassificationTask(network, None, LocalizationConfig(), Constant(0.0), ema=ema).train()
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    task.batch_at = lambda step: Batch(images, labels, labels, torch.arange(4))
    return task


def label_free(backbone: str, **more: Any) -> Any:
    """A student and its teacher on two global crops and one local crop, the same at every step."""
    torch.manual_seed(0)
    values = PRETRAIN | {"data": "x", "backbone": backbone, "backbone_args": {}, "img_size": 32, "localization": {}}
    config = resolve(PretrainConfig.parse(values | more))
    task: Any = train.make_task(config, train.make_network(config), TrainPlan(10, 10, Constant(0.1))).train()
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
def test_gradient_clipping(per: str, limit: float, norms: list[float]) -> None:
    """Norms of 3 and 4 have the total norm 5, which is logged; directions stay."""
    stepper = stepper_of(ToyTask(), toy_plan(clip=limit, clip_per=per))
    weight, bias = stepper.learning[:2]
    for parameter in stepper.learning:
        parameter.grad = torch.zeros_like(parameter)
    weight.grad, bias.grad = torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([-4.0])
    assert stepper._clip().item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.grad, torch.tensor([[norms[0], 0.0, 0.0]]), rtol=1e-5, atol=0)
    torch.testing.assert_close(bias.grad, torch.tensor([-norms[1]]), rtol=1e-5, atol=0)


class FixedPoints(ToyTask):
    """The same eight points at every step, in several parts, without a norm."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.norm = parts, nn.Identity()

    def batch_at(self, step: int) -> ToyBatch:
        points = torch.randn(8, 3, generator=torch.Generator().manual_seed(step // self.parts))
        return ToyBatch(points.chunk(self.parts)[step % self.parts], torch.arange(8 // self.parts))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulated_gradients_equal_those_of_the_batch(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor]] = []
    clip = TrainStep._clip

    def record(self: TrainStep) -> Tensor:
        seen.append([parameter.grad.clone() for parameter in self.learning if parameter.grad is not None])
        return clip(self)

    monkeypatch.setattr(TrainStep, "_clip", record)
    for count in (1, parts):
        stepper = stepper_of(FixedPoints(count), toy_plan(accumulate=count))
        for step in range(2):
            stepper.step = step
            stepper.one_step()
    assert len(seen) == 4
    torch.testing.assert_close(seen[2:], seen[:2])


# -- statistics of BatchNorm


@pytest.mark.parametrize("kind", [*SMALL, "crops at once"])
def test_recomputed_images_count_once_in_batch_norm(kind: str) -> None:
    """Recomputing activations in the backward pass must not update the statistics again."""
    if kind == "crops at once":
        task = label_free("resnet10t", crops_at_once=1)
    else:
        task = supervised(kind)
        task.backbone.model.set_grad_checkpointing(True)
    plan = TrainPlan(10, 10, Constant(0.0))
    oracle = copy.deepcopy(task)
    oracle(task.batch_at(0), 0)
    stepper_of(task, plan).one_step()
    wanted = {name: buffer for name, buffer in oracle.named_buffers() if "running" in name or "tracked" in name}
    got = {name: buffer for name, buffer in task.named_buffers() if name in wanted}
    assert wanted and all(buffer > 0 for name, buffer in wanted.items() if "tracked" in name)
    torch.testing.assert_close(got, wanted)


# -- steps that are skipped


@pytest.mark.parametrize("kind", ["train", "pretrain"])
def test_skipped_step_changes_nothing(kind: str) -> None:
    """Weights, BatchNorm, centres and EMA stay."""
    task: Any = supervised("resnet10t", ema=0.9) if kind == "train" else label_free("resnet10t")
    stepper = stepper_of(task, TrainPlan(10, 10, Constant(0.1)))
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


# -- random numbers and losses


def test_random_state_depends_on_seed_step_and_rank() -> None:
    drawn = []
    for numbers in [(0, 3, 0), (0, 3, 0), (0, 3, 1), (0, 4, 0), (1, 3, 0)]:
        seed_step(*numbers)
        drawn.append(nn.functional.dropout(torch.ones(64), 0.5).tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(one) for one in drawn}) == 4


def test_evaluation_uses_the_ema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and classifier of the EMA predict 1; those of the trained network predict 0."""
    task = supervised("cvt_13", ema=0.9)
    assert task.average is not None
    for network, answer in ((task.backbone, 0), (task.average, 1)):
        classifier: Any = network.model.get_classifier()  # type: ignore[operator]
        nn.init.zeros_(classifier.weight)
        classifier.bias.data = nn.functional.one_hot(torch.tensor(answer), 2).float()
    images, seen = task.batch_at(0).images, []
    for name in ("backbone", "average"):
        getattr(task, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    monkeypatch.setattr(
        "frugalvit.tasks.classification.task.eval_batches",
        lambda *_, **__: [(images, torch.ones(4).long(), torch.arange(4))],
    )
    task.fabric = Fabric(accelerator="cpu", devices=1)
    scores = task.scores(SimpleNamespace(store=range(4), transform=None, batch=4, batches=1))
    assert scores.summary()["top1"] == 100 and seen == ["average"]


def localizing(dense: bool, weight: float, **settings: Any) -> tuple[ClassificationTask, Batch]:
    """A classifier with Drloc at its end or in every block, and images before and after mixing."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
    backbone = create_backbone("swin_nano", img_size=32, num_classes=2, **shape)
    more: dict[str, Any] = {"pairs": 8, "hidden": 8}
    head = DenseLocalization(backbone.block_dims(), **more) if dense else RelativeLocalization(backbone.dim, **more)
    task = ClassificationTask(backbone, head, LocalizationConfig(**settings), Constant(weight)).train()
    labels = torch.tensor([0, 1, 0, 1])
    images, clean = torch.randn(2, 4, 3, 32, 32)
    return task, Batch(images, labels, labels, torch.arange(4), clean=clean)


@pytest.mark.parametrize("weight", [0.3, 2.0])
@pytest.mark.parametrize("dense", [False, True])
def test_supervised_loss(dense: bool, weight: float) -> None:
    """L_tot = L_ce + λ · L_drloc, of one forward pass; of all blocks in a second one."""
    task, batch = localizing(dense, weight)
    seed_step(0, 0, 0)
    losses = task(batch, 0)
    seed_step(0, 0, 0)
    logits = task.backbone.classify(task.backbone(batch.images).pooled)
    torch.testing.assert_close(losses["cross_entropy"], nn.functional.cross_entropy(logits, batch.labels))
    assert losses["localization"] > 0
    torch.testing.assert_close(losses["loss"], losses["cross_entropy"] + weight * losses["localization"])


@pytest.mark.parametrize("dense", [False, True])
def test_drloc_on_images_before_mixing(dense: bool) -> None:
    losses = {}
    for name in ("mixed", "clean"):
        task, batch = localizing(dense, 1.0, images=name)
        losses[name] = task.eval()(batch, 0)
    alone = task.eval()(Batch(batch.clean, batch.targets, batch.labels, batch.index), 0)  # type: ignore[arg-type]
    torch.testing.assert_close(losses["clean"]["localization"], alone["localization"])
    torch.testing.assert_close(losses["clean"]["cross_entropy"], losses["mixed"]["cross_entropy"])
    assert losses["clean"]["localization"] != losses["mixed"]["localization"]


def test_pretraining_loss() -> None:
    """Each loss has its weight and this step's temperature; regions start at their first step."""
    task = label_free("resnet10t")
    head = RelativeLocalization(task.student.dim, pairs=8, hidden=8)
    task.localization, task.weights = head, (0.3, 0.9, 0.2)
    task.regions_from, task.teacher_temp = 3, Linear(0.04, 0.07, 5)
    batch = task.batch_at(0)
    before, losses = (task(batch, step) for step in (2, 3))
    parts = [losses[name] for name in ("view_loss", "region_loss", "localization")]
    torch.testing.assert_close(losses["loss"], 0.3 * parts[0] + 0.9 * parts[1] + 0.2 * parts[2])
    assert "region_loss" not in before
    torch.testing.assert_close(before["loss"], 0.3 * before["view_loss"] + 0.2 * before["localization"])
    warm, at_three = (task.step_inputs(batch, step)[0].item() for step in (0, 3))
    assert (warm, at_three) == pytest.approx((0.04, task.teacher_temp.at(3)))


@pytest.mark.parametrize("step", [0, 5, 9])
def test_teacher_update_uses_the_momentum_of_the_step(step: int) -> None:
    """The backbone and both heads."""
    task = label_free("resnet10t")
    task.momentum = Cosine(0.5, 1.0, 10)
    pairs = [(task.teacher, task.student), (task.views.teacher, task.views.student)]
    pairs.append((task.regions.teacher, task.regions.student))
    with torch.no_grad():
        for teacher, student in pairs:
            for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
                one.fill_(1.0)
                other.zero_()
    task.after_step(step)
    means = {parameter.mean().item() for teacher, _ in pairs for parameter in teacher.parameters()}
    assert list(means) == pytest.approx([task.momentum.at(step)] * len(means))
