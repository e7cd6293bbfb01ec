"""Resolving "auto": which rule applies to which options, and what the user sets stays."""

from pathlib import Path
from typing import Any

import pytest

from frugalvit.backbones import create_backbone
from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.data import PAPER_VIEWS, SMALL_VIEWS, AugmentConfig, CropsConfig, Views
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import DetectConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.engine.step import TrainPlan
from frugalvit.errors import UserError
from frugalvit.experiment.builders import make_localization
from frugalvit.experiment.resolve import (
    AutoValues,
    add_backbone_facts,
    resolve_input,
    resolve_pretraining,
    resolve_training,
)
from frugalvit.experiment.resolve_dense import resolve_detection

SWIN_T, NANO = 28_000_000, 400_000
FLOWERS = Facts(2040, 102, 224, "cuda", "swin", SWIN_T)


def detection(config: Any, facts: Facts, auto: AutoValues) -> Any:
    return resolve_detection(config, facts, [4, 8, 16, 32, 64], (0, 9), auto)


RULES: dict[Any, Any] = {TrainConfig: resolve_training, PretrainConfig: resolve_pretraining, DetectConfig: detection}


def resolve(values: dict[str, Any], facts: Facts = FLOWERS, kind: Any = TrainConfig) -> tuple[Any, dict[str, Any]]:
    """Return the resolved configuration, and what "auto" chose by name."""
    auto = AutoValues()
    return RULES[kind](kind.parse({"data": "x"} | values), facts, auto), {one.name: one.value for one in auto}


@pytest.mark.parametrize(
    ("family", "parameters", "values", "variant", "grid_size"),
    [
        ("swin", SWIN_T, {}, "ce", 7),
        ("swin", NANO, {}, "l1", 7),
        ("vit", 86_000_000, {}, "l1", 7),
        ("swin", SWIN_T, {"init": "runs/pretrained"}, "l1", 7),
        ("swin", SWIN_T, {"pretrained": True}, "l1", 7),
        ("swin", SWIN_T, {"recipe": "drloc-paper"}, "l1", 7),
        ("swin", SWIN_T, {"localization": {"form": "released"}}, "l1", 7),
        ("swin", SWIN_T, {"localization": {"grid_size": None}}, "l1", None),
        ("swin", SWIN_T, {"localization": {"grid_size": 5}}, "ce", 5),
        ("swin", SWIN_T, {"localization": {"variant": "reg"}}, "reg", 7),
        ("swin", SWIN_T, {"localization": {"variant": "dense"}}, "dense", None),
    ],
)
def test_drloc_variant(family: str, parameters: int, values: dict[str, Any], variant: str, grid_size: int) -> None:
    """Eq. 5 for large Swins from scratch, where it measured best; the user's choice stays."""
    if "recipe" not in values:
        values = values | {"localization": {"weight": "paper"} | values.get("localization", {})}
    config, auto = resolve(values, Facts(2040, 102, 224, "cuda", family, parameters))
    assert (config.localization.variant, config.localization.grid_size) == (variant, grid_size)
    is_set = "variant" in values.get("localization", {}) or "drloc" in config.recipe
    assert ("localization.variant" in auto) == (not is_set)


@pytest.mark.parametrize(
    ("backbone", "rate"), [("swin_tiny_w7", 0.2), ("t2t_vit_14", 0.1), ("cvt_13", "auto"), ("resnet50", "auto")]
)
def test_drloc_paper_takes_each_authors_drop_path(backbone: str, rate: float | str) -> None:
    config = TrainConfig.parse({"data": "x", "recipe": "drloc-paper", "backbone": backbone})
    assert config.split == "train+val"
    resolved = resolve_input(config, Facts(2040, 102, 224, "cuda"), AutoValues())
    assert resolved.drop_path == rate and resolve_input(resolved, Facts(9, 2, 9, "cpu"), AutoValues()) == resolved


@pytest.mark.parametrize(("signed", "classes"), [(True, 13), (False, 7)])
def test_the_released_classes_are_an_option(signed: bool, classes: int) -> None:
    values = {"weight": 0.5, "variant": "ce", "form": "released", "signed": signed}
    config, _ = resolve({"localization": values}, Facts(2040, 102, 224, "cuda", "swin", SWIN_T))
    head = make_localization(config.localization.head_settings(), 16, (7, 7))
    assert [layer.out_features for layer in head.unshared] == [classes, classes]
    if signed:
        with pytest.raises(UserError, match="signed needs form released"):
            TrainConfig.parse({"data": "x", "localization": values | {"form": "paper"}})


