"""--init and load_model: what a folder or file provides, what does not fit, what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import AutoValues
from frugalvit.experiment.builders import make_backbone
from frugalvit.experiment.experiment import adopt_init_architecture
from frugalvit.experiment.load_model import load_model

NARROW = {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Swin for 224 pixels and three classes, with statistics of its own."""
    backbone = create_backbone("swin_nano", 224, 3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), **NARROW)
    return save_model_folder(backbone, tmp_path_factory.mktemp("models") / "swin", classes=["a", "b", "c"])


@pytest.mark.parametrize(
    ("given", "classes", "taken", "words"),
    [
        ({}, ("a", "b", "c"), True, "missing, 0 left over"),
        ({}, ("a", "b", "d"), False, "its classes differ (a, b, c), so the classifier starts from scratch"),
        (
            {"img_size": 32},
            ("a", "b", "c"),
            True,
            "at 32x32: keeps the patch size of its weights and ends in 1x1",
        ),
        ({"backbone": "swin_nano"}, ("x",), False, "2 left over (head.fc.bias, head.fc.weight); classifier of 3"),
        ({"init": "model.safetensors"}, ("a", "b", "d"), False, "its classes differ (a, b, c)"),
        ({"init": "bare.pth"}, ("a", "b", "d"), True, "its classifier is loaded; the file does not name"),
    ],
)
def test_init_loads_network_and_classifier(
    folder: Path, given: dict, classes: tuple[str, ...], taken: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = load_file(folder / "model.safetensors")
    torch.save(stored, folder / "bare.pth")
    file = given.get("init", "")
    by_hand = {"backbone": "swin_nano", "backbone_args": NARROW, "img_size": 224} if file else {}
    run = TrainConfig.parse(by_hand | given | {"data": "x", "init": str(folder / file)})
    run = adopt_init_architecture(run, AutoValues())
    backbone = make_backbone(run, classes)
    assert words in capsys.readouterr().err
    assert torch.equal(backbone.model.state_dict()["head.fc.weight"], stored["head.fc.weight"]) is taken
    if not file:
        assert backbone.mean == (0.5, 0.5, 0.5) and backbone.model.patch_embed.patch_size == 8


@pytest.mark.parametrize(
    ("given", "brought"),
    [
        ({}, {"patch_size", "window_size", "mean", "std", "keep_patch_size"}),
        ({"backbone": "swin_nano"}, {"patch_size", "mean", "std", "keep_patch_size"}),
        ({"backbone": "swin_nano", "backbone_args": {"attn_drop": 0.1}}, {"patch_size", "mean", "attn_drop"}),
        ({"backbone": "swin_tiny_w7"}, {"mean", "std"}),
    ],
)
def test_init_adopts_the_architecture(given: dict[str, Any], brought: set[str], tmp_path: Path) -> None:
    """All that shapes its network where that is wanted, its pixels' statistics in any case; the user's word is last."""
    made = create_backbone("swin_nano", 32, 3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), **NARROW)
    save_model_folder(made, tmp_path)
    run = TrainConfig.parse({"data": "x", "init": str(tmp_path)} | given)
    run = adopt_init_architecture(run, AutoValues())
    wanted = brought & ({*made.keywords, "keep_patch_size", "attn_drop"})
    assert wanted <= set(run.backbone_args)
    assert ("embed_dim" in run.backbone_args) == (run.backbone == "swin_nano")
    assert (run.img_size == (32, 32)) == (run.backbone == "swin_nano")


def test_init_from_a_grayscale_network(tmp_path: Path) -> None:
    save_model_folder(create_backbone("swin_nano", 32, 3, in_chans=1, mean=(0.3,), std=(0.2,), **NARROW), tmp_path)
    run = TrainConfig.parse({"data": "x", "init": str(tmp_path)})
    run = adopt_init_architecture(run, AutoValues())
    backbone = make_backbone(run, ("a", "b", "c"))
    assert (backbone.in_chans, backbone.mean) == (1, (0.3,))
    other = TrainConfig.parse({"data": "x", "init": str(tmp_path), "backbone": "swin_tiny_w7"})
    other = adopt_init_architecture(other, AutoValues())
    assert other.backbone_args == {}, "the mean of grey pixels says nothing of three channels"
    coloured = TrainConfig.parse({"data": "x", "init": str(tmp_path), "backbone_args": {"in_chans": 3}})
    coloured = adopt_init_architecture(coloured, AutoValues())
    assert make_backbone(coloured, ("a", "b", "c")).in_chans == 3


