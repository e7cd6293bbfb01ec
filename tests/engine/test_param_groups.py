"""Parameter groups: frozen blocks, layer decay, weight decay and schedules."""

from typing import Any

import pytest
import timm
import torch
from lightning_fabric import Fabric
from timm.layers.drop import DropPath
from torch import nn

from frugalvit.backbones import create_backbone
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import LocalizationConfig, TrainConfig
from frugalvit.engine.param_groups import (
    decay_groups,
    freeze_first,
    layer_groups,
    layers_of,
    merge_param_groups,
    remap_optimizer_state,
)
from frugalvit.engine.schedules import Constant, Cosine
from frugalvit.engine.step import TrainPlan, TrainStep, make_optimizer
from frugalvit.errors import UserError
from frugalvit.objectives import RelativeLocalization
from frugalvit.tasks.classification import train
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.pretraining.task import make_teacher
from helpers.tiny_runs import PRETRAIN, TRAIN, resolve

SMALL: dict[str, dict[str, Any]] = {
    "cvt_13": {"embed_dim": (8, 16, 16), "depths": (1, 2, 2), "num_heads": (1, 2, 2), "head_dim": 8},
    "cvt_tiny_w7": {"embed_dim": (8, 16, 16), "depths": (1, 2, 2), "num_heads": (1, 2, 2)},
    "vil_tiny_w7": {"embed_dim": (8, 16, 16), "depths": (1, 2, 2), "num_heads": (1, 2, 2)},
}
"""Networks whose later stages begin with an embedding of their own."""

FIRST = {1: 1, 2: 3}
"""Of the later stages the first block."""


