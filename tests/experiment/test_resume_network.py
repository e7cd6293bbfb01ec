"""A resumed run keeps its network, even if the rules would choose another one now."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from frugalvit.backbones import factory
from frugalvit.config.yaml import read_yaml
from helpers.tiny_runs import PRETRAIN, SWIN, TRAIN, differences, interrupted_at, run_tiny

CHOSEN = {"patch_size": 2, "window_size": 8}
SMALL = {name: value for name, value in SWIN.items() if name not in CHOSEN}


def change_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose other keywords for small images, as another version might; explicit ones still count."""

    def adapt(name: str, size: Any, given: dict[str, Any], build: Any) -> tuple[dict[str, Any], list[str]]:
        wanted = {"patch_size": 1, "window_size": 2, "mlp_ratio": 3.0}
        return {key: value for key, value in wanted.items() if key not in given}, ["other rules"]

    monkeypatch.setattr(factory, "adapt", adapt)


@pytest.mark.parametrize("at", [0, 3], ids=["before-a-checkpoint", "after-one"])
@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_resume_keeps_the_network(
    verb: str, at: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"data": photos, "backbone_args": SMALL, "steps": 4}
    run_tiny(verb, out=tmp_path / "complete", **options)
    with interrupted_at(at):
        run_tiny(verb, out=tmp_path / "cut", **options)
    change_the_rules(monkeypatch)
    tiny = TRAIN if verb == "train" else PRETRAIN
    run_tiny(verb, resume=tmp_path / "cut", **tiny | options)  # the options of the start work again
    assert differences(tmp_path / "complete", tmp_path / "cut") == []
    for name in ("complete", "cut"):
        network = json.loads((tmp_path / name / "model/config.json").read_text())["frugalvit"]["keywords"]
        assert {key: network[key] for key in CHOSEN} == CHOSEN and "mlp_ratio" not in network
        assert read_yaml(tmp_path / name / "config.yaml")["backbone_args"] == SMALL


def test_init_and_continue_keep_the_network(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run_tiny("pretrain", data=photos, out=run, backbone_args=SMALL)
    run_tiny("train", data=photos, out=tmp_path / "tuned", init=run, img_size=32, steps=1, backbone_args={})
    tuned = read_yaml(tmp_path / "tuned/config.yaml")["backbone_args"]
    assert tuned == SWIN | {"keep_patch_size": True}, "at another size it keeps its patches"
    change_the_rules(monkeypatch)
    run_tiny("pretrain", out=tmp_path / "longer", continue_from=str(run), steps=11, backbone_args=SMALL)
    assert read_yaml(tmp_path / "longer/config.yaml")["backbone_args"] == SMALL
    assert json.loads((tmp_path / "longer/data.json").read_text())["network"].items() >= CHOSEN.items()


def test_resume_keeps_the_statistics_of_pretrained_weights(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run downloads no weights; its images are normalized as before."""
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "test_vit.r160_in1k.safetensors")
    monkeypatch.setenv("FRUGALVIT_WEIGHTS", str(tmp_path))
    values = {"backbone": "test_vit.r160_in1k", "backbone_args": {}, "pretrained": True, "img_size": 32, "steps": 4}
    run_tiny("train", data=photos, out=tmp_path / "complete", **values)
    with interrupted_at(3):
        run_tiny("train", data=photos, out=tmp_path / "cut", **values)
    monkeypatch.setenv("FRUGALVIT_WEIGHTS", "nowhere")
    run_tiny("train", resume=tmp_path / "cut")
    assert differences(tmp_path / "complete", tmp_path / "cut") == []
    for name in ("complete", "cut"):
        stored = json.loads((tmp_path / name / "model/config.json").read_text())["pretrained_cfg"]
        assert stored["mean"] == stored["std"] == [0.5, 0.5, 0.5]


def test_choosing_the_shape_does_not_change_the_weights() -> None:
    """Whether keywords are chosen or explicit, one seed gives the same weights."""
    torch.manual_seed(0)
    chosen = factory.create_backbone("test_byobnet", 32)
    assert chosen.notes
    torch.manual_seed(0)
    explicit = factory.create_backbone("test_byobnet", 32, **chosen.architecture_kwargs())
    assert not explicit.notes and explicit.keywords == chosen.keywords
    for name, tensor in chosen.state_dict().items():
        assert torch.equal(tensor, explicit.state_dict()[name]), name
