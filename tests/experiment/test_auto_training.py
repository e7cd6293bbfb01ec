"""What "auto" chooses for a supervised run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frugalvit.backbones import create_backbone
from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.data import PAPER_VIEWS, SMALL_VIEWS, AugmentConfig, CropsConfig, Views
from frugalvit.config.dense import DetectConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.data.augment.transforms import MultiCrop, TrainAugment
from frugalvit.engine.param_groups import merge_param_groups
from frugalvit.engine.step import TrainPlan
from frugalvit.experiment.auto_values import (
    AutoValues,
    Facts,
    evaluation_interval,
    resolve_pretraining,
    resolve_training,
    supervised_batch,
    supervised_epochs,
    supervised_lr,
    teacher_momentum,
)
from frugalvit.experiment.dense_auto_values import resolve_detection

SWIN_T, NANO = 28_000_000, 400_000


def detection(config: Any, facts: Facts, auto: AutoValues) -> Any:
    return resolve_detection(config, facts, [4, 8, 16, 32, 64], (False, "no masks"), auto)


@pytest.mark.parametrize(
    ("batch", "parameters", "finetune", "lr"),
    [
        (1024, SWIN_T, False, 1e-3),
        (128, SWIN_T, False, 3.5e-4),
        (1024, SWIN_T, True, 5e-4),
        (16, NANO, False, 5e-4),
        (64, NANO, False, 1e-3),
        (1024, NANO, True, 2e-3),
        (1024, 0, False, 1e-3),
    ],
)
def test_learning_rate(batch: int, parameters: int, finetune: bool, lr: float) -> None:
    found, reason = supervised_lr(batch, parameters, finetune=finetune)
    assert found == lr
    assert ("small network" in reason) == (parameters == NANO)


@pytest.mark.parametrize(
    ("images", "device", "batch", "epochs"),
    [(500, "cpu", 16, 96), (2040, "cpu", 64, 96), (2040, "cuda", 64, 322), (50_000, "cuda", 256, 100)],
)
def test_batch_and_length(images: int, device: str, batch: int, epochs: int) -> None:
    facts = Facts(images, 10, 224, device)
    assert supervised_batch(facts)[0] == batch
    assert supervised_epochs(facts, batch)[0] == epochs


@pytest.mark.parametrize(
    ("family", "parameters", "values", "variant", "grid_size"),
    [
        ("swin", SWIN_T, {}, "ce", 7),
        ("swin", NANO, {}, "l1", 7),
        ("vit", 86_000_000, {}, "l1", 7),
        ("swin", SWIN_T, {"init": "runs/pretrained"}, "l1", 7),
        ("swin", SWIN_T, {"pretrained": True}, "l1", 7),
        ("swin", SWIN_T, {"recipe": "drloc-paper"}, "l1", 7),
        ("swin", SWIN_T, {"recipe": "drloc-released"}, "l1", 7),
        ("swin", SWIN_T, {"localization": {"form": "released"}}, "l1", 7),
        ("swin", SWIN_T, {"localization": {"grid_size": None}}, "l1", None),
        ("swin", SWIN_T, {"localization": {"grid_size": 5}}, "ce", 5),
        ("swin", SWIN_T, {"localization": {"variant": "reg"}}, "reg", 7),
        ("swin", SWIN_T, {"localization": {"variant": "dense"}}, "dense", None),
        ("swin", SWIN_T, {"localization": {"variant": "dense", "grid_size": 7}}, "dense", 7),
    ],
)
def test_drloc_variant(family: str, parameters: int, values: dict[str, Any], variant: str, grid_size: int) -> None:
    """The strong form where it measured best: large Swins from random weights; what is asked for stays."""
    config, decisions = TrainConfig.parse({"data": "photos"} | values), AutoValues()
    config = resolve_training(config, Facts(2040, 102, 224, "cuda", family, parameters), decisions)
    assert (config.localization.variant, config.localization.grid_size) == (variant, grid_size)
    assert [each.name for each in decisions].count("localization.variant") == (
        0 if "variant" in values.get("localization", {}) or "drloc" in config.recipe else 1
    )


@pytest.mark.parametrize(
    ("values", "prob"),
    [
        ({"epochs": 100}, 0.0),
        ({"epochs": 149}, 0.0),
        ({"epochs": 180}, 0.5),
        ({"epochs": 320}, 0.5),
        ({"steps": 1000}, 0.0),  # 1,000 of 15 steps an epoch
        ({"steps": 5000}, 0.5),
        ({"epochs": 10, "mixing": {"prob": 0.3}}, 0.3),
        ({"epochs": 10, "mixing": {"mixup": 0, "cutmix": 0}}, "auto"),  # nothing to decide
        ({"recipe": "drloc-paper"}, 1.0),
        ({"recipe": "drloc-released"}, 1.0),
        ({"epochs": 100, "mixing": {"mixup": 0.4, "cutmix": 0}}, 0.5),  # somebody wants it
        ({"epochs": 100, "mixing": {"switch_prob": 0.3}}, 0.5),
        ({"epochs": 100, "mixing": {"cutmix": 0}}, 0.0),  # somebody wants less of it
        ({"epochs": 100, "mixing": {"smoothing": 0.2}}, 0.0),
        ({"epochs": 100, "recipe": "scratch"}, 0.0),
    ],
)
def test_mixing_probability(values: dict[str, Any], prob: float | str) -> None:
    config, decisions = TrainConfig.parse({"data": "x", "batch": 128} | values), AutoValues()
    config = resolve_training(config, Facts(2040, 102, 224, "cuda", "swin", SWIN_T), decisions)
    assert config.mixing.prob == prob
    given = "prob" in values.get("mixing", {}) or "drloc" in values.get("recipe", "") or prob == "auto"
    assert ("mixing.prob" in {decision.name for decision in decisions}) == (not given)


@pytest.mark.parametrize(
    ("setting", "prob", "operations"),
    [("lr=1", 0.0, 0), ("mixing.mixup=0.4", 0.5, 0), ("augment.magnitude=5", 0.0, 2)],
)
def test_runs_of_a_comparison_resolve_the_same_values(setting: str, prob: float, operations: int) -> None:
    """It is given all values, not only those that somebody has thought of."""
    compared = CompareConfig.parse({"data": "x", "epochs": 100, "batch": 128, "settings": ["a: lr=1", "b: lr=2"]})
    config = TrainConfig.parse(compared.run_values(parse_assignments([setting]), 0, "out"))
    config = resolve_training(config, Facts(2040, 102, 224, "cuda", "swin", SWIN_T), AutoValues())
    assert (config.mixing.prob, config.augment.operations) == (prob, operations)


@pytest.mark.parametrize(
    ("parameters", "values", "operations"),
    [
        (NANO, {"epochs": 100}, 0),
        (NANO, {"epochs": 180}, 2),
        (SWIN_T, {"epochs": 100}, 0),
        (SWIN_T, {"epochs": 100, "init": "runs/a"}, 2),  # not measured after pre-training
        (SWIN_T, {"epochs": 100, "batch": 32}, 2),  # 6,300 steps
        (SWIN_T, {"epochs": 180}, 2),
        (NANO, {"epochs": 100, "batch": 32}, 0),
        (NANO, {"epochs": 100, "augment": {"operations": 3}}, 3),
        (NANO, {"epochs": 100, "augment": {"magnitude": 5}}, 2),  # somebody wants it
        (NANO, {"recipe": "drloc-paper"}, 2),
    ],
)
def test_augment_operations(parameters: int, values: dict[str, Any], operations: int) -> None:
    config = TrainConfig.parse({"data": "x", "batch": 128} | values)
    config = resolve_training(config, Facts(2040, 102, 224, "cpu", "swin", parameters), AutoValues())
    assert config.augment.operations == operations


@pytest.mark.parametrize(
    ("steps", "side", "momentum"),
    [
        (400, 224, 0.98),
        (6_300, 112, 0.9921),
        (750_000, 224, 0.996),
        (400, 32, 0.98),
        (2_610, 32, 0.996),
        (1_000, 32, 0.99),
    ],
)
def test_teacher_momentum(steps: int, side: int, momentum: float) -> None:
    assert teacher_momentum(steps, side)[0] == momentum


@pytest.mark.parametrize(
    ("steps", "per_epoch", "batch", "watched", "interval"),
    [
        (2976, 31, 64, 204, 60),  # 2,040 images on a CPU: fifty in the run
        (19_500, 195, 256, 5_000, 390),  # 50,000 images, 100 epochs: every other
        (300, 100, 16, 1_000, 100),  # three epochs: one after each
        (1_000, 10, 32, 6_000, 250),  # a quarter of the time is four
        (1_000, 10, 32, 100_000, 250),  # and never fewer
        (1_000, 10, 32, 2_000, 84),  # a quarter of the time is twelve
        (1_000, 10, 32, 0, 20),
    ],
)
def test_evaluation_interval(steps: int, per_epoch: int, batch: int, watched: int, interval: int) -> None:
    assert evaluation_interval(steps, per_epoch, batch, watched) == interval


def test_a_loss_that_is_off_is_not_resolved() -> None:
    config, decisions = TrainConfig.parse({"data": "photos", "localization": {"weight": 0}}), AutoValues()
    config = resolve_training(config, Facts(2040, 102, 224, "cuda", "swin", SWIN_T), decisions)
    assert not any(each.name.startswith("localization") for each in decisions)


@pytest.mark.parametrize(
    ("dim", "values", "decided"),
    [
        (96, {}, {"localization.hidden": 96}),
        (768, {}, {"localization.hidden": 512}),
        (768, {"localization": {"hidden": 64}}, {}),
        (768, {"localization": {"weight": 0}}, {}),
    ],
)
def test_drloc_head_width(dim: int, values: dict[str, Any], decided: dict[str, int]) -> None:
    config, decisions = TrainConfig.parse({"data": "photos"} | values), AutoValues()
    config = resolve_training(config, Facts(500, 10, 64, "cpu", dim=dim), decisions)
    assert {each.name: each.value for each in decisions if each.name == "localization.hidden"} == decided
    if decided:
        assert config.localization.hidden == decided["localization.hidden"]


@pytest.mark.parametrize(("dim", "width"), [(96, 384), (768, 2048)])
def test_matching_head_width(dim: int, width: int) -> None:
    config, decisions = PretrainConfig.parse({"data": "photos"}), AutoValues()
    config = resolve_pretraining(config, Facts(500, 10, 64, "cpu", dim=dim), decisions)
    assert [each.value for each in decisions if each.name == "matching.hidden"] == [width]
    assert config.matching.hidden == width


@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig])
def test_batch_is_at_most_the_number_of_images(kind: type[RunConfig]) -> None:
    rules: Any = resolve_training if kind is TrainConfig else resolve_pretraining
    config, decisions = kind.parse({"data": "photos", "img_size": 32, "batch": 64}), AutoValues()
    config = rules(config, Facts(10, 2, 32, "cpu"), decisions)
    assert config.batch == 10 and decisions[0].reason == "there are no more training images than that"


@pytest.mark.parametrize(
    ("devices", "accumulate", "asked", "used"),
    [(3, 1, 2, {"train": 6, "other": 3}), (1, 2, 3, {"train": 2, "other": 2}), (2, 1, 50, {"train": 40, "other": 40}),
     (3, 1, 64, {"train": 36, "other": 39}), (3, 1, "auto", {"train": 6, "other": 6}), (1, 1, 7, {"train": 7})],
)  # fmt: skip
@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig, DetectConfig])
def test_other_values_follow_the_shared_batch(
    kind: type[RunConfig], devices: int, accumulate: int, asked: int | str, used: dict[str, int]
) -> None:
    """Processes and parts of a step share it equally, in pairs where images are mixed: what else is decided knows."""
    rules: Any = {TrainConfig: resolve_training, PretrainConfig: resolve_pretraining, DetectConfig: detection}[kind]
    facts = Facts(40, 2, 32, "cpu", "swin", NANO)
    batch = used.get("train" if kind is TrainConfig else "other", used["train"])
    if kind is DetectConfig and asked == "auto":
        batch = 3  # it begins from 4, not from 8
    values = {"data": "photos", "img_size": 32, "batch": asked, "devices": devices, "accumulate": accumulate}
    decisions = AutoValues()
    config = rules(kind.parse(values), facts, decisions)
    assert config.batch == batch and sum(each.name == "batch" for each in decisions) == (batch != asked)
    same = rules(kind.parse({"data": "photos", "img_size": 32, "batch": batch}), facts, AutoValues())
    apart = {"devices", "accumulate"}
    assert config.model_dump(exclude=apart) == same.model_dump(exclude=apart)
    assert TrainPlan.from_config(config, 40, devices, group=2 if kind is TrainConfig else 1).images_per_step == batch


def test_a_resumed_run_keeps_its_batch(tmp_path: Path) -> None:
    config, decisions = TrainConfig.parse({"resume": str(tmp_path), "batch": 7, "accumulate": 2}), AutoValues()
    config = resolve_training(config, Facts(40, 2, 32, "cpu"), decisions)
    assert config.batch == 7


def test_grid_size_of_drloc() -> None:
    config, decisions = TrainConfig.parse({"data": "photos"}), AutoValues()
    config = resolve_training(config, Facts(2040, 102, 224, "cuda", "swin", SWIN_T), decisions)
    assert ("localization.grid_size", 7) in [(each.name, each.value) for each in decisions]


@pytest.mark.parametrize(
    ("world", "accumulate", "together", "images", "batch"),
    [
        (1, 1, 2, 1000, 50),  # one process: pairs stay together by themselves
        (3, 1, 1, 1000, 48),
        (3, 1, 2, 1000, 48),
        (3, 2, 2, 1000, 48),
        (4, 4, 2, 1000, 32),
        (1, 1, 1, 30, 30),
        (8, 8, 1, 30, 64),  # at least one image a part
    ],
)
def test_batch_in_equal_parts(world: int, accumulate: int, together: int, images: int, batch: int) -> None:
    values = {"data": "photos", "batch": 50, "lr": 0.1, "epochs": 3, "accumulate": accumulate}
    config = TrainConfig.parse(
        values | {"img_size": 32, "ema": 0.0, "evaluate_every": 1, "localization": {"weight": 0}}
    )
    config = config.with_options({}, ResolvedTrainConfig)
    plan = TrainPlan.from_config(config, images, world, group=together, lines=20)
    assert plan.images_per_step == batch and plan.steps_per_epoch == max(1, images // batch)
    assert plan.steps == 3 * plan.steps_per_epoch and plan.log_every == max(1, min(10, plan.steps // 20))


def test_merge_param_groups() -> None:
    """Every parameter keeps its decay and its share of the learning rate."""
    names = [(f"p{number}", nn.Parameter(torch.zeros(2, 2))) for number in range(6)]
    groups = [
        {"params": [names[0]], "weight_decay": 0.1, "decayed": True, "lr_scale": 1.0},
        {"params": [names[1]], "weight_decay": 0.0, "decayed": False, "lr_scale": 1.0},
        {"params": [names[2]], "weight_decay": 0.1, "decayed": True, "lr_scale": 0.5},
        {"params": names[3:5], "weight_decay": 0.1, "decayed": True, "lr_scale": 1.0},
        {"params": [names[5]], "weight_decay": 0.1, "decayed": True, "lr_scale": 10.0},
    ]

    def learning(groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
        return {name: (group["weight_decay"], group["lr_scale"]) for group in groups for name, _ in group["params"]}

    before = learning(groups)
    found = merge_param_groups(groups)
    assert len(found) == 4
    assert learning(found) == before == learning(groups)


def test_facts_of_the_backbone() -> None:
    facts = Facts(500, 10, 64, "cpu").with_backbone(create_backbone("swin_nano", img_size=32, num_classes=10))
    assert facts.family == "swin" and 300_000 < facts.parameters < 500_000 and facts.images == 500


@pytest.mark.parametrize(
    ("side", "temperature", "views"), [(32, 0.04, SMALL_VIEWS), (33, 0.07, PAPER_VIEWS), ((32, 64), 0.07, PAPER_VIEWS)]
)
def test_small_inputs_have_milder_views(side: Any, temperature: float, views: Views) -> None:
    config = PretrainConfig.parse({"data": "x", "img_size": side, "epochs": 60, "crops": {"blur_sigma": [1, 2]}})
    decisions = AutoValues()
    config = resolve_pretraining(config, Facts(5000, 0, 32, "cuda"), decisions)
    assert config.matching.teacher_temp == temperature
    assert config.crops.views(1000) == config.crops.views(8) == views._replace(blur_sigma=(1.0, 2.0))
    assert {"crops.global_scale", "crops.local_scale"} < {decision.name for decision in decisions}
    assert MultiCrop(CropsConfig(), side).ranges == views


@pytest.mark.parametrize(
    ("images", "device", "img_size", "epochs"),
    [
        (45_000, "cuda", 32, 177),
        (45_000, "cuda", 64, 100),
        (2_040, "cuda", 224, 800),
        (8_189, "cuda", 112, 244),
        (2_040, "cpu", 32, 19),
        (45_000, "cuda", "auto", 177),
    ],
)
def test_pretraining_epochs(images: int, device: str, img_size: Any, epochs: int) -> None:
    config = PretrainConfig.parse({"data": "x", "img_size": img_size})
    config = resolve_pretraining(config, Facts(images, 0, 32, device), AutoValues())
    assert config.epochs == epochs


@pytest.mark.parametrize(("side", "crop"), [(32, "padded"), (33, "resized")])
def test_crop(side: int, crop: str) -> None:
    config = TrainConfig.parse({"data": "x", "img_size": side})
    config = resolve_training(config, Facts(500, 10, 64, "cpu"), AutoValues())
    assert config.augment.crop == crop == TrainAugment(AugmentConfig(), side).crop


@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig])
def test_steps_override_epochs(kind: Any) -> None:
    decisions = AutoValues()
    config = kind.parse({"data": "x", "img_size": 32, "steps": 3, "epochs": 7})
    (resolve_training if kind is TrainConfig else resolve_pretraining)(config, Facts(500, 10, 64, "cpu"), decisions)
    assert "steps = 3: --steps overrides --epochs 7" in [str(decision) for decision in decisions]
