"""Fine-tuning published weights: the network's own settings, a logistic start, LoRA, and an exact resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression

import frugalvit as fv
from frugalvit.backbones import create_backbone
from frugalvit.config.defaults import Facts, finetuning_epochs, frozen_blocks, layer_decay
from frugalvit.config.train import TrainConfig
from frugalvit.data import open_data
from frugalvit.data.loader import eval_batches
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.experiment import builders
from frugalvit.probing import logistic
from frugalvit.probing.logistic import fit_on_features
from frugalvit.tasks.classification.task import ClassificationTask
from helpers.tiny_runs import interrupted_at, load_state, write_images

SHORT: dict[str, Any] = {"device": "cpu", "steps": 3, "batch": 8, "report": False, "quiet": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "photos", classes=("cat", "dog", "emu"))


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(timm.create_model("test_vit").state_dict(), folder / "test_vit.safetensors")
    monkeypatch.setenv("FRUGALVIT_WEIGHTS", str(folder))
    return folder


def config_crop(run: Path) -> tuple[float, str]:
    """Return what ONNX, timm and ``preprocess`` read."""
    settings = json.loads((run / "model/config.json").read_text())["pretrained_cfg"]
    return settings["crop_pct"], settings["interpolation"]


def settings_of(run: Path) -> TrainConfig:
    return TrainConfig.from_run(run / "config.yaml")


@pytest.mark.parametrize(
    "options",
    [{"pretrained": True, "backbone": "test_vit"}, {"init": "test_vit.r160_in1k"}, {"init": "FILE"}],
    ids=["pretrained", "name", "file"],
)
def test_run_takes_the_settings_of_the_weights(
    options: dict[str, Any], data: Path, weights: Path, tmp_path: Path
) -> None:
    if options.get("init") == "FILE":
        options = {"init": str(weights / "test_vit.safetensors")}
    fv.train(data, out=str(tmp_path / "run"), **SHORT, **options)
    config, model = settings_of(tmp_path / "run"), fv.load(tmp_path / "run").backbone
    assert (model.name, model.mean, model.img_size) == ("test_vit", (0.5, 0.5, 0.5), (160, 160))
    tag = timm.get_pretrained_cfg("test_vit.r160_in1k")
    crop = fv.load(tmp_path / "run").model.transform.crop
    assert tag is not None and crop == CenterCrop((160, 160), tag.crop_pct, tag.interpolation)
    assert crop != CenterCrop((160, 160))  # the tag's is not the default
    assert config_crop(tmp_path / "run") == (tag.crop_pct, tag.interpolation)
    assert (config.classifier, config.freeze, config.optimizer.layer_decay) == ("logistic", 3, 0.75)
    assert config.mixing.smoothing == 0
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["split"]) == (0, "val")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["val_top1"] >= first["top1"]  # the start may be the best


def test_auto_takes_a_published_network_on_a_cpu(
    data: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), weights / "vit_tiny_patch16_224.safetensors")
    options = SHORT | {"steps": 1, "quiet": False}
    fv.train(data, out=str(tmp_path / "run"), pretrained=True, **options)
    assert settings_of(tmp_path / "run").backbone == "vit_tiny_patch16_224"
    capsys.readouterr()
    fv.train(data, out=str(tmp_path / "scratch"), img_size=32, **options)
    assert "published weights of vit_tiny_patch16_224 are on this machine: --pretrained" in capsys.readouterr().err
    assert settings_of(tmp_path / "scratch").classifier == "auto"


def test_start_is_the_logistic_solution(data: Path) -> None:
    """The oracle is scikit-learn's solution for the same λ."""
    backbone, fabric = create_backbone("test_vit", 32, num_classes=3), Fabric(accelerator="cpu")
    images = open_data(str(data)).splits["train"]
    config: Any = TrainConfig.parse({"data": str(data), "batch": 8})
    dataset = builders.eval_set(images, backbone, config, fabric)
    weight, bias, strength = fit_on_features(backbone, [dataset], 3, fabric)
    with torch.no_grad():
        batches = eval_batches(dataset.store, dataset.transform, dataset.batch)
        features = torch.cat([backbone.eval()(pixels).pooled for pixels, _, _ in batches])
    oracle = LogisticRegression(C=1 / strength, max_iter=5000, tol=1e-8).fit(features.numpy(), images.labels)
    expected = torch.from_numpy(oracle.predict_proba(features.numpy())).float()
    assert torch.allclose((features @ weight.T + bias).softmax(1), expected, atol=0.01)


