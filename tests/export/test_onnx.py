"""ONNX and torch.export programs compute the same as torch, on photographs."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.errors import UserError
from helpers.exported_models import CLASSES, MODELS, made, run_export, train_briefly

FULL_SIZE = {  # the published networks
    "swin": ("swin_tiny_w7", {}),
    "cvt": ("cvt_13", {}),
    "cvt windowed": ("cvt_tiny_w7", {}),
    "vil": ("vil_tiny_w7", {}),
    "t2t": ("t2t_vit_14", {}),
    "vit": ("vit_small_patch16_224", {}),
    "resnet": ("resnet50", {}),
}


def check_onnx(folder: Path, output: str, out: Path, photographs: Path) -> float:
    """Export, then run on 1, 2 and all photographs; return the largest difference from torch."""
    onnxruntime = pytest.importorskip("onnxruntime")
    result = run_export(model=str(folder), to="onnx", output=output, out=str(out), images=str(photographs))
    assert result["checked_on"].startswith("5 images of") and result["max_difference"] < 1e-3
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    model = fv.load(str(folder))
    assert session.get_inputs()[0].shape == ["batch", 3, *model.backbone.img_size]
    assert all(output.shape[0] == "batch" for output in session.get_outputs())
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)
    images = model.transform([str(path) for path in sorted(photographs.iterdir())])
    exported: dict = runpy.run_path(str(out / "preprocessing.py"))
    config = json.loads((out / "config.json").read_text())
    inputs = np.concatenate([exported["preprocess"](path, config) for path in sorted(photographs.iterdir())])
    np.testing.assert_allclose(inputs, images, atol=1e-5, rtol=0)  # what ONNX gets without frugalvit and torch
    names = ["logits"] if output == "logits" else ["pooled", "grid"]
    largest = 0.0
    for count in (1, 2, len(images)):
        with torch.inference_mode():
            features = model.features(images[:count])
            expected = [model(images[:count])] if output == "logits" else [features.pooled, features.grid]
        for ours, theirs in zip(expected, session.run(names, {"images": images[:count].numpy()}), strict=True):
            assert theirs.shape == ours.shape
            largest = max(largest, float(np.abs(theirs - ours.numpy()).max()))
    return largest


# Each case takes a dozen seconds, and features differ from logits by one matrix: most cases are slow tests.
CASES = [("vit", "features")]
SHOWN = ("swin", "logits")
REST = [(name, output) for name in MODELS for output in ("logits", "features")]
REST = [case for case in REST if case not in (*CASES, SHOWN)]
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in REST]


@pytest.mark.parametrize(("name", "output"), [*CASES, *REST])
def test_onnx_equals_torch_on_photographs(name: str, output: str, tmp_path: Path, photographs: Path):
    folder = train_briefly(tmp_path, *MODELS[name], photographs)
    assert check_onnx(folder, output, tmp_path / "out", photographs) < 1e-3


def test_onnx_equals_torch_and_loads_without_warnings(
    tmp_path: Path, photographs: Path, capfd: pytest.CaptureFixture[str]
):
    onnxruntime = pytest.importorskip("onnxruntime")
    name, output = SHOWN
    folder = train_briefly(tmp_path, *MODELS[name], photographs)
    assert check_onnx(folder, output, tmp_path / "out", photographs) < 1e-3
    capfd.readouterr()
    onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("output", ["logits", "features"])
@pytest.mark.parametrize("name", FULL_SIZE)
def test_onnx_equals_torch_at_full_size(name: str, output: str, tmp_path: Path, photographs: Path, capsys):
    folder = train_briefly(tmp_path, *FULL_SIZE[name], photographs, steps=3)
    largest = check_onnx(folder, output, tmp_path / "out", photographs)
    with capsys.disabled():
        print(f"\n{FULL_SIZE[name][0]:28} {output:9} largest difference {largest:.1e}")
    assert largest < 1e-3


@pytest.mark.slow
def test_onnx_keeps_the_epsilon_of_a_division(tmp_path: Path, photographs: Path):
    """T2T's attention divides by sums that can be far below its 1e-8, which an optimizer once dropped."""
    folder, backbone = made(tmp_path, "t2t")
    first = backbone.model.tokens_to_token.attention1
    first.kqv.weight.data *= 8  # phi falls with the square of the keys' and queries' length
    with torch.inference_mode():
        windows = backbone.model.tokens_to_token.splits[0](torch.rand(2, 3, 64, 64))[0]
        keys, queries, _ = first.kqv(first.norm1(windows)).chunk(3, dim=-1)
        total = first.phi(queries) @ first.phi(keys).sum(1).unsqueeze(-1)
    assert total.min() < 1e-9, "the epsilon matters here"
    save_model_folder(backbone, folder, classes=CLASSES)
    assert check_onnx(folder, "features", tmp_path / "out", photographs) < 1e-3


@pytest.mark.parametrize("name", ["swin", pytest.param("t2t", marks=pytest.mark.slow)])
def test_pt2_has_a_dynamic_batch(name: str, tmp_path: Path):
    folder, backbone = made(tmp_path, name)
    result = run_export(model=str(folder), to="pt2", out=str(tmp_path / "out"), output="features")
    assert result["checked_on"] == "5 images of noise"
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    images = torch.rand(2, 3, *backbone.img_size)
    with torch.inference_mode():
        torch.testing.assert_close(program(images)[0], backbone(images).pooled, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label_names"] == list(CLASSES)


def test_programs_cannot_be_loaded_as_models(tmp_path: Path):
    folder, _ = made(tmp_path, "resnet")
    run_export(model=str(folder), to="pt2", out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="pt2"):
        fv.load(str(tmp_path / "out"))
