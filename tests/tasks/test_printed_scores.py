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
# sentences about scores that are printed in full
REPEATED = ("warning", "alarm", "floor: ", "auto", "starting", "k-NN on", "Its confidence is")


def check(text: str) -> None:
    lines = [line for line in text.splitlines() if SCORE.search(line) and not line.startswith(REPEATED)]
    assert lines, text
    for line in lines:
        assert INTERVAL.search(line) and "%" in line, line
    assert re.search(r"\d images?", text) and "val_top1" not in text and "top5" not in text


def check_page(run: Path, page: Path) -> None:
    """Check every line of a page outside its charts."""
    assert cli.main(["report", str(run), "--out", str(page), "--quiet"]) == 0
    text = re.sub(r"<(style|script|svg)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
    text = text.replace('<ul class="alarms" id="alarms"><li>', "alarm ")
    text = re.sub(r"</(p|tr|li|dd|h\d|caption|summary|text)>", "\n", text)
    check("\n".join(" ".join(line.split()) for line in re.sub(r"<[^>]+>", " ", text).splitlines()))


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
    assert title.startswith("10 images of val, not used to train or to choose the weights; chance 50.0 %. with: ")
    assert all(re.match(r"with(out)? +[\d.]+ ± [\d.]+ % +[\d.]+ to [\d.]+ % +2 ", row) for row in rows[:2]), rows


@pytest.mark.parametrize("words", ["eval", "probe knn", "probe linear --epochs 2 --features pooled", "probe logistic"])
def test_scores_of_a_model(words: str, run: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = words.split(" --")
    flags = [word for option in options for word in f"--{option}".split()]
    assert cli.main([*command.split(), str(run), str(photos), *flags]) == 0
    check(capsys.readouterr().out)


def test_page_and_model_card(run: Path, tmp_path: Path) -> None:
    check_page(run, tmp_path / "page.html")
    assert cli.main(["export", str(run), "--to", "hf", "-o", str(tmp_path / "out"), "--quiet"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    check(card.rpartition("## Scores")[2].partition("## Use")[0])


def test_bare_score_is_noticed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("top-1 45.0 %", "box AP 12.0", "mIoU 0.21"):
        with pytest.raises(AssertionError):
            check(f"20 images of val\n{text}")
    monkeypatch.setattr("frugalvit.report.sections._is_score", lambda key: False)
    with pytest.raises(AssertionError):
        check_page(run, tmp_path / "page.html")


def test_detect_and_segment(
    kind: Kind, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, model = (request.getfixturevalue(name) for name in (kind.data_fixture, kind.model_fixture))
    capsys.readouterr()
    print_and_check(kind.commands.train(kind.make_config(data, tmp_path / "run")), capsys)
    check_page(tmp_path / "run", tmp_path / "page.html")
    config: Any = DetectEvalConfig if kind.verb == "detect" else SegmentEvalConfig
    print_and_check(kind.commands.evaluate(config(model=str(model), data=str(data), device="cpu")), capsys)
