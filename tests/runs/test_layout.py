"""What somebody has put into the folder of ``--out`` is never written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.runs.layout import COMPARISON_FILES, RUN_FILES
from helpers.tiny_runs import PRETRAIN, TRAIN, write_config, write_images

SETTINGS = ("--with", "lr=0.001", "--without", "lr=0.002", "--seeds", "1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "images")
    write_config(tmp_path / "train.yaml", TRAIN, steps=1)
    write_config(tmp_path / "pretrain.yaml", PRETRAIN, steps=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(verb: str, *words: str) -> int:
    config = "pretrain.yaml" if verb == "pretrain" else "train.yaml"
    return cli.main([verb, "images", "--config", config, "--device", "cpu", *words])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [*RUN_FILES[1:], "model/model.safetensors", "checkpoints/last.pt"])
def test_a_file_of_that_name_is_kept(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "lab" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert run("train", "--out", "lab") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"lab already has {name.split('/')[0]}," in said
    assert files(place / "lab") == {str(path): b"mine"}


@pytest.mark.parametrize("name", [*COMPARISON_FILES, "tensorboard/events.mine"])
def test_a_comparison_keeps_it_too(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "lab" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    assert run("compare", *SETTINGS, "--out", "lab") == 2
    assert "which would be overwritten" in capsys.readouterr().err
    assert files(place / "lab") == {str(path): b'{"mine": 1}'}


def test_among_other_files_there_is_room(place: Path) -> None:
    (place / "lab").mkdir()
    (place / "lab" / "notes.txt").write_text("mine")
    (place / "lab" / "model").mkdir()
    (place / "lab" / "pictures").mkdir()
    (place / "lab" / "pictures" / "me.jpg").write_text("mine")  # what only detectors and segmenters write
    assert run("train", "--out", "lab", "--report") == 0
    assert (place / "lab" / "notes.txt").read_text() == "mine"
    assert {path.name for path in (place / "lab").iterdir()} <= {*RUN_FILES, ".lock", "notes.txt", "pictures"}


@pytest.mark.parametrize("more", [(), ("config.yaml",)])
def test_a_run_that_ended_before_its_first_step_goes_for_nothing(more: tuple[str, ...], place: Path) -> None:
    """Killed before it had written its configuration, or while a later one began: the job queued again begins anew."""
    for name in (".lock", "decisions.json", "data.json", "trackers.json", *more, "checkpoints/.writable.1.part"):
        (place / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "lab" / name).write_text("{}")
    assert run("train", "--out", "lab", "--resume", "auto") == 0
    assert not list((place / "lab").rglob(".*.part"))


def test_a_comparison_goes_on_among_its_own_files(place: Path) -> None:
    words = ("compare", *SETTINGS, "--out", "lab")
    assert run(*words) == 0
    assert {path.name for path in (place / "lab").iterdir()} <= {*COMPARISON_FILES, "with", "without"}
    (place / "lab" / "comparison.json").unlink()  # killed while it wrote its tables
    assert run(*words) == 0
    assert run("train", "--out", "lab") == 2  # its report is no run's


def test_a_run_without_labels_writes_no_other_names(place: Path) -> None:
    assert run("pretrain", "--out", "lab", "--report") == 0
    assert {path.name for path in (place / "lab").iterdir()} <= {*RUN_FILES, ".lock"}
