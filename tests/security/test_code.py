"""Input never runs code: pickles are refused, and the source has no dangerous calls."""

import ast
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from frugalvit.backbones.weights.load import read_checkpoint
from frugalvit.cli import main as cli
from frugalvit.config.yaml import read_yaml
from frugalvit.engine.checkpoint import read_state
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder

SOURCE = Path(__file__).parents[2] / "src" / "frugalvit"


class Canary:
    """An object whose unpickling would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    made = Canary(tmp_path / "the_code_has_run")
    yield made
    assert not made.path.exists(), "reading the file has run code"


def evil_files(folder: Path, canary: Canary) -> list[Path]:
    folder.mkdir(exist_ok=True)
    torch.save({"step": 1, "task": {"weight": canary}}, folder / "zip.pt")
    torch.save({"step": 1, "task": canary}, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "bare.pt").write_bytes(pickle.dumps(canary))
    (folder / "bare.safetensors").write_bytes(pickle.dumps({"model": canary}))
    return sorted(folder.iterdir())


def test_checkpoints_run_no_code(tmp_path: Path, canary: Canary) -> None:
    for path in evil_files(tmp_path / "evil", canary):
        with pytest.raises(UserError):
            read_checkpoint(path)
        assert read_state(path)[0] is None


def test_a_foreign_run_folder_runs_no_code(tmp_path: Path, canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    """Resume, predict and probe a run from another person."""
    for path in evil_files(tmp_path / "evil", canary):
        run = tmp_path / f"run_{path.stem}{path.suffix}"
        for name in ("checkpoints/last.pt", "checkpoints/best.pt", "model/model.safetensors"):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(path.read_bytes())
        (run / "config.yaml").write_text("{}")
        (run / "model" / "config.json").write_text('{"architecture": "resnet18"}')
        with pytest.raises(UserError, match="is intact"):
            RunFolder(run).load_checkpoint()
        for words in (["predict", str(run), str(run / "config.yaml")], ["probe", "knn", str(run), "x"]):
            assert cli.main(words) == 2, words
        assert "Traceback" not in capsys.readouterr().err


def test_weights_run_no_code(tmp_path: Path, canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    for path in evil_files(tmp_path / "evil", canary):
        assert cli.main(["predict", str(path), str(path)]) == 2
        assert cli.main(["export", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_yaml_creates_no_objects(tmp_path: Path, canary: Canary) -> None:
    path = tmp_path / "config.yaml"
    for text in (f"!!python/object/apply:os.mkdir ['{canary.path}']", yaml.dump({"a": canary})):
        path.write_text(text)
        with pytest.raises(UserError, match="not readable YAML"):
            read_yaml(path)


_READ_WITH_CARE = ("cli", "config", "visualization", "probing", "report", "reproduce", "comparison", "runs/trackers.py")


def _careful(path: Path) -> bool:
    name = path.relative_to(SOURCE).as_posix()
    return "/" not in name or name.startswith(_READ_WITH_CARE)


@pytest.mark.parametrize(
    "path", sorted(filter(_careful, SOURCE.rglob("*.py"))), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_json_is_parsed_with_care(path: Path) -> None:
    """``files.read_json`` reports damage; other code must catch ValueError."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    caught = {
        node
        for attempt in ast.walk(tree)
        if isinstance(attempt, ast.Try)
        and any(handler.type and "ValueError" in ast.unparse(handler.type) for handler in attempt.handlers)
        for statement in attempt.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.load", "json.loads"):
            assert node in caught, f"{path}:{node.lineno} parses JSON unguarded; use files.read_json"


_FORBIDDEN = {
    "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen",
    "eval", "exec", "marshal.loads", "shelve.open", "joblib.load", "dill.load",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_dangerous_call_in_the_source(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        where = f"{path}:{node.lineno}"
        assert name not in _FORBIDDEN, f"{where} calls {name}"
        assert name.rpartition(".")[2] not in ("extractall", "extract_all"), f"{where} unpacks an archive"
        if name == "torch.load":
            assert options.get("weights_only") == "True", f"{where} loads a pickle"
        if name in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", f"{where} allows pickles"
        assert options.get("shell") != "True", f"{where} starts a shell"
        assert "trust_remote_code" not in options, f"{where} trusts remote code"
