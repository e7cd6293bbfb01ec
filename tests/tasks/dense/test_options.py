"""Options and recipes of detection and segmentation, and errors in them."""

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
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands

UNUSED = {"root": "here", "classes": "names.txt", "auto_batch": True, "stream": True, "cache.size": 64}
UNUSED |= {"cache.folder": "here"}


@pytest.mark.parametrize("model", [DetectConfig, SegmentConfig, DetectCompareConfig])
def test_unused_options_are_refused_and_hidden(model: type[TransferConfig]) -> None:
    assert model.unused.keys() == UNUSED.keys()
    actions = {action.dest: action for action in make_parser(model, "frugalvit", "")._actions}
    for name, value in UNUSED.items():
        values: dict[str, Any] = {"data": "x"}
        set_dotted(values, name, value)
        with pytest.raises(UserError, match=rf"^--{name.replace('_', '-')} .*{model.recipe_task}"):
            model.parse(values)
        assert actions[name].help == SUPPRESS
    assert actions["cache.location"].metavar == "auto|device|ram|off"
    with pytest.raises(UserError, match="'auto', 'device', 'ram' or 'off'"):
        model.parse({"data": "x", "cache": {"location": "disk"}})
    others = {action.dest: action.help for action in make_parser(TrainConfig, "frugalvit", "")._actions}
    assert all(others[name] != SUPPRESS for name in UNUSED)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["detect", "train"], "frugalvit detect train photos/"),
        (["detect", "train", "nowhere"], "nowhere"),
        (["segment", "train", "nowhere"], "nowhere"),
        (["detect", "train", "x", "--head", "ssd"], "head = 'ssd'"),
        (["segment", "train", "x", "--ignore-index", "300"], "--ignore-index"),
        (["detect", "train", "x", "--classes", "names.txt"], "--classes"),
        (["segment", "eval", "nowhere", "x"], "nowhere is not a finished run"),
        (["detect", "train", "x", "--recipe", "coco"], "'coco'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.mark.parametrize("size", ["small", "coco", "ade20k"])
def test_recipes_are_valid(size: str) -> None:
    if size != "ade20k":
        config = DetectConfig.parse({"recipe": f"detect-{size}", "data": "x"})
        assert [round(share * 12) for share in config.optimizer.milestones] == [8, 11]
    if size != "coco":
        optimizer = SegmentConfig.parse({"recipe": f"segment-{size}", "data": "x"}).optimizer
        assert optimizer.warmup == 1500 and optimizer.weight_decay == 0.01


def test_real_datasets_open(data_root: Path) -> None:
    found = segment_commands.open_annotations(SegmentConfig.parse({"data": str(data_root / "camvid")}))
    assert {split: len(part) for split, part in found.splits.items()} == {"train": 367, "val": 101, "test": 233}
    assert len(found.classes) == 11 and found.table[11] == 255
    coco = commands.open_annotations(DetectConfig.parse({"data": str(data_root / "coco_mini")}))
    assert {split: len(part) for split, part in coco.splits.items()} == {"train": 532, "val": 133}
    assert len(coco.classes) == 80 and coco.category_ids[-1] == 90
