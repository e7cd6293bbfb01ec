"""What several commands share is defined once, and says no in time."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any, Self

import pytest

import frugalvit.config
from frugalvit.arguments import make_parser
from frugalvit.config import train
from frugalvit.config.base import Config, flatten, option, set_dotted
from frugalvit.config.inspect import DataConfig, PackConfig
from frugalvit.config.kinds import Opened
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.run import RunConfig
from frugalvit.config.train import PredictConfig, TrainConfig
from frugalvit.config.transfer import DetectConfig, SegmentConfig, SegmentEvalConfig
from frugalvit.errors import UserError


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("label_count", 1, "at least 2"),
        ("label_count", 257, "at most 256"),
        ("ignore_index", -1, "at least 0"),
        ("ignore_index", 256, "at most 255"),
    ],
)
def test_labels_fit_into_a_byte(option: str, value: int, limit: str) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [(SegmentConfig, {"data": "x"})]
    if option == "ignore_index":
        kinds.append((SegmentEvalConfig, {"model": "x", "data": "x"}))
    for kind, needed in kinds:
        with pytest.raises(UserError, match=rf"^{option} = {value}: it must be {limit} or 'auto'\.$"):
            kind.parse(needed | {option: value})
    assert SegmentConfig.parse({"data": "x", "label_count": 256, "ignore_index": 255}).label_count == 256


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (TrainConfig, {"pretrained": True}, "--init and --pretrained"),
        (DetectConfig, {"pretrained": True}, "--init and --pretrained"),
        (SegmentConfig, {"pretrained": True}, "--init and --pretrained"),
        (PretrainConfig, {"continue_from": "run"}, "--init and --continue"),
    ],
)
def test_every_kind_of_run_knows_what_it_may_start_from(
    kind: type[RunConfig], values: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"^{named} both say which weights"):
        kind.parse({"data": "x", "init": "other"} | values)
    assert [flag for flag, value in kind.parse({"data": "x"} | values).starts().items() if value] == [named.split()[-1]]


def test_a_parsed_configuration_is_of_its_own_kind() -> None:
    assert typing.get_type_hints(RunConfig.parse)["return"] is Self
    assert type(DetectConfig.parse({"data": "x"})) is DetectConfig
    assert train.RunConfig is RunConfig


def test_where_to_compute_is_defined_once() -> None:
    folder = Path(inspect.getfile(frugalvit.config)).parent
    holders = [path.name for path in folder.glob("*.py") if '"cuda", "mps"]' in path.read_text(encoding="utf-8")]
    assert holders == ["kinds.py"]


def test_nested_values_by_their_dotted_names() -> None:
    values = {"lr": 1, "cache": {"where": "off", "inner": {"a": None}}, "backbone_args": {}}
    flat = {"lr": 1, "cache.where": "off", "cache.inner.a": None, "backbone_args": {}}
    assert flatten(values) == flat
    back: dict[str, Any] = {}
    for name, value in flat.items():
        set_dotted(back, name, value)
    assert back == values


def test_a_recipe_of_the_users_is_for_its_own_task(tmp_path: Path) -> None:
    words = ("summary", "command", "hardware", "cost", "expect")
    path = tmp_path / "mine.yaml"
    path.write_text("task: train\n" + "".join(f"{word}: x\n" for word in words) + "values: {lr: 0.5}\n")
    assert TrainConfig.parse({"data": "x", "recipe": str(path)}).lr == 0.5
    with pytest.raises(UserError, match=r"mine\.yaml is a recipe for train, not for pretrain"):
        PretrainConfig.parse({"data": "x", "recipe": str(path)})
    with pytest.raises(UserError, match=r"no recipe 'scrach' for train.* Did you mean 'scratch'"):
        TrainConfig.parse({"data": "x", "recipe": "scrach"})


def test_published_weights_are_fine_tuned() -> None:
    recipes = [TrainConfig.parse({"data": "x"} | more).recipe for more in ({}, {"pretrained": True}, {"init": "x.pth"})]
    assert recipes == ["scratch", "finetune", "finetune"]
    asked = TrainConfig.parse({"data": "x", "pretrained": True, "recipe": "scratch"})
    assert asked.recipe == "scratch" and asked.optimizer == TrainConfig.parse({"data": "x"}).optimizer


def test_drloc_in_pretraining_has_nothing_to_choose_by_itself() -> None:
    """It is an experiment of ours, off where nothing is said: "auto" could only have meant 0."""
    with pytest.raises(UserError, match=r"localization\.weight = 'auto': it must be a number"):
        PretrainConfig.parse({"data": "x", "localization": {"weight": "auto"}})
    assert PretrainConfig.parse({"data": "x"}).localization.weight == 0


@pytest.mark.parametrize(("name", "value"), [("variant", "ce"), ("pairs", 16), ("hidden", 32), ("grid_size", None)])
def test_how_pretraining_localises_is_not_said_without_a_weight(name: str, value: Any, tmp_path: Path) -> None:
    """It would do nothing, as the weight is 0 by itself; what a run wrote down of itself says it all the same."""
    with pytest.raises(UserError, match=rf"localization\.{name} .*give localization\.weight too"):
        PretrainConfig.parse({"data": "x", "localization": {name: value}})
    weighed = PretrainConfig.parse({"data": "x", "localization": {name: value, "weight": 0.1}})
    assert getattr(weighed.localization, name) == value
    going_on = PretrainConfig.parse({"continue_from": "run", "localization": {name: value}})  # with that run's weight
    assert getattr(going_on.localization, name) == value
    weighed.localization.weight = 0.0
    (tmp_path / "config.yaml").write_text(weighed.to_yaml())
    assert getattr(PretrainConfig.stored(tmp_path / "config.yaml").localization, name) == value
    assert PretrainConfig.parse(PretrainConfig.parse({"data": "x"}).model_dump(mode="json")).localization.weight == 0


class Halves(Config):
    half: float = option(0.5, "50 % of it, never 100 %%")
    none: int | None = option(None, "10 % or nothing")


def test_signs_in_a_help_text_are_only_signs() -> None:
    shown = make_parser(Halves, "x", "y").format_help()
    assert "50 % of it, never 100 %% (default: 0.5)" in shown and "10 % or nothing\n" in shown


def test_data_and_pack_open_alike() -> None:
    assert issubclass(DataConfig, Opened) and issubclass(PackConfig, Opened)
    assert PackConfig(data="x", out="y").split == "given"


def test_a_home_folder_is_found_wherever_a_path_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = TrainConfig.parse({"data": "~/photos", "out": "a~/b"})
    config.init = "~/run"
    images = PredictConfig.parse({"model": "~/m", "images": ["~/a.jpg", "b.jpg"]}).images
    assert (config.data, config.out, config.init) == ("/home/me/photos", "a~/b", "/home/me/run")
    assert images == ["/home/me/a.jpg", "b.jpg"]
