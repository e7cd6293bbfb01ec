"""--init: which network and classifier a folder or file provides, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment.builders import load_initial_weights, make_backbone
from frugalvit.experiment.load_model import adopt_init_architecture
from frugalvit.experiment.resolve import AutoValues

NARROW = {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 2]}
HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def adopted(init: Path, **values: Any) -> TrainConfig:
    return adopt_init_architecture(TrainConfig.parse({"data": "x", "init": str(init)} | values), AutoValues())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Swin for 224 pixels and three classes, with statistics of its own."""
    backbone = create_backbone("swin_nano", 224, 3, **HALVES, **NARROW)
    return save_model_folder(backbone, tmp_path_factory.mktemp("models") / "swin", classes=["a", "b", "c"])


@pytest.mark.parametrize(
    ("file", "values", "classes", "loads_classifier", "text"),
    [
        ("", {}, ("a", "b", "c"), True, "53 tensors loaded\n"),
        ("", {}, ("a", "b", "d"), False, "its classes differ (a, b, c), so the classifier starts from scratch"),
        ("", {"img_size": 32}, ("a", "b", "c"), True, "keeps the patch size of its weights and ends in 1x1"),
        ("", {"backbone": "swin_nano"}, ("x",), False, "2 left over (head.fc.bias, head.fc.weight); classifier of 3"),
        ("model.safetensors", {}, ("a", "b", "d"), False, "its classes differ (a, b, c)"),
        ("bare.pth", {}, ("a", "b", "d"), True, "its classifier is loaded; the file does not name"),
    ],
)
def test_init_loads_network_and_classifier(
    folder: Path,
    file: str,
    values: dict[str, Any],
    classes: tuple[str, ...],
    loads_classifier: bool,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored = load_file(folder / "model.safetensors")
    torch.save(stored, folder / "bare.pth")
    network = {"backbone": "swin_nano", "backbone_args": NARROW, "img_size": 224} if file else {}
    backbone = make_backbone(adopted(folder / file, **network | values), classes)
    assert text in capsys.readouterr().err
    assert torch.equal(backbone.model.state_dict()["head.fc.weight"], stored["head.fc.weight"]) is loads_classifier
    if not file:
        assert backbone.mean == (0.5, 0.5, 0.5) and backbone.model.patch_embed.patch_size == 8


@pytest.mark.parametrize(
    ("values", "keywords"),
    [
        ({}, {"patch_size", "mean", "std", "keep_patch_size"}),
        ({"backbone": "swin_nano"}, {"patch_size", "mean", "std", "keep_patch_size"}),
        ({"backbone": "swin_nano", "backbone_args": {"attn_drop": 0.1}}, {"patch_size", "mean", "attn_drop"}),
        ({"backbone": "swin_tiny_w7"}, {"mean", "std"}),
    ],
)
def test_init_adopts_the_architecture(values: dict[str, Any], keywords: set[str], tmp_path: Path) -> None:
    """The same network gets all keywords, another one only mean and deviation; the user's options win."""
    save_model_folder(create_backbone("swin_nano", 32, 3, **HALVES, **NARROW), tmp_path)
    run = adopted(tmp_path, **values)
    assert keywords <= set(run.backbone_args)
    assert ("embed_dim" in run.backbone_args) == (run.img_size == (32, 32)) == (run.backbone == "swin_nano")


def test_init_from_a_grayscale_network(tmp_path: Path) -> None:
    save_model_folder(create_backbone("swin_nano", 32, 3, in_chans=1, mean=(0.3,), std=(0.2,), **NARROW), tmp_path)
    backbone = make_backbone(adopted(tmp_path), ("a", "b", "c"))
    assert (backbone.in_chans, backbone.mean) == (1, (0.3,))
    assert adopted(tmp_path, backbone="swin_tiny_w7").backbone_args == {}, "one mean does not fit three channels"
    assert make_backbone(adopted(tmp_path, backbone_args={"in_chans": 3}), ("a", "b", "c")).in_chans == 3


def test_resume_does_not_adopt_init_again(tmp_path: Path) -> None:
    save_model_folder(create_backbone("swin_nano", 32, 3, **NARROW), tmp_path)
    run = adopted(tmp_path, resume="runs/started", backbone="swin_nano")
    assert run.backbone_args == {} and run.img_size == "auto"


def test_init_from_another_librarys_folder(tmp_path: Path) -> None:
    save_model_folder(create_backbone("swin_nano", 32, 3, **NARROW), tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["SwinModel"]}')
    run = adopted(tmp_path, img_size=32, backbone="swin_nano", backbone_args=NARROW)
    assert make_backbone(run, ("a", "b", "c")).num_classes == 3
    with pytest.raises(UserError, match="architecture"):
        adopted(tmp_path)


def test_init_from_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    for name in ("config.yaml", "data.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"not finished.*checkpoints/last\.pt"):
        adopted(tmp_path)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        (TrainConfig, "--pretrained takes"),
        (PretrainConfig, "--init resnet18.a1_in1k takes"),
        (DetectConfig, "--pretrained takes"),
        (SegmentConfig, "--pretrained takes"),
    ],
)
def test_tag_without_its_weights_is_told(kind: type[RunConfig], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    tag, backbone = "resnet18.a1_in1k", create_backbone("swin_nano")

    def lines(**values: Any) -> str:
        load_initial_weights(backbone, kind.parse({"data": "x", "backbone": tag} | values))
        return capsys.readouterr().err

    assert lines() == f"{tag}: this run starts from random weights; {flag} the published ones\n"
    assert lines(backbone="resnet18") == ""
    if kind is TrainConfig:
        assert lines(pretrained=True) == ""