def blocks_of(model: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of every block, from input to output."""
    return [
        [parameter for module in block for parameter in module.parameters()]
        for _, blocks in model.stage_parts()
        for block in blocks
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_freeze_blocks_and_their_embeddings(name: str, count: int) -> None:
    model: Any = create_backbone(name, img_size=64, num_classes=2, **SMALL[name]).model
    blocks = blocks_of(model)
    assert len(layers_of(model)) == len(blocks) + 2
    freeze_first(model, count)
    learning = [{parameter.requires_grad for parameter in block} for block in blocks]
    assert learning == [{False}] * count + [{True}] * (len(blocks) - count)
    inside = {id(parameter) for block in blocks for parameter in block}
    for stage, first in FIRST.items():
        embedding = [parameter for parameter in _stage(model, stage) if id(parameter) not in inside]
        assert {parameter.requires_grad for parameter in embedding} == ({True} if first >= count else {False})


def _stage(model: Any, number: int) -> list[nn.Parameter]:
    stages = list(model.layers) if hasattr(model, "layers") else []
    names = (f"stage{number}", f"layer{number + 1}")
    stage = stages[number] if stages else next(getattr(model, name) for name in names if hasattr(model, name))
    return list(stage.parameters())


def test_network_without_separate_blocks_is_an_error() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet10t", num_classes=2)
    model.group_matcher = None
    with pytest.raises(UserError, match="--freeze"):
        freeze_first(model, 1)


@pytest.mark.parametrize("name", SMALL)
def test_layer_decay_per_block(name: str) -> None:
    """An embedding has the rate of the first block of its stage."""
    model: Any = create_backbone(name, img_size=64, num_classes=2, **SMALL[name]).model
    scale = {
        id(parameter): group["lr_scale"] for group in layer_groups(model, 0.1, 0.5) for _, parameter in group["params"]
    }
    blocks = blocks_of(model)
    assert [{scale[id(parameter)] for parameter in block} for block in blocks] == [
        {0.5 ** (len(blocks) - number)} for number in range(len(blocks))
    ]
    inside = {id(parameter) for block in blocks for parameter in block}
    for stage, first in FIRST.items():
        rates = {scale[id(parameter)] for parameter in _stage(model, stage) if id(parameter) not in inside}
        assert rates == {scale[id(blocks[first][0])]}


@pytest.mark.parametrize(
    ("name", "part", "sizes"),
    [
        ("swinv2_tiny_window8_256", "logit_scale", {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}),
        ("swinv2_tiny_window8_256", "cpb_mlp", {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}),
        ("xcit_nano_12_p16_224", "temperature", {"depth": 1, "embed_dim": 16}),
        ("twins_svt_small", "pos_block", {}),
    ],
)
@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_no_weight_decay_of_a_network(name: str, part: str, sizes: dict[str, Any], layer_decay: float) -> None:
    backbone = create_backbone(name, img_size=64, num_classes=2, **sizes)
    task = ClassificationTask(
        backbone, None, LocalizationConfig(), Constant(0.0), weight_decay=0.1, layer_decay=layer_decay
    )
    groups = task.parameter_groups()
    of_part = {group["decayed"] for group in groups for name, _ in group["params"] if part in name}
    assert of_part == {False} and any(group["decayed"] for group in groups)


def test_moments_follow_their_parameters() -> None:
    """A continued run may decay other parameters."""
    parameters = {name: nn.Parameter(torch.full((2, 2), float(k))) for k, name in enumerate(("a", "b", "c"))}
    before, after = (
        torch.optim.AdamW(decay_groups(parameters.items(), 0.05, undecayed=undecayed)) for undecayed in ((), ("a",))
    )
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    before.step()
    after.load_state_dict(remap_optimizer_state(before.state_dict(), after.state_dict()))
    for parameter in parameters.values():
        assert torch.equal(after.state[parameter]["exp_avg"], before.state[parameter]["exp_avg"])
    assert [group["weight_decay"] for group in after.param_groups] == [0.05, 0]


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("step", [0, 7])
def test_schedules_reach_the_optimizer(layer_decay: float, step: int) -> None:
    """On Swin: matrices are decayed; biases, norms and position tables are not; heads learn faster."""
    backbone = create_backbone("swin_nano", img_size=32, num_classes=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2))
    head = RelativeLocalization(backbone.dim, hidden=8)
    task = ClassificationTask(
        backbone, head, LocalizationConfig(lr_scale=3.0), Constant(0.5), weight_decay=0.1, layer_decay=layer_decay
    )
    plan = TrainPlan(10, 10, Cosine(1e-2, 1e-4, 10, warmup=3, warmup_from=1e-3), weight_decay=Cosine(0.1, 0.4, 10))
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(task, make_optimizer(task, plan, fabric))
    stepper = TrainStep(task, module, optimizer, plan, fabric)
    stepper._set_schedules(step)
    settings = {
        id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    matrices = {
        f"{name}.weight" for name, part in task.named_modules() if isinstance(part, nn.Linear | nn.Conv2d | nn.Conv1d)
    }
    names = dict(task.named_parameters())
    assert len(settings) == len(names) and len(matrices) > 5
    depth = {id(parameter): number for number, layer in enumerate(layers_of(backbone.model)) for _, parameter in layer}
    for name, parameter in names.items():
        layers_above = max(depth.values()) - depth[id(parameter)] if id(parameter) in depth else 0
        scale = 3.0 if name.startswith("localization") else layer_decay**layers_above
        decay = plan.weight_decay.at(step) if name in matrices else 0.0  # type: ignore[union-attr]
        assert settings[id(parameter)] == pytest.approx((scale * plan.lr.at(step), decay)), name


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_warm_up_of_a_run(verb: str) -> None:
    """The warm-up takes at most a fifth of the run; the last rate is low."""
    values = {"data": "x", "steps": 100, "batch": 8, "lr": 1e-2, "optimizer": {"warmup": 1.0, "min_lr": 1e-3}}
    if verb == "train":
        plan = train.make_plan(resolve(TrainConfig.parse(TRAIN | values), 80), images=80, world=1)
    else:
        plan = pretrain.make_plan(resolve(PretrainConfig.parse(PRETRAIN | values), 80), images=80, world=1)
    rates = [plan.lr.at(step) for step in range(plan.steps)]
    assert plan.steps_per_epoch == 10
    assert rates[0] <= 1e-5 and rates[9] == pytest.approx(1e-2) and max(rates) == pytest.approx(1e-2)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert plan.lr.at(plan.steps) == pytest.approx(1e-5)


def test_weight_decay_schedule() -> None:
    """It has no warm-up, as in the paper; in supervised training it is constant."""
    values = {"data": "x", "steps": 100, "batch": 8, "optimizer": {"warmup": 2.0, "weight_decay": 0.04}}
    config = resolve(PretrainConfig.parse(PRETRAIN | values | {"weight_decay_end": 0.4}), 80)
    plan = pretrain.make_plan(config, images=80, world=1)
    assert plan.weight_decay is not None
    assert [plan.weight_decay.at(step) for step in (0, 50, 100)] == pytest.approx([0.04, 0.22, 0.4])
    plan = train.make_plan(resolve(TrainConfig.parse(TRAIN | values), 80), images=80, world=1)
    assert plan.weight_decay is not None
    assert [plan.weight_decay.at(step) for step in (0, 50, 100)] == [0.04] * 3


def test_teacher_has_no_stochastic_depth() -> None:
    shape: dict[str, Any] = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
    student = create_backbone("swin_nano", img_size=32, num_classes=0, drop_path=0.2, **shape)
    rates = [
        [part.drop_prob for part in network.modules() if isinstance(part, DropPath)]
        for network in (student, make_teacher(student))
    ]
    assert max(rates[0]) == pytest.approx(0.2) and not any(rates[1])
    images = torch.randn(2, 3, 32, 32)
    twin = make_teacher(student).train()
    torch.testing.assert_close(twin(images).pooled, twin(images).pooled, rtol=0, atol=0)


def test_merge_param_groups_keeps_decay_and_rate() -> None:
    settings = [(0.1, 1.0), (0.0, 1.0), (0.1, 0.5), (0.1, 1.0), (0.1, 10.0)]
    groups: list[dict[str, Any]] = [
        {"params": [(f"p{i}", nn.Parameter(torch.zeros(2)))], "weight_decay": decay, "decayed": True, "lr_scale": lr}
        for i, (decay, lr) in enumerate(settings)
    ]
    merged = merge_param_groups(groups)
    kept = {name: (group["weight_decay"], group["lr_scale"]) for group in merged for name, _ in group["params"]}
    assert len(merged) == 4 and kept == {f"p{i}": setting for i, setting in enumerate(settings)}
