"""Validation of options, YAML files and recipes."""

import errno
from pathlib import Path
from typing import Any, NoReturn

import pytest

from frugalvit.cli.parser import make_parser, parse
from frugalvit.config import compare, tools
from frugalvit.config.base import Config, flatten, set_dotted
from frugalvit.config.dense import DetectConfig, SegmentConfig, SegmentEvalConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import BenchStepConfig, EmbedConfig, KnnConfig
from frugalvit.config.tools import CorrespondConfig
from frugalvit.config.train import PredictConfig, RunConfig, TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.utils import files
from frugalvit.utils.files import read_json


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("label_count", 1, "at least 2"),
        ("label_count", 257, "at most 256"),
        ("ignore_index", -1, "at least 0"),
        ("ignore_index", 256, "at most 255"),
    ],
)
def test_limits_of_labels(option: str, value: int, limit: str) -> None:
    with pytest.raises(UserError, match=rf"^{option} = {value}: it must be {limit} or 'auto'\.$"):
        SegmentConfig.parse({"data": "x", option: value})


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (TrainConfig, {"pretrained": True}, "--init and --pretrained"),
        (DetectConfig, {"pretrained": True}, "--init and --pretrained"),
        (SegmentConfig, {"pretrained": True}, "--init and --pretrained"),
        (PretrainConfig, {"continue_from": "run"}, "--init and --continue"),
    ],
)
def test_two_sources_of_weights_are_refused(kind: type[RunConfig], values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named} both set"):
        kind.parse({"data": "x", "init": "other"} | values)


def test_flatten_inverts_set_dotted() -> None:
    values = {"lr": 1, "cache": {"location": "off", "inner": {"a": None}}, "backbone_args": {}}
    flat = {"lr": 1, "cache.location": "off", "cache.inner.a": None, "backbone_args": {}}
    assert flatten(values) == flat
    back: dict[str, Any] = {}
    for name, value in flat.items():
        set_dotted(back, name, value)
    assert back == values


@pytest.mark.parametrize(
    "text",
    [
        "localization: {weight: 0.3, lr_scale: 2}\nimg_size: 32",
        "localization.weight: 0.3\nlocalization.lr-scale: 2\nimg-size: 32",
        "localization.weight: 0.3\nimg-size: 32\nlocalization:\n  lr-scale: 2",
    ],
    ids=["nested", "as flags", "both"],
)
def test_yaml_names_may_be_written_as_flags(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert read_yaml(tmp_path / "run.yaml") == {"localization": {"weight": 0.3, "lr_scale": 2}, "img_size": 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localization: &itself {weight: *itself}", "not readable YAML"),
        ("a: [", "not readable YAML"),
        ("3: 4", "3 is not an option name"),
        ("[1, 2]", "must map option names to values"),
    ],
)
def test_invalid_yaml_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"run\.yaml.*{message}"):
        read_yaml(tmp_path / "run.yaml")


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").mkdir()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"run\.yaml cannot be read \(Is a directory\)\.$"):
        read_yaml(tmp_path / "run.yaml")

    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "open_regular", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    for read in (lambda: read_yaml(tmp_path / "run.yaml"), lambda: read_json(tmp_path / "run.json", dict)):
        with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
            read()


@pytest.mark.parametrize(
    ("values", "expected"),
    [("{lrr: 0.5}", "There is no option 'lrr'"), ("{init: a, pretrained: true}", "--init and --pretrained both set")],
)
def test_a_mistake_in_a_recipe_names_its_file(values: str, expected: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"task: train\nvalues: {values}\n")
    with pytest.raises(UserError, match=rf"mine\.yaml: {expected}"):
        TrainConfig.parse({"data": "x", "recipe": str(recipe)})
    (tmp_path / "run.yaml").write_text(values)
    with pytest.raises(UserError, match=rf"run\.yaml: {expected}"):
        parse(TrainConfig, ["x", "--config", str(tmp_path / "run.yaml")], "frugalvit train", "")


@pytest.mark.parametrize(("seed", "expected"), [(10**20, "less than 9,223,372,036,854,775,808"), (-1, "at least 0")])
def test_a_seed_out_of_range_is_refused(seed: int, expected: str) -> None:
    with pytest.raises(UserError, match=f"seed = {seed}: it must be {expected}"):
        TrainConfig.parse({"data": "x", "seed": seed})


def test_a_recipe_is_for_one_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: train\nvalues: {lr: 0.5}\n")
    assert TrainConfig.parse({"data": "x", "recipe": str(path)}).lr == 0.5
    with pytest.raises(UserError, match=r"mine\.yaml is a recipe for train, not for pretrain"):
        PretrainConfig.parse({"data": "x", "recipe": str(path)})
    with pytest.raises(UserError, match=r"no recipe 'scrach' for train.* Did you mean 'scratch'"):
        TrainConfig.parse({"data": "x", "recipe": "scrach"})


