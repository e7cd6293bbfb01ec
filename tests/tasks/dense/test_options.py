"""What can be asked of detection and segmentation: options, recipes, and what is said of mistakes in them."""

from __future__ import annotations

from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import pytest

from frugalvit.cli.main import main
from frugalvit.cli.parser import make_parser
from frugalvit.config.base import set_dotted
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentConfig, TransferConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.tasks.dense.predict_io import unique_names
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands


def test_names_of_results_are_never_given_twice() -> None:
    paths = [Path(word) for word in ("a/x.jpg", "b/x.jpg", "b/x_2.jpg", "c/x.png", "c/y.png")]
    assert unique_names(paths) == ["x", "x_3", "x_2", "x_4", "y"]


UNUSED = {"root": "here", "classes": "names.txt", "auto_batch": True, "stream": True, "cache.size": 64}
UNUSED |= {"cache.folder": "here"}


@pytest.mark.parametrize("model", [DetectConfig, SegmentConfig, DetectCompareConfig])
def test_what_these_tasks_do_not_use_is_refused_and_not_offered(model: type[TransferConfig]) -> None:
    """In --help and in completions, which show what the parser does not hide."""
    assert model.unused.keys() == UNUSED.keys()
    actions = {action.dest: action for action in make_parser(model, "frugalvit", "")._actions}
    for name, value in UNUSED.items():
        given: dict[str, Any] = {"data": "x"}
        set_dotted(given, name, value)
        with pytest.raises(UserError, match=rf"^--{name.replace('_', '-')} is not an option of {model.recipe_task()}"):
            model.parse(given)
        assert actions[name].help == SUPPRESS
    assert actions["cache.where"].metavar == "auto|device|ram|off"
    with pytest.raises(UserError, match="must be 'auto', 'device', 'ram' or 'off'"):
        model.parse({"data": "x", "cache": {"where": "disk"}})
    others = {action.dest: action.help for action in make_parser(TrainConfig, "frugalvit", "")._actions}
    assert all(others[name] != SUPPRESS for name in UNUSED)


@pytest.mark.parametrize("verb", ["eval", "predict", "train"])
@pytest.mark.parametrize(
    ("words", "named"), [(["--test.scales", "0.5", "1"], "--test.scales"), (["--no-test.flip"], "--no-test.flip")]
)
def test_scales_without_multi_scale_are_not_ignored(
    verb: str, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = ["nowhere"] if verb == "train" else ["nowhere", "x"]
    assert main(["segment", verb, *values, *words]) == 2
    assert capsys.readouterr().err.startswith(f"frugalvit: {named} has no effect without --multi-scale")
    assert main(["segment", verb, *values, *words, "--multi-scale"]) == 2
    assert "multi-scale" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["detect", "train"], "What should be trained on"),
        (["detect", "train", "nowhere"], "no folder or JSON file nowhere"),
        (["segment", "train", "nowhere"], "no folder nowhere"),
        (["detect", "train", "x", "--head", "ssd"], "head = 'ssd'"),
        (["segment", "train", "x", "--ignore-index", "300"], "--ignore-index"),
        (["detect", "train", "x", "--classes", "names.txt"], "--classes is not an option of detect"),
        (["detect", "predict", "nowhere", "x.png"], "no run at nowhere"),
        (["segment", "eval", "nowhere", "x"], "no run at nowhere"),
        (["detect", "train", "x", "--recipe", "coco"], "no recipe 'coco' for detect"),
    ],
)
def test_mistakes_end_with_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.mark.parametrize("name", ["detect-small", "detect-coco"])
def test_detection_recipes_are_valid(name: str) -> None:
    config = DetectConfig.parse({"recipe": name, "data": "x"})
    assert config.recipe == name
    assert [round(share * 12) for share in config.optimizer.milestones] == [8, 11]


@pytest.mark.parametrize("name", ["segment-small", "segment-ade20k"])
def test_segmentation_recipes_are_valid(name: str) -> None:
    config = SegmentConfig.parse({"recipe": name, "data": "x"})
    assert config.optimizer.warmup == 1500 and config.optimizer.weight_decay == 0.01


def test_real_data_open(data_root: Path) -> None:
    found = segment_commands.SegmentJob().open(SegmentConfig.parse({"data": str(data_root / "camvid")}))
    assert {split: len(part) for split, part in found.splits.items()} == {"train": 367, "val": 101, "test": 233}
    assert len(found.classes) == 11 and found.table[11] == 255
    coco = commands.DetectJob().open(DetectConfig.parse({"data": str(data_root / "coco_mini")}))
    assert {split: len(part) for split, part in coco.splits.items()} == {"train": 532, "val": 133}
    assert len(coco.classes) == 80 and coco.category_ids[-1] == 90