@pytest.mark.parametrize("lora", [0, 4])
def test_resume_is_exact_and_lora_is_merged(lora: int, data: Path, tmp_path: Path) -> None:
    options = SHORT | {"steps": 4, "save_every": 1, "lora": lora, "pretrained": True, "backbone": "test_vit"}
    fv.train(data, out=str(tmp_path / "whole"), **options)
    with interrupted_at(2):
        fv.train(data, out=str(tmp_path / "parts"), **options)
    fv.train(resume=str(tmp_path / "parts"), device="cpu", quiet=True)
    one, other = (load_state(tmp_path / name)["task"] for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    stored = load_file(tmp_path / "whole/model/model.safetensors")
    assert stored.keys() == timm.create_model("test_vit", num_classes=3).state_dict().keys()
    scored = fv.run("eval", str(tmp_path / "whole"), str(data), device="cpu", quiet=True)
    assert scored["top1"] == json.loads((tmp_path / "whole/summary.json").read_text())["top1"]


@pytest.mark.parametrize(("later", "labels"), [(50.0, 1.0), (60.0, 1.0), (61.0, 1.0), (50.0, 2)])
def test_a_start_that_stays_learns_from_val_too(
    later: float, labels: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later weights must be better on val than the fitted start; if not, the result is the probe on train and val.

    With ``--labels 2`` two labels a class are all that it may learn from.
    """
    kept, uses_val = later <= 60, later <= 60 and labels == 1
    shutil.copytree(data, tmp_path / "photos")
    shutil.copytree(data / "val", tmp_path / "photos/test")
    monkeypatch.setattr(
        logistic, "search_strength", lambda evaluate, weakest: (1.0, {})
    )  # the search has tests of its own
    monkeypatch.setattr(ClassificationTask, "evaluate", lambda self, step: {"top1": later if step else 60.0})
    options = SHORT | {"pretrained": True, "backbone": "test_vit", "img_size": 32, "evaluate_every": 1}
    options |= {"labels": labels}
    result = fv.train(tmp_path / "photos", out=str(tmp_path / "run"), **options)
    assert result["best_step"] == (0 if kept else 3)
    trained, start = fv.load(tmp_path / "run").backbone, load_state(tmp_path / "run", "best.pt")["task"]
    state = {name: value for name, value in trained.state_dict().items() if not name.startswith("model.head.")}
    assert all(torch.equal(value, start[f"average.{name}"]) for name, value in state.items())
    fabric, config = Fabric(accelerator="cpu"), settings_of(tmp_path / "run")
    splits = open_data(str(tmp_path / "photos")).splits
    sets = [builders.eval_set(splits[name], trained, config, fabric) for name in ("train", "val")]  # type: ignore[arg-type]
    weight, bias, _ = fit_on_features(trained, sets, 3, fabric)
    head = trained.model.head
    assert torch.allclose(head.weight, weight, atol=1e-5) == uses_val  # type: ignore[union-attr]
    assert torch.allclose(head.bias, bias, atol=1e-5) == uses_val  # type: ignore[union-attr]


def test_rules() -> None:
    facts = Facts(images=918, classes=102, side=224, device="cpu", blocks=12)
    assert finetuning_epochs(facts)[0] == 3 and frozen_blocks(facts)[0] == 6 and layer_decay(facts)[0] == 0.75
    unordered = Facts(images=918, classes=102, side=224, device="cuda")
    assert frozen_blocks(unordered)[0] == 0 and layer_decay(unordered)[0] == 1.0