def test_the_recipe_of_the_guide_is_valid(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "choosing.md"
    shown = guide.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "mine.yaml").write_text(shown)
    made = TrainConfig.parse({"data": "x", "recipe": str(tmp_path / "mine.yaml"), "epochs": 3})
    assert (made.epochs, made.optimizer.warmup, made.optimizer.weight_decay) == (3, 10, 0.02)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("values: {lr: 0.5}", r"mine\.yaml is not a recipe.*'task' is missing"),
        ("task: train\nvalue: {lr: 0.5}", "'values' is missing"),
        ("task: train\nvalues: 3", r"mine\.yaml is not a recipe.*values = 3"),
    ],
)
def test_an_invalid_recipe_is_one_line(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        TrainConfig.parse({"data": "x", "recipe": str(tmp_path / "mine.yaml")})


def test_default_recipe_of_published_weights() -> None:
    recipes = [TrainConfig.parse({"data": "x"} | more).recipe for more in ({}, {"pretrained": True}, {"init": "x.pth"})]
    assert recipes == ["scratch", "finetune", "finetune"]
    explicit = TrainConfig.parse({"data": "x", "pretrained": True, "recipe": "scratch"})
    assert explicit.recipe == "scratch" and explicit.optimizer == TrainConfig.parse({"data": "x"}).optimizer


def test_pretraining_has_no_auto_weight_of_drloc() -> None:
    with pytest.raises(UserError, match=r"localization\.weight = 'auto': it must be a number"):
        PretrainConfig.parse({"data": "x", "localization": {"weight": "auto"}})
    assert PretrainConfig.parse({"data": "x"}).localization.weight == 0


@pytest.mark.parametrize(("name", "value"), [("variant", "ce"), ("pairs", 16), ("hidden", 32), ("grid_size", None)])
def test_drloc_options_without_a_weight_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    """They have no effect; a run's own config.yaml may still hold them."""
    with pytest.raises(UserError, match=rf"localization\.{name} .*set localization\.weight"):
        PretrainConfig.parse({"data": "x", "localization": {name: value}})
    weighted = PretrainConfig.parse({"data": "x", "localization": {name: value, "weight": 0.1}})
    assert getattr(weighted.localization, name) == value
    PretrainConfig.parse({"continue_from": "run", "localization": {name: value}})  # that run has a weight
    (tmp_path / "config.yaml").write_text(weighted.to_yaml().replace("weight: 0.1", "weight: 0.0"))
    assert getattr(PretrainConfig.from_run(tmp_path / "config.yaml").localization, name) == value


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TrainConfig, {"warmup": "20; finetune: 10", "clip": "5", "min-lr": "0.005"}),
        (compare.CompareConfig, {"warmup": "20; finetune: 10"}),
        (
            PretrainConfig,
            {"weight-decay": "0.04", "warmup": "10", "min-lr": "0.002", "clip": "3", "clip-per": "tensor"},
        ),
        (DetectConfig, {"clip": "1", "warmup": "500"}),
        (SegmentConfig, {"clip": "1", "warmup": "1500"}),
    ],
)
def test_help_shows_the_defaults_of_the_recipe(kind: type[RunConfig], expected: dict[str, str]) -> None:
    options = make_parser(kind, "x", "y")._option_string_actions
    optimizer = kind.parse({"data": "x"}).optimizer
    for name, value in expected.items():
        assert str(options[f"--optimizer.{name}"].help).endswith(f" (default: {value})")
        used = getattr(optimizer, name.replace("-", "_"))
        assert str(used).removesuffix(".0") == value.partition(";")[0]


@pytest.mark.parametrize(
    ("kind", "usage"),
    [
        (tools.ModelsConfig, "x [PATTERN] [options]"),
        (tools.CorrespondConfig, "x MODEL [IMAGES …] [options]"),
        (tools.ReportConfig, "x RUNS … [options]"),
        (PredictConfig, "x MODEL IMAGES … [options]"),
        (TrainConfig, "x [DATA] [options]"),
    ],
)
def test_usage_marks_optional_arguments(kind: type[Config], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser(kind, "x", "y").format_usage() == f"usage: {usage}\n"
    with pytest.raises(SystemExit):
        parse(kind, ["--help"], "x", "y")
    assert capsys.readouterr().out.startswith(f"usage: {usage}\n\ny\n")


def test_home_folders_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = TrainConfig.parse({"data": "~/photos", "out": "a~/b", "init": "~/run"})
    images = PredictConfig.parse({"model": "~/m", "images": ["~/a.jpg", "b.jpg"]}).images
    assert (config.data, config.out, config.init) == ("/home/me/photos", "a~/b", "/home/me/run")
    assert images == ["/home/me/a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("config", "values", "flags"),
    [
        (SegmentEvalConfig, {"test": {"scales": [1.0]}}, "--test.scales .* --test.multi-scale"),
        (SegmentEvalConfig, {"test": {"flip": True}}, "--test.flip .* --test.multi-scale"),
        (KnnConfig, {"blocks": 2}, "--blocks .* --features last_blocks"),
        (EmbedConfig, {"known": "x.csv"}, "--known .* --select"),
        (EmbedConfig, {"count": 3}, "--count .* --neighbours"),
        (EmbedConfig, {"picture": "x.png"}, "--picture .* --neighbours or --select or --duplicates"),
        (BenchStepConfig, {"kind": "pretrain", "localization": 0.3}, "--localization .* without KIND train"),
        (BenchStepConfig, {"kind": "train", "prototypes": 64}, "--prototypes .* without KIND pretrain"),
        (BenchStepConfig, {"kind": "train", "workers": 3}, "--workers .* --against"),
        (CorrespondConfig, {"images": ["x.png"], "limit": 3}, "--limit .* --data"),
    ],
)
def test_options_without_effect_are_errors(config: Any, values: dict[str, Any], flags: str) -> None:
    if config is not BenchStepConfig:
        values = {"model": "m"} | ({} if config is CorrespondConfig else {"data": "d"}) | values
    with pytest.raises(UserError, match=flags):
        config.parse(values)