@pytest.mark.parametrize(
    ("values", "prob"),
    [
        ({"epochs": 149}, 0.0),
        ({"epochs": 180}, 0.5),
        ({"steps": 1000}, 0.0),  # 15 steps per epoch
        ({"steps": 5000}, 0.5),
        ({"epochs": 10, "mixing": {"prob": 0.3}}, 0.3),
        ({"epochs": 10, "mixing": {"mixup": 0, "cutmix": 0}}, "auto"),  # nothing to decide
        ({"recipe": "drloc-paper"}, 1.0),
        ({"epochs": 100, "mixing": {"mixup": 0.4, "cutmix": 0}}, 0.5),  # the user wants it
        ({"epochs": 100, "mixing": {"switch_prob": 0.3}}, 0.5),
        ({"epochs": 100, "mixing": {"cutmix": 0}}, 0.0),  # the user wants less of it
        ({"epochs": 100, "mixing": {"smoothing": 0.2}}, 0.0),
        ({"epochs": 100, "recipe": "scratch"}, 0.0),
    ],
)
def test_mixing_probability(values: dict[str, Any], prob: float | str) -> None:
    config, auto = resolve({"batch": 128} | values)
    assert config.mixing.prob == prob
    is_set = "prob" in values.get("mixing", {}) or "drloc" in values.get("recipe", "") or prob == "auto"
    assert ("mixing.prob" in auto) == (not is_set)


@pytest.mark.parametrize(
    ("setting", "prob", "operations"), [("lr=1", 0.0, 0), ("mixing.mixup=0.4", 0.5, 0), ("augment.magnitude=5", 0.0, 2)]
)
def test_runs_of_a_comparison_resolve_the_same_values(setting: str, prob: float, operations: int) -> None:
    """A comparison passes all values to its runs, not only those that the user set."""
    compared = CompareConfig.parse({"data": "x", "epochs": 100, "batch": 128, "settings": ["a: lr=1", "b: lr=2"]})
    config, _ = resolve(compared.run_values(parse_assignments([setting]), 0, "out"))
    assert (config.mixing.prob, config.augment.operations) == (prob, operations)


@pytest.mark.parametrize(
    ("parameters", "values", "operations"),
    [
        (NANO, {"epochs": 100}, 0),
        (NANO, {"epochs": 180}, 2),
        (SWIN_T, {"epochs": 100}, 0),
        (SWIN_T, {"epochs": 100, "init": "runs/a"}, 2),  # not measured after pre-training
        (SWIN_T, {"epochs": 100, "batch": 32}, 2),  # 6,300 steps
        (NANO, {"epochs": 100, "augment": {"operations": 3}}, 3),
        (NANO, {"epochs": 100, "augment": {"magnitude": 5}}, 2),  # the user wants it
        (NANO, {"recipe": "drloc-paper"}, 2),
    ],
)
def test_augment_operations(parameters: int, values: dict[str, Any], operations: int) -> None:
    config, _ = resolve({"batch": 128} | values, Facts(2040, 102, 224, "cpu", "swin", parameters))
    assert config.augment.operations == operations


@pytest.mark.parametrize(
    ("kind", "dim", "values", "name", "width"),
    [
        (TrainConfig, 96, {"localization": {"weight": "paper"}}, "localization.hidden", 96),
        (TrainConfig, 768, {"localization": {"weight": "paper"}}, "localization.hidden", 512),
        (TrainConfig, 768, {}, "localization.hidden", None),
        (TrainConfig, 768, {"localization": {"hidden": 64}}, "localization.hidden", None),
        (TrainConfig, 768, {"localization": {"weight": 0}}, "localization.hidden", None),
        (PretrainConfig, 96, {}, "matching.hidden", 384),
        (PretrainConfig, 768, {}, "matching.hidden", 2048),
    ],
)
def test_head_width(kind: Any, dim: int, values: dict[str, Any], name: str, width: int | None) -> None:
    config, auto = resolve(values, Facts(500, 10, 64, "cpu", dim=dim), kind)
    assert auto.get(name) == width
    if width is not None:
        assert getattr(config, name.split(".")[0]).hidden == width


