"""No command prints a score without per cent, images and interval."""

import re
from pathlib import Path
from typing import Any

import pytest

from frugalvit.cli import main as cli
from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig
from frugalvit.config.dense import DetectEvalConfig, SegmentEvalConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult
from helpers.dense_runs import Kind
from helpers.tiny_runs import PRETRAIN, TRAIN, write_images

SCORE = re.compile(r"\b(top-?1|top-?5|mean per class|mean_per_class|k-?NN|mIoU|miou|AP\d*|[a-z]+ accuracy)\b[^\d]*\d")
INTERVAL = re.compile(r"\d to \d+\.\d")
REPEATED = (
    "warning",
    "alarm",
    "floor: ",
    "auto",
    "starting",
    "k-NN on",
)  # sentences about scores that are printed in full


def check(text: str) -> None:
    lines = [line for line in text.splitlines() if SCORE.search(line) and not line.startswith(REPEATED)]
    assert lines, text
    for line in lines:
        assert INTERVAL.search(line) and "%" in line, line
    assert re.search(r"\d (test )?images", text) and "val_top1" not in text and "top5" not in text


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(out)}))
    return out


def print_and_check(result: CommandResult, capsys: pytest.CaptureFixture[str]) -> None:
    console.print_result(result)
    printed = capsys.readouterr()
    check(printed.out)
    check(printed.err + printed.out)


def test_train(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_and_check(train(TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(tmp_path / "run")})), capsys)


def test_pretrain(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_and_check(
        pretrain(PretrainConfig.parse(PRETRAIN | {"data": str(photos), "out": str(tmp_path / "run")})), capsys
    )


def test_compare(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, Any] = TRAIN | {"data": str(photos), "out": str(tmp_path / "run"), "seeds": 2, "steps": 4}
    console.print_result(compare(CompareConfig.parse(values)))
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "10 images of val; chance 50.0 %"
    assert all(re.match(r"with(out)? +[\d.]+ ± [\d.]+ % +[\d.]+ to [\d.]+ % +2 ", row) for row in rows[:2]), rows


@pytest.mark.parametrize("words", ["eval", "probe knn", "probe linear --epochs 2 --features pooled", "probe logistic"])
def test_scores_of_a_model(words: str, run: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = words.split(" --")
    flags = [word for option in options for word in f"--{option}".split()]
    assert cli.main([*command.split(), str(run), str(photos), *flags]) == 0
    check(capsys.readouterr().out)


def test_detect_and_segment(
    kind: Kind, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, model = (request.getfixturevalue(name) for name in (kind.data_fixture, kind.model_fixture))
    capsys.readouterr()
    print_and_check(kind.commands.train(kind.make_config(data, tmp_path / "run")), capsys)
    config: Any = DetectEvalConfig if kind.verb == "detect" else SegmentEvalConfig
    print_and_check(kind.commands.evaluate(config(model=str(model), data=str(data), device="cpu")), capsys)
