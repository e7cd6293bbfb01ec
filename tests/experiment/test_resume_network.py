"""A resumed run keeps its network, even if the rules would choose another one now."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from frugalvit.backbones import factory
from frugalvit.cli import main as cli
from frugalvit.cli.replay import _rebuild
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.engine.step import TrainStep
from frugalvit.experiment.init_weights import build_run_network
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, write_images

CHOSEN = {"patch_size": 2, "window_size": 8}
COMMANDS: dict[str, tuple[Callable[[Any], Any], Any, dict[str, Any]]] = {
    "train": (train, TrainConfig, TRAIN),
    "pretrain": (pretrain, PretrainConfig, PRETRAIN),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_images(tmp_path_factory.mktemp("images") / "photos"))


def cut_off(run: Callable[[Any], Any], config: Any, at: int = 7) -> None:
    """Begin a run that ends abruptly before a step."""
    step = TrainStep.one_step

    def until(self: TrainStep) -> None:
        if self.step == at:
            raise KeyboardInterrupt
        step(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainStep, "one_step", until)
        with pytest.raises(KeyboardInterrupt):
            run(config)


def choose_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version might, also where nothing was chosen before; what is given still counts."""

    def otherwise(name: str, size: Any, given: dict[str, Any], build: Any) -> tuple[dict[str, Any], list[str]]:
        wanted = {"patch_size": 1, "window_size": 2, "mlp_ratio": 3.0}
        return {key: value for key, value in wanted.items() if key not in given}, ["chosen otherwise"]

    monkeypatch.setattr(factory, "adapt", otherwise)


@pytest.mark.parametrize("at", [0, 7], ids=["before-a-checkpoint", "after-one"])
@pytest.mark.parametrize("verb", list(COMMANDS))
def test_resume_keeps_the_network(
    verb: str,
    at: int,
    images: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, kind, values = COMMANDS[verb]
    values = values | {"data": images, "device": "cpu"}
    run(kind.parse(values | {"out": str(tmp_path / "whole")}))
    assert "patch_size=2 (the published shape would end in 1x1 tokens" in capsys.readouterr().err
    cut_off(run, kind.parse(values | {"out": str(tmp_path / "cut")}), at)
    capsys.readouterr()
    choose_otherwise(monkeypatch)
    # the words that began it do again: what it chose is nothing that was asked for
    run(kind.parse(values | {"resume": str(tmp_path / "cut")}))
    assert "patch_size" not in capsys.readouterr().err, "it was said when it was chosen"
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    for name in ("whole", "cut"):
        network = json.loads((tmp_path / name / "model/config.json").read_text())["frugalvit"]["keywords"]
        assert {key: network[key] for key in CHOSEN} == CHOSEN and "mlp_ratio" not in network
        assert read_yaml(tmp_path / name / "config.yaml")["backbone_args"] == values["backbone_args"]


def test_init_replay_and_continue_keep_the_network(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever takes weights of a run takes its network too, whatever would be chosen now."""
    cut = tmp_path / "cut"
    cut_off(pretrain, PretrainConfig.parse(PRETRAIN | {"data": images, "device": "cpu", "out": str(cut)}))
    before = build_run_network(cut)
    evidence = {"kind": "PretrainingTask", "steps": 10, "steps_per_epoch": 3, "log_every": 1, "classes": 0}
    evidence |= {"seed": 0, "process": 0, "world": 1}
    with pytest.MonkeyPatch.context() as patched:
        choose_otherwise(patched)
        shapes = [tensor.shape for tensor in before.state_dict().values()]
        assert [tensor.shape for tensor in build_run_network(cut).state_dict().values()] == shapes
        task, _ = _rebuild(cut, evidence)
        assert [tensor.shape for tensor in task.student.state_dict().values()] == shapes
    words = ["train", images, "--init", str(cut), "--img-size", "32", "--steps", "1", "--batch", "8", "--device", "cpu"]
    assert cli.main([*words, "--no-report", "--out", str(tmp_path / "tuned")]) == 0
    tuned = read_yaml(tmp_path / "tuned/config.yaml")["backbone_args"]
    assert tuned == TRAIN["backbone_args"] | CHOSEN | {"keep_patch_size": True}, "at another size it keeps its patches"
    capsys.readouterr()
    longer = ["pretrain", "--continue", str(cut), "--steps", "11", "--device", "cpu", "--out", str(tmp_path / "longer")]
    choose_otherwise(monkeypatch)
    assert cli.main([*longer, "--no-report"]) == 0, capsys.readouterr().err
    assert read_yaml(tmp_path / "longer/config.yaml")["backbone_args"] == PRETRAIN["backbone_args"]
    assert build_run_network(tmp_path / "longer").model.patch_embed.patch_size == CHOSEN["patch_size"]


def test_resume_keeps_the_statistics_of_pretrained_weights(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run fetches no weights any more; its images are normalised as before."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **more: create(name, **more))
    values = TRAIN | {"backbone": "test_vit.r160_in1k", "backbone_args": {}, "pretrained": True, "img_size": 32}
    values |= {"data": images, "device": "cpu"}
    train(TrainConfig.parse(values | {"out": str(tmp_path / "whole")}))
    cut_off(train, TrainConfig.parse(values | {"out": str(tmp_path / "cut")}))
    train(TrainConfig.parse({"resume": str(tmp_path / "cut"), "device": "cpu"}))
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    for name in ("whole", "cut"):
        stored = json.loads((tmp_path / name / "model/config.json").read_text())["pretrained_cfg"]
        assert stored["mean"] == stored["std"] == [0.5, 0.5, 0.5]


def test_choosing_the_shape_does_not_change_the_weights() -> None:
    """Chosen by trying, or given: from one seed come the same weights. Some are tried with weights of their own."""
    torch.manual_seed(0)
    tried = factory.create_backbone("test_byobnet", 32)
    assert tried.notes
    torch.manual_seed(0)
    given = factory.create_backbone("test_byobnet", 32, **tried.architecture_kwargs())
    assert not given.notes and given.keywords == tried.keywords
    for name, tensor in tried.state_dict().items():
        assert torch.equal(tensor, given.state_dict()[name]), name
