"""Files of the user in --out are never overwritten."""

from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.runs.layout import COMPARISON_FILES, RUN_FILES
from helpers.tiny_runs import PRETRAIN, TRAIN, write_config, write_images

SETTINGS = ("--with", "lr=0.001", "--without", "lr=0.002", "--seeds", "1")


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_a_users_file_is_never_overwritten(name: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workdir / "lab" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert run("train", "--out", "lab") == 2
    assert f"lab already has {name.split('/')[0]}," in capsys.readouterr().err
    assert files(workdir / "lab") == {str(path): b"mine"}


@pytest.mark.parametrize("name", COMPARISON_FILES)
def test_a_comparison_never_overwrites_a_users_file(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workdir / "lab" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    assert run("compare", *SETTINGS, "--out", "lab") == 2
    assert "which would be overwritten" in capsys.readouterr().err
    assert files(workdir / "lab") == {str(path): b'{"mine": 1}'}


def test_a_run_may_be_beside_other_files(workdir: Path) -> None:
    (workdir / "lab").mkdir()
    (workdir / "lab" / "notes.txt").write_text("mine")
    (workdir / "lab" / "model").mkdir()
    (workdir / "lab" / "pictures").mkdir()
    (workdir / "lab" / "pictures" / "me.jpg").write_text("mine")  # what only detectors and segmenters write
    assert run("train", "--out", "lab", "--report") == 0
    assert (workdir / "lab" / "notes.txt").read_text() == "mine"
    assert {path.name for path in (workdir / "lab").iterdir()} <= {*RUN_FILES, ".lock", "notes.txt", "pictures"}


@pytest.mark.parametrize("more", [(), ("config.yaml",)])
def test_files_of_a_failed_start_may_be_overwritten(more: tuple[str, ...], workdir: Path) -> None:
    """The run was killed before or while it wrote its configuration; the queued job starts again."""
    for name in (".lock", "decisions.json", "data.json", "trackers.json", *more, "checkpoints/.writable.1.part"):
        (workdir / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / "lab" / name).write_text("{}")
    assert run("train", "--out", "lab", "--resume", "auto") == 0
    assert not list((workdir / "lab").rglob(".*.part"))


def test_a_comparison_continues_in_its_folder(workdir: Path) -> None:
    words = ("compare", *SETTINGS, "--out", "lab")
    assert run(*words) == 0
    assert {path.name for path in (workdir / "lab").iterdir()} <= {*COMPARISON_FILES, "with", "without"}
    (workdir / "lab" / "comparison.json").unlink()  # killed while it wrote its tables
    assert run(*words) == 0


def test_pretraining_writes_only_run_files(workdir: Path) -> None:
    assert run("pretrain", "--out", "lab", "--report") == 0
    assert {path.name for path in (workdir / "lab").iterdir()} <= {*RUN_FILES, ".lock"}
