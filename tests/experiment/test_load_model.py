"""The MODEL argument: checkpoints of a run, bare files, folders and names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.classification.predict import load_classifier
from helpers.tiny_runs import load_state, run_tiny


@pytest.fixture(scope="module")
def runs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training and a pre-training."""
    folder = tmp_path_factory.mktemp("runs")
    run_tiny("train", data=photos, out=folder / "run", steps=4, evaluate_every=2)
    run_tiny("pretrain", data=photos, out=folder / "pre", steps=2)
    return folder


@pytest.mark.parametrize("file", ["run/checkpoints/best.pt", "pre/checkpoints/last.pt", "run/model/model.safetensors"])
def test_exported_checkpoint_is_the_runs_model(runs: Path, file: str) -> None:
    run, model = load_model(str(runs / file.split("/")[0])), load_model(str(runs / file))
    ours, theirs = model.backbone.state_dict(), run.backbone.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert model.classes == run.classes and model.backbone.spec() == run.backbone.spec()


def test_last_checkpoint_loads_the_ema(runs: Path) -> None:
    state = load_state(runs / "run")["task"]
    model, classes = load_classifier(str(runs / "run/checkpoints/last.pt"), "cpu")
    assert classes == ("cat", "dog") and model.name == "run-last"
    assert "top1" in load_model(str(runs / "run")).meta and "top1" not in model.meta  # it belongs to other weights
    ema = {name.partition("average.model.")[2]: value for name, value in state.items() if name.startswith("average.")}
    weights = model.backbone.model.state_dict()
    assert ema and all(torch.equal(weights[name], ema[name]) for name in ema)


def test_backbone_inside_a_detector_checkpoint(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "pre", tmp_path / "run")
    weights = load_model(str(runs / "pre")).backbone.state_dict()
    task = {f"net.features.pyramid.backbone.{name}": value for name, value in weights.items()}
    torch.save({"step": 1, "task": task | {"net.heads.weight": torch.zeros(2)}}, tmp_path / "run/checkpoints/last.pt")
    loaded = load_model(str(tmp_path / "run/checkpoints/last.pt")).backbone.state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("file", ["checkpoints/last.pt", "model/model.safetensors"])
def test_commands_accept_checkpoints(runs: Path, photos: Path, file: str) -> None:
    model = str(runs / "run" / file)
    assert cli.main(["predict", model, f"{photos}/val/cat", "--device", "cpu"]) == 0
    assert cli.main(["eval", model, str(photos), "--device", "cpu", "--json"]) == 0
    assert cli.main(["probe", "knn", model, str(photos), "--device", "cpu", "--quiet"]) == 0


def damage(run: Path) -> None:
    file = run / "checkpoints/last.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(bytes(content))


def remove_model(run: Path) -> None:
    (run / "model/config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "text"), [(damage, "is damaged"), (remove_model, "which network it is for.* --backbone NAME")]
)
def test_unreadable_checkpoints_are_one_line(
    runs: Path, tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    spoil(tmp_path / "run")
    with pytest.raises(UserError, match=text):
        load_model(str(tmp_path / "run/checkpoints/last.pt"))


def test_checkpoint_with_another_backbone_is_refused(runs: Path) -> None:
    with pytest.raises(UserError, match="Drop --backbone"):
        load_model(str(runs / "run/checkpoints/last.pt"), architecture="resnet18")


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_an_unfinished_run_names_the_resume_command(verb: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("labels: 1.0" if verb == "train" else "matching: {}")
    with pytest.raises(UserError, match=f"'frugalvit {verb} --resume {tmp_path}'"):
        load_model(str(tmp_path))


def test_export_of_a_checkpoint_has_no_scores(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(runs / "run/checkpoints/last.pt"), "--to", "hf", "--json", "--quiet"]) == 0
    assert "noise" not in json.loads(capsys.readouterr().out)["checked_on"]  # the run's own images are known
    assert [path.name for path in tmp_path.iterdir()] == ["run-last-hf"]
    meta = json.loads((tmp_path / "run-last-hf/config.json").read_text())["frugalvit"]["meta"]
    assert "top1" not in meta and "accuracy" not in (tmp_path / "run-last-hf/README.md").read_text().split("---")[1]


@pytest.mark.parametrize(
    ("extra", "text"), [({}, "with ImageNet's pixel statistics"), ({"wings.weight": torch.ones(2)}, "no wings.weight")]
)
def test_bare_files_are_loaded_into_the_published_network(
    extra: dict[str, torch.Tensor], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = create_backbone("swin_nano", 224, 3).model.state_dict()
    torch.save(state | extra, tmp_path / "bare.pth")
    weights = load_model(str(tmp_path / "bare.pth"), architecture="swin_nano").backbone.model.state_dict()
    assert text in capsys.readouterr().err
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    torch.save({name: state[name] for name in list(state)[:60]}, tmp_path / "bare.pth")
    with pytest.raises(UserError, match="lacks these tensors of 'swin_nano'"):
        load_model(str(tmp_path / "bare.pth"), architecture="swin_nano")


def test_names_have_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    load_model("test_vit", img_size=160)
    assert "warning: 'test_vit' is only a name: its weights are random" in capsys.readouterr().err
    load_model("test_vit", img_size=160, random=True)
    assert not capsys.readouterr().err
