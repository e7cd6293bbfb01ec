"""A run that fails before its first step leaves nothing, and its folder can be used again."""

from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.runs.layout import contains_run, remove_empty_run
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification import train
from frugalvit.tasks.pretraining import train as pretrain
from helpers.tiny_runs import TRAIN, write_config, write_images


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "images")
    write_config(tmp_path / "train.yaml", TRAIN, steps=1, report=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    verb, *rest = words
    return cli.main([verb, "images", "--config", "train.yaml", "--device", "cpu", *rest])


def test_a_corrected_command_can_use_the_same_folder(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "runs/lab").mkdir(parents=True)
    assert run("train", "--freeze", "99", "--out", "runs/lab") == 2
    assert "blocks" in capsys.readouterr().err
    assert (workdir / "runs/lab").is_dir()  # the user made it
    assert run("train", "--freeze", "1", "--out", "runs/lab") == 0
    assert read_yaml(workdir / "runs/lab/config.yaml")["freeze"] == 1
    assert run("train", "--freeze", "1", "--out", "runs/lab") == 2
    assert "already holds a run" in capsys.readouterr().err


WRONG = [("--backbone", "swin_nanoo"), ("--freeze", "99")]


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
@pytest.mark.parametrize("out", [(), ("--out", "runs/deep/lab")], ids=["unnamed", "named"])
def test_a_failed_start_removes_its_new_folder(wrong: tuple[str, ...], out: tuple[str, ...], workdir: Path) -> None:
    assert run("train", *wrong, *out) == 2
    assert not list(workdir.glob("runs/*"))


def test_a_failed_start_keeps_the_users_files(workdir: Path) -> None:
    (workdir / "lab").mkdir()
    (workdir / "lab" / "data.json").write_text("mine")
    assert run("train", "--backbone", "swin_nanoo", "--out", "lab") == 2
    assert (workdir / "lab" / "data.json").read_text() == "mine"


def test_an_error_after_config_yaml_is_written(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UserError("too dark.")

    monkeypatch.setattr(train, "make_task", refuse)
    assert run("train", "--out", "lab") == 2
    assert not (workdir / "lab").exists()


def test_a_failed_comparison_can_be_corrected(workdir: Path) -> None:
    settings = ("--with", "lr=0.001", "--without", "lr=0.002", "--seeds", "1", "--out", "deep/both")
    assert run("compare", *settings, "--freeze", "99") == 2
    assert not (workdir / "deep").exists()
    assert run("compare", *settings, "--freeze", "1") == 0


def test_a_comparison_without_data_leaves_nothing(workdir: Path) -> None:
    (workdir / "nothing").mkdir()
    assert cli.main(["compare", "nothing", "--with", "lr=1", "--without", "lr=2", "--out", "both"]) == 2
    assert not (workdir / "both").exists()


@pytest.mark.parametrize("split", ["auto", "given"])
def test_data_without_images_to_score_on(split: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(workdir / "singles", train=1, val=0)
    assert cli.main(["train", "singles", "--config", "train.yaml", "--split", split, "--out", "lab"]) == 2
    assert "--split auto" in capsys.readouterr().err and not (workdir / "lab").exists()


def test_too_few_images_for_the_processes(tmp_path: Path) -> None:
    few = str(write_images(tmp_path / "few", train=2, val=1))
    for kind, experiment, enough in (
        (TrainConfig, train.ClassificationExperiment, 2),  # images are mixed in pairs
        (PretrainConfig, pretrain.PretrainExperiment, 4),
    ):
        experiment(kind.parse({"data": few, "devices": enough})).open_data(None)
        with pytest.raises(UserError, match=f"4 training images .* use at most {enough}"):
            experiment(kind.parse({"data": few, "devices": enough + 1})).open_data(None)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints/best.pt", "checkpoints/last.damaged"])
def test_a_run_with_results_is_never_removed(name: str, tmp_path: Path) -> None:
    opened = RunFolder(tmp_path)
    for start in ("config.yaml", "data.json", "decisions.json"):
        (tmp_path / start).write_text("{}")
    assert not contains_run(tmp_path)
    (tmp_path / name).write_text("")
    assert contains_run(tmp_path)
    opened.close()
    remove_empty_run([tmp_path])
    assert (tmp_path / name).exists()


def test_a_locked_folder_is_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    opened = RunFolder(folder)
    remove_empty_run([folder])
    assert folder.exists()
    opened.close()
    remove_empty_run([folder])
    assert not folder.exists()