def test_resume_does_not_adopt_init_again(tmp_path: Path) -> None:
    save_model_folder(create_backbone("swin_nano", 32, 3, **NARROW), tmp_path)
    run = TrainConfig.parse({"data": "x", "init": str(tmp_path), "resume": "runs/begun", "backbone": "swin_nano"})
    run = adopt_init_architecture(run, AutoValues())
    assert run.backbone_args == {} and run.img_size == "auto"


def test_init_from_another_librarys_folder(tmp_path: Path) -> None:
    save_model_folder(create_backbone("swin_nano", 32, 3, **NARROW), tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["SwinModel"]}')
    values = {"data": "x", "init": str(tmp_path), "img_size": 32}
    run = TrainConfig.parse(values | {"backbone": "swin_nano", "backbone_args": NARROW})
    run = adopt_init_architecture(run, AutoValues())
    assert make_backbone(run, ("a", "b", "c")).num_classes == 3
    with pytest.raises(UserError, match="architecture"):
        adopt_init_architecture(TrainConfig.parse({"data": "x", "init": str(tmp_path)}), AutoValues())


@pytest.mark.parametrize(
    ("where", "more", "words"),
    [
        ("test_vit", {"img_size": 160}, "warning: 'test_vit' is only a name: its weights are random"),
        ("test_vit", {"img_size": 160, "random": True}, ""),
        ("swin", {"img_size": 64}, "ends in 2x2 tokens"),
        ("bare.pth", {"architecture": "swin_nano", "img_size": 224}, "bare.pth: classifier of 3 classes left out"),
        ("more.pth", {"architecture": "swin_nano"}, "warning: {where}: the network has no wings.weight"),
        ("fine.pth", {"architecture": "swin_nano", "img_size": 96}, "patch_size=4"),
    ],
)
def test_load_model_logs_how_the_network_is_built(
    folder: Path, where: str, more: dict, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    path, state = folder.parent / where, None
    if where.endswith(".pth"):
        size, classes = (96, 0) if where == "fine.pth" else (224, 3)
        state = create_backbone("swin_nano", size, classes).model.state_dict()
        torch.save(state | ({"wings.weight": torch.ones(2)} if where == "more.pth" else {}), path)
    model = load_model(str(path) if path.exists() else where, **more)
    said = capsys.readouterr().err
    assert words.format(where=path) in said and bool(said) == bool(words)
    assert "random" in said or "keep_patch_size" not in model.backbone.keywords or "ends in" in said
    if state:
        ours = model.backbone.model.state_dict()
        assert all(torch.equal(ours[name], state[name]) for name in ours)


@pytest.mark.parametrize(
    ("where", "architecture", "words"),
    [
        ("vit_tiny_patch16_224.augreg_in21k", None, "names published weights, which are not downloaded here"),
        ("half.pth", "swin_nano", r"lacks \d+ tensors of 'swin_nano' "),
    ],
)
def test_models_without_weights_are_refused(tmp_path: Path, where: str, architecture: str | None, words: str) -> None:
    if architecture:
        state = create_backbone(architecture, 224).model.state_dict()
        torch.save({name: state[name] for name in list(state)[: len(state) * 2 // 3]}, tmp_path / where)
        where = str(tmp_path / where)
    with pytest.raises(UserError, match=words):
        load_model(where, architecture=architecture)


def test_a_weights_file_uses_the_config_beside_it(folder: Path, tmp_path: Path) -> None:
    """A model folder's weights are the model; a checkpoint does not name its network, but its run does."""
    run = tmp_path / "run"
    shutil.copytree(folder, run / "model")
    weights = run / "model" / "model.safetensors"
    named = load_model(str(weights))
    assert named.backbone.spec() == load_model(str(run)).backbone.spec()
    (run / "checkpoints").mkdir()
    torch.save({}, run / "checkpoints" / "last.pt")
    (tmp_path / "foreign").mkdir()  # another library's folder, whose weights are ours by name
    shutil.copy(weights, tmp_path / "foreign" / "model.safetensors")
    (tmp_path / "foreign" / "config.json").write_text('{"architectures": ["SwinModel"]}')
    with pytest.raises(UserError, match="another architecture"):  # it is read, and of another width
        load_model(str(tmp_path / "foreign" / "model.safetensors"), architecture="swin_nano")
    with pytest.raises(UserError, match="is damaged"):
        load_model(str(run / "checkpoints" / "last.pt"))
    torch.save({}, tmp_path / "bare.pt")
    with pytest.raises(UserError, match="--backbone NAME"):
        load_model(str(tmp_path / "bare.pt"))
