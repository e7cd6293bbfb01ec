"""A run that fails before its first step: the corrected command takes its place, and nothing lies about."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import TRAIN, write_config, write_images

from frugalvit import cli
from frugalvit.config.base import read_yaml
from frugalvit.training.runs import Run, holds_run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "images")
    write_config(tmp_path / "train.yaml", TRAIN, steps=1, report=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    verb, *rest = words
    return cli.main([verb, "images", "--config", "train.yaml", "--device", "cpu", *rest])


def test_the_corrected_command_may_have_the_same_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--freeze", "99", "--out", "runs/lab") == 2
    assert (place / "runs/lab/config.yaml").exists() and "blocks" in capsys.readouterr().err
    assert run("train", "--freeze", "1", "--out", "runs/lab") == 0
    assert read_yaml(place / "runs/lab/config.yaml")["freeze"] == 1
    assert run("train", "--freeze", "1", "--out", "runs/lab") == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--backbone", "swin_nanoo"), ("--freeze", "99")], ids=" ".join)
def test_a_folder_that_nobody_named_goes_away(wrong: tuple[str, str], place: Path) -> None:
    assert run("train", *wrong) == 2
    assert list((place / "runs").iterdir()) == []


def test_a_comparison_can_be_corrected_too(place: Path) -> None:
    settings = ("--with", "lr=0.001", "--without", "lr=0.002", "--seeds", "1", "--out", "both")
    assert run("compare", *settings, "--freeze", "99") == 2
    assert run("compare", *settings, "--freeze", "1") == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints/best.pt", "checkpoints/last.damaged"])
def test_what_a_run_has_come_to_is_kept(name: str, tmp_path: Path) -> None:
    opened = Run(tmp_path)
    for start in ("config.yaml", "data.json", "decisions.json"):
        (tmp_path / start).write_text("{}")
    assert not holds_run(tmp_path)
    (tmp_path / name).write_text("")
    assert holds_run(tmp_path)
    opened.discard()
    assert (tmp_path / name).exists()
