"""--init from a stopped run: the weights that it would export now."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from frugalvit import create_backbone
from frugalvit.backbones.weights.load import load_weights
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.experiment.init_weights import _backbone_in, best_run_weights, is_unfinished_run
from frugalvit.experiment.load_model import load_model
from helpers.tiny_runs import PRETRAIN, TRAIN, write_config, write_images

NETWORK = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs as a stop leaves them: checkpoints, and no model."""
    folder = tmp_path_factory.mktemp("unfinished")
    write_images(folder / "images")
    write_config(folder / "open.yaml", {"batch": 8, "lr": 1e-12, "steps": 1, "report": False, "ema": 0.0})
    for verb, values in (("train", TRAIN), ("pretrain", PRETRAIN)):
        write_config(folder / f"{verb}.yaml", values, steps=4)
        words = [verb, str(folder / "images"), "--config", str(folder / f"{verb}.yaml"), "--out", str(folder / verb)]
        assert cli.main([*words, "--device", "cpu", "--quiet"]) == 0
        shutil.rmtree(folder / verb / "model")
        (folder / verb / "summary.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("begun", "file", "network"), [("train", "best.pt", "average"), ("pretrain", "last.pt", "teacher")]
)
def test_init_from_a_stopped_run(
    begun: str, file: str, network: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / begun
    words = ["train", str(place / "images"), "--config", str(place / "open.yaml"), "--init", str(run)]
    assert cli.main([*words, "--out", str(tmp_path / "new"), "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert f"{run} is not finished: using checkpoints/{file} of step 4" in said
    assert f"img_size = (16, 16): the input size of {run}" in said
    assert "its classes differ" not in said and "does not name its classes" not in said
    theirs = torch.load(run / "checkpoints" / file, weights_only=True)["task"]
    ours = torch.load(tmp_path / "new/checkpoints/last.pt", weights_only=True)["task"]
    name = next(name for name in ours if name.endswith("qkv.weight"))
    torch.testing.assert_close(ours[name], theirs[name.replace("backbone.", f"{network}.")])


def test_init_from_a_run_without_intact_checkpoint(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "train", tmp_path / "run")
    (run / "checkpoints/best.pt").write_bytes(b"PK")
    source, _, classes = best_run_weights(run)
    assert source == run / "checkpoints/last.pt" and classes == ["cat", "dog"] and is_unfinished_run(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        best_run_weights(run)


def test_backbone_tensors_inside_a_detector() -> None:
    backbone = create_backbone("swin_nano", 32, **NETWORK)
    tensors = {f"net.features.pyramid.backbone.{name}": value for name, value in backbone.state_dict().items()}
    found = _backbone_in(tensors | {"net.heads.weight": torch.zeros(2)})
    other = create_backbone("swin_nano", 32, **NETWORK)
    assert found is not None and not load_weights(other, found, strict=True).missing
    assert _backbone_in(nn.Linear(2, 2).state_dict()) is None


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_loading_an_unfinished_run_says_how_to_resume(verb: str, place: Path) -> None:
    run = place / verb
    with pytest.raises(UserError, match=f"not finished: .*'frugalvit {verb} --resume {run}'"):
        load_model(str(run), device="cpu")
