"""Files of the user in --out are never overwritten."""

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
def test_a_users_file_is_never_overwritten(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "lab" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert run("train", "--out", "lab") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"lab already has {name.split('/')[0]}," in said
    assert files(place / "lab") == {str(path): b"mine"}


@pytest.mark.parametrize("name", [*COMPARISON_FILES, "tensorboard/events.mine"])
def test_a_comparison_never_overwrites_a_users_file(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "lab" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    assert run("compare", *SETTINGS, "--out", "lab") == 2
    assert "which would be overwritten" in capsys.readouterr().err
    assert files(place / "lab") == {str(path): b'{"mine": 1}'}


def test_a_run_may_be_beside_other_files(place: Path) -> None:
    (place / "lab").mkdir()
    (place / "lab" / "notes.txt").write_text("mine")
    (place / "lab" / "model").mkdir()
    (place / "lab" / "pictures").mkdir()
    (place / "lab" / "pictures" / "me.jpg").write_text("mine")  # what only detectors and segmenters write
    assert run("train", "--out", "lab", "--report") == 0
    assert (place / "lab" / "notes.txt").read_text() == "mine"
    assert {path.name for path in (place / "lab").iterdir()} <= {*RUN_FILES, ".lock", "notes.txt", "pictures"}


@pytest.mark.parametrize("more", [(), ("config.yaml",)])
def test_files_of_a_failed_start_may_be_overwritten(more: tuple[str, ...], place: Path) -> None:
    """Killed before it had written its configuration, or while a later one began: the job queued again begins anew."""
    for name in (".lock", "decisions.json", "data.json", "trackers.json", *more, "checkpoints/.writable.1.part"):
        (place / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "lab" / name).write_text("{}")
    assert run("train", "--out", "lab", "--resume", "auto") == 0
    assert not list((place / "lab").rglob(".*.part"))


def test_a_comparison_continues_in_its_folder(place: Path) -> None:
    words = ("compare", *SETTINGS, "--out", "lab")
    assert run(*words) == 0
    assert {path.name for path in (place / "lab").iterdir()} <= {*COMPARISON_FILES, "with", "without"}
    (place / "lab" / "comparison.json").unlink()  # killed while it wrote its tables
    assert run(*words) == 0
    assert run("train", "--out", "lab") == 2  # its report is no run's


def test_pretraining_writes_only_run_files(place: Path) -> None:
    assert run("pretrain", "--out", "lab", "--report") == 0
    assert {path.name for path in (place / "lab").iterdir()} <= {*RUN_FILES, ".lock"}