def test_options_of_a_loss_that_is_off_are_not_resolved() -> None:
    assert not any(name.startswith("localization") for name in resolve({"localization": {"weight": 0}})[1])


@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig])
def test_batch_is_at_most_the_number_of_images(kind: type[RunConfig]) -> None:
    config, _ = resolve({"img_size": 32, "batch": 64}, Facts(10, 2, 32, "cpu"), kind)
    assert config.batch == 10


@pytest.mark.parametrize(
    ("devices", "accumulate", "option", "used"),
    [(3, 1, 2, {"train": 6, "other": 3}), (1, 2, 3, {"train": 2, "other": 2}), (2, 1, 50, {"train": 40, "other": 40}),
     (3, 1, 64, {"train": 36, "other": 39}), (3, 1, "auto", {"train": 6, "other": 6}), (1, 1, 7, {"train": 7})],
)  # fmt: skip
@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig, DetectConfig])
def test_other_values_use_the_shared_batch(
    kind: type[RunConfig], devices: int, accumulate: int, option: int | str, used: dict[str, int]
) -> None:
    """Ranks and parts of a step share the batch equally, in pairs if images are mixed."""
    facts = Facts(40, 2, 32, "cpu", "swin", NANO)
    batch = used.get("train" if kind is TrainConfig else "other", used["train"])
    if kind is DetectConfig and option == "auto":
        batch = 3  # its default is 4, not 8
    values = {"img_size": 32, "batch": option, "devices": devices, "accumulate": accumulate}
    config, auto = resolve(values, facts, kind)
    assert config.batch == batch and ("batch" in auto) == (batch != option)
    same, _ = resolve({"img_size": 32, "batch": batch}, facts, kind)
    machine = {"devices", "accumulate"}
    assert config.model_dump(exclude=machine) == same.model_dump(exclude=machine)
    assert TrainPlan.from_config(config, 40, devices, group=2 if kind is TrainConfig else 1).images_per_step == batch


def test_a_resumed_run_keeps_its_batch(tmp_path: Path) -> None:
    config, _ = resolve({"resume": str(tmp_path), "batch": 7, "accumulate": 2}, Facts(40, 2, 32, "cpu"))
    assert config.batch == 7


