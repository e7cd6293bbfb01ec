"""Checkpoints of a run as the MODEL argument."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.classification.predict import load_classifier
from helpers.tiny_runs import write_images

TINY = ["--backbone", "swin_nano", "--img-size", "16", "--batch", "4", "--no-report", "--quiet"]
HEADS = ["--matching.prototypes", "16", "--matching.hidden", "8", "--matching.bottleneck", "4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    photos = str(write_images(folder / "photos"))
    assert (
        cli.main(["train", photos, "--out", str(folder / "run"), *TINY, "--steps", "4", "--evaluate-every", "2"]) == 0
    )
    label_free = ["pretrain", photos, "--out", str(folder / "pre"), *TINY, *HEADS, "--crops.local-crops", "1"]
    assert cli.main([*label_free, "--steps", "2"]) == 0
    return folder


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("file", ["run/checkpoints/best.pt", "pre/checkpoints/last.pt", "run/model/model.safetensors"])
def test_exported_checkpoint_is_the_runs_model(runs: Path, file: str) -> None:
    whole, model = load_model(str(runs / file.split("/")[0])), load_model(str(runs / file))
    assert same(model.backbone, whole.backbone) and model.classes == whole.classes
    assert model.backbone.img_size == (16, 16)


def test_last_checkpoint_loads_the_ema(runs: Path) -> None:
    state = torch.load(runs / "run/checkpoints/last.pt", weights_only=True)["task"]
    model, classes = load_classifier(str(runs / "run/checkpoints/last.pt"), "cpu")
    assert classes == ("cat", "dog") and model.name == "run-last"
    assert "top1" in load_model(str(runs / "run")).meta and "top1" not in model.meta  # that is of the exported weights
    kept = {name.partition("average.")[2]: tensor for name, tensor in state.items() if name.startswith("average.")}
    found = model.backbone.model.state_dict()
    assert kept and all(torch.equal(found[name.removeprefix("model.")], kept[name]) for name in kept)


@pytest.mark.parametrize("file", ["checkpoints/last.pt", "model/model.safetensors"])
def test_commands_accept_checkpoints(runs: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, photos = str(runs / "run" / file), str(runs / "photos")
    assert cli.main(["predict", model, f"{photos}/val/cat", "--device", "cpu"]) == 0
    assert cli.main(["eval", model, photos, "--device", "cpu", "--json"]) == 0
    assert cli.main(["probe", "knn", model, photos, "--device", "cpu", "--quiet"]) == 0
    capsys.readouterr()


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(bytes(content))


def no_model(file: Path) -> None:
    (file.parent.parent / "model/config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(damaged, "is damaged"), (no_model, "a bare checkpoint, .* --backbone NAME")],
)
def test_unreadable_checkpoints_are_one_line(
    runs: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    for name in ("checkpoints/last.pt", "model/config.json", "model/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((runs / "run" / name).read_bytes())
    spoil(tmp_path / "checkpoints/last.pt")
    with pytest.raises(UserError, match=said):
        load_model(str(tmp_path / "checkpoints/last.pt"))


def test_checkpoint_with_another_backbone_is_refused(runs: Path) -> None:
    with pytest.raises(UserError, match="Drop --backbone"):
        load_model(str(runs / "run/checkpoints/last.pt"), architecture="resnet18")


def test_other_files_in_checkpoints_are_bare_weights(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    backbone = load_model(str(runs / "run")).backbone
    torch.save({"model": backbone.model.state_dict()}, tmp_path / "run/checkpoints/epoch3.pth")
    found = load_model(str(tmp_path / "run/checkpoints/epoch3.pth"), architecture="swin_nano", img_size=16)
    assert torch.equal(found.backbone.model.state_dict()["norm.weight"], backbone.model.state_dict()["norm.weight"])


def test_export_of_a_checkpoint_has_no_scores(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(runs / "run/checkpoints/last.pt"), "--to", "hf", "--json", "--quiet"]) == 0
    assert "noise" not in json.loads(capsys.readouterr().out)["checked_on"]  # the run's own images are known
    assert [path.name for path in tmp_path.iterdir()] == ["run-last-hf"]
    meta = json.loads((tmp_path / "run-last-hf/config.json").read_text())["frugalvit"]["meta"]
    assert "top1" not in meta and "accuracy" not in (tmp_path / "run-last-hf/README.md").read_text().split("---")[1]