@pytest.mark.parametrize(
    ("world", "accumulate", "group", "images", "batch"),
    [
        (1, 1, 2, 1000, 50),  # one process has both images of every pair
        (3, 1, 1, 1000, 48),
        (3, 2, 2, 1000, 48),
        (4, 4, 2, 1000, 32),
        (1, 1, 1, 30, 30),
        (8, 8, 1, 30, 64),  # at least one image per part
    ],
)
def test_batch_in_equal_parts(world: int, accumulate: int, group: int, images: int, batch: int) -> None:
    values = {"data": "photos", "batch": 50, "lr": 0.1, "epochs": 3, "accumulate": accumulate}
    values |= {"img_size": 32, "ema": 0.0, "evaluate_every": 1, "localization": {"weight": 0}}
    values |= {"target": "class", "logit_adjustment": 0, "optimizer": {"muon": False}}
    config = TrainConfig.parse(values).with_options({}, ResolvedTrainConfig)
    plan = TrainPlan.from_config(config, images, world, group=group, lines=20)
    assert plan.images_per_step == batch and plan.steps_per_epoch == max(1, images // batch)
    assert plan.steps == 3 * plan.steps_per_epoch and plan.log_every == max(1, min(10, plan.steps // 20))


def test_facts_of_the_backbone() -> None:
    facts = add_backbone_facts(Facts(500, 10, 64, "cpu"), create_backbone("swin_nano", img_size=32, num_classes=10))
    assert facts.family == "swin" and 300_000 < facts.parameters < 500_000 and facts.images == 500


@pytest.mark.parametrize(
    ("side", "temperature", "views"), [(32, 0.04, SMALL_VIEWS), (33, 0.07, PAPER_VIEWS), ((32, 64), 0.07, PAPER_VIEWS)]
)
def test_small_inputs_have_milder_views(side: Any, temperature: float, views: Views) -> None:
    values = {"img_size": side, "epochs": 60, "crops": {"blur_sigma": [1, 2]}}
    config, auto = resolve(values, Facts(5000, 0, 32, "cuda"), PretrainConfig)
    assert config.matching.teacher_temp == temperature
    assert config.crops.views(1000) == config.crops.views(8) == views._replace(blur_sigma=(1.0, 2.0))
    assert {"crops.global_scale", "crops.local_scale"} < set(auto)
    assert MultiCrop(CropsConfig(), side).ranges == views


@pytest.mark.parametrize(("side", "crop"), [(32, "padded"), (33, "resized")])
def test_crop(side: int, crop: str) -> None:
    config, _ = resolve({"img_size": side}, Facts(500, 10, 64, "cpu"))
    assert config.augment.crop == crop == TrainAugment(AugmentConfig(), side).crop


@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig])
def test_steps_override_epochs(kind: Any) -> None:
    _, auto = resolve({"img_size": 32, "steps": 3, "epochs": 7}, Facts(500, 10, 64, "cpu"), kind)
    assert auto["steps"] == 3 and "epochs" not in auto


@pytest.mark.parametrize("values", [{"lora": 4}, {"recipe": "finetune"}])
def test_fine_tuning_needs_trained_weights(values: dict[str, Any]) -> None:
    facts = Facts(5000, 10, 64, "cpu", family="vit", blocks=12)
    with pytest.raises(UserError, match="add --pretrained or --init"):
        resolve_training(TrainConfig.parse({"data": "x"} | values), facts, AutoValues())
    resolve_training(TrainConfig.parse({"data": "x", "pretrained": True} | values), facts, AutoValues())


def test_a_compared_setting_has_its_own_recipe() -> None:
    config = CompareConfig.parse({"data": "x", "settings": ["a: pretrained=true", "b: lr=1"], "seeds": 2})
    recipes = {
        name: TrainConfig.parse(config.run_values(values, 0, "o")).recipe
        for name, values in config.named_settings().items()
    }
    assert recipes == {"a": "finetune", "b": "scratch"}
    stem = CompareConfig.parse({"data": "x", "stem": "conv", "backbone_args": {"window_size": 4}})
    assert TrainConfig.parse(stem.run_values({"stem": "patch"}, 0, "o")).backbone_args == {"window_size": 4}
    named = CompareConfig.parse({"data": "x", "recipe": "scratch"})
    assert TrainConfig.parse(named.run_values({"pretrained": True}, 0, "o")).recipe == "scratch"


@pytest.mark.parametrize(
    ("network", "device", "values", "muon"),
    [
        ("hybrid_nano", "cpu", {}, True),
        ("swin_nano", "cpu", {}, False),
        ("hybrid_nano", "cpu", {"init": "runs/a", "recipe": "scratch"}, False),
        ("hybrid_nano", "cpu", {"strategy": "fsdp"}, False),
        ("hybrid_nano", "cpu", {"recipe": "drloc-paper"}, False),
        ("hybrid_small", "cuda", {}, False),
        ("hybrid_small", "cuda", {"optimizer": {"muon": True}}, True),
    ],
)
def test_muon_where_it_was_measured(network: str, device: str, values: dict[str, Any], muon: bool) -> None:
    facts = Facts(5000, 10, 64, device, family=network.split("_")[0])
    config = TrainConfig.parse({"data": "x", "backbone": network} | values)
    assert resolve_training(config, facts, AutoValues()).optimizer.muon == muon


@pytest.mark.parametrize(
    ("values", "muon"),
    [
        ({"method": "instances"}, True),
        ({"method": "instances", "init": "runs/a"}, False),
        ({"method": "instances", "optimizer": {"muon": False}}, False),
        ({}, False),
        ({"optimizer": {"muon": "auto"}}, False),
    ],
)
def test_muon_in_pretraining(values: dict[str, Any], muon: bool) -> None:
    config = PretrainConfig.parse({"data": "x", "backbone": "hybrid_nano"} | values)
    facts = Facts(5000, 0, 64, "cpu", family="hybrid")
    assert resolve_pretraining(config, facts, AutoValues()).optimizer.muon is muon
