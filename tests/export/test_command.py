"""Whatever leaves the house computes what it computed here, in its own library, on real images."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli.main import main
from frugalvit.config.tools import ExportConfig
from frugalvit.errors import UserError
from frugalvit.export import command as exporting
from frugalvit.export import verify
from helpers.exported_models import CLASSES, MODELS, made, write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


def run(**options) -> dict:
    return exporting.export(ExportConfig(**options)).data


# -- ONNX

FULL = {  # the published networks at their published size
    "swin": ("swin_tiny_w7", {}),
    "cvt": ("cvt_13", {}),
    "cvt windowed": ("cvt_tiny_w7", {}),
    "vil": ("vil_tiny_w7", {}),
    "t2t": ("t2t_vit_14", {}),
    "vit": ("vit_small_patch16_224", {}),
    "resnet": ("resnet50", {}),
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real photographs, those that come with scikit-learn: each whole and in four pieces."""
    folder = tmp_path_factory.mktemp("photographs")
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        height, width = pixels.shape[:2]
        Image.fromarray(pixels).save(folder / f"{name}.png")
        for place, (top, left) in enumerate([(0, 0), (0, width // 2), (height // 2, 0), (height // 2, width // 2)]):
            piece = pixels[top : top + height // 2, left : left + width // 2]
            Image.fromarray(piece).save(folder / f"{name}_{place}.png")
    return folder


def trained(folder: Path, architecture: str, keywords: dict, photographs: Path, steps: int = 6) -> Path:
    """A model folder with weights that have learned: steps on the photographs, at a rate that moves all of them."""
    torch.manual_seed(0)
    backbone = fv.create_backbone(architecture, num_classes=len(CLASSES), **keywords)
    start = {name: value.clone() for name, value in backbone.state_dict().items() if value.is_floating_point()}
    save_model_folder(backbone, folder / "untrained")
    ready = fv.load(str(folder / "untrained"))
    images = ready.transform([Image.open(path).convert("RGB") for path in sorted(photographs.iterdir())[:6]])
    labels = torch.arange(6) % len(CLASSES)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=3e-3)
    backbone.train()
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(backbone.classify(backbone(images).pooled), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = {name for name, value in backbone.state_dict().items() if name in start and not value.equal(start[name])}
    assert len(moved) > 0.9 * len([name for name in start if "index" not in name and "mask" not in name])
    return save_model_folder(backbone.eval(), folder / "trained", classes=CLASSES)


def check_onnx(folder: Path, output: str, out: Path, photographs: Path) -> float:
    """Export, then run it on photographs one by one, in pairs and all at once; the largest difference from torch."""
    onnxruntime = pytest.importorskip("onnxruntime")
    result = run(model=str(folder), to="onnx", output=output, out=str(out), images=str(photographs))
    assert result["checked_on"].startswith("5 images of") and result["max_difference"] < 1e-3
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    model = fv.load(str(folder))
    assert session.get_inputs()[0].shape == ["batch", 3, *model.backbone.img_size]
    assert all(given.shape[0] == "batch" for given in session.get_outputs())
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)
    images = model.transform([str(path) for path in sorted(photographs.iterdir())])
    names = ["logits"] if output == "logits" else ["pooled", "grid"]
    worst = 0.0
    for count in (1, 2, len(images)):
        with torch.inference_mode():
            features = model.features(images[:count])
            expected = [model(images[:count])] if output == "logits" else [features.pooled, features.grid]
        for mine, theirs in zip(expected, session.run(names, {"images": images[:count].numpy()}), strict=True):
            assert theirs.shape == mine.shape
            worst = max(worst, float(np.abs(theirs - mine.numpy()).max()))
    return worst


# Features differ from logits by one matrix, and each case takes a dozen seconds: most are tried with --slow.
CASES = [("swin", "logits"), ("vit", "features")]
REST = [(name, output) for name in MODELS for output in ("logits", "features") if (name, output) not in CASES]
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in REST]


@pytest.mark.parametrize(("name", "output"), [*CASES, *REST])
def test_onnx_equals_torch_on_photographs(name: str, output: str, tmp_path: Path, photographs: Path):
    folder = trained(tmp_path, *MODELS[name], photographs)
    assert check_onnx(folder, output, tmp_path / "out", photographs) < 1e-3


def test_an_onnx_file_loads_in_silence_and_can_be_quantised(
    tmp_path: Path, photos: Path, capfd: pytest.CaptureFixture[str]
):
    onnxruntime = pytest.importorskip("onnxruntime")
    quantization = pytest.importorskip("onnxruntime.quantization")
    folder, backbone = made(tmp_path, "swin")
    run(model=str(folder), to="onnx", out=str(tmp_path / "out"), images=str(photos))
    images = np.random.default_rng(0).normal(size=(2, 3, *backbone.img_size)).astype(np.float32)
    capfd.readouterr()
    whole = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""
    quantization.quantize_dynamic(tmp_path / "out" / "model.onnx", tmp_path / "small.onnx")
    small = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    expected, rounded = (session.run(None, {"images": images})[0] for session in (whole, small))
    assert rounded.shape == expected.shape
    assert np.abs(rounded - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("output", ["logits", "features"])
@pytest.mark.parametrize("name", FULL)
def test_onnx_equals_torch_at_full_size(name: str, output: str, tmp_path: Path, photographs: Path, capsys):
    folder = trained(tmp_path, *FULL[name], photographs, steps=3)
    worst = check_onnx(folder, output, tmp_path / "out", photographs)
    with capsys.disabled():
        print(f"\n{FULL[name][0]:28} {output:9} largest difference {worst:.1e}")
    assert worst < 1e-3


@pytest.mark.slow
def test_onnx_keeps_what_guards_a_division(tmp_path: Path, photographs: Path):
    """T2T's attention divides by sums that can be far below its 1e-8; an optimiser once took that for zero."""
    folder, backbone = made(tmp_path, "t2t")
    first = backbone.model.tokens_to_token.attention1
    first.kqv.weight.data *= 8  # phi falls with the square of the keys' and queries' length
    with torch.inference_mode():
        windows = backbone.model.tokens_to_token.splits[0](torch.rand(2, 3, 64, 64))[0]
        keys, queries, _ = first.kqv(first.norm1(windows)).chunk(3, dim=-1)
        total = first.phi(queries) @ first.phi(keys).sum(1).unsqueeze(-1)
    assert total.min() < 1e-9, "the guard matters here"
    save_model_folder(backbone, folder, classes=CLASSES)
    assert check_onnx(folder, "features", tmp_path / "out", photographs) < 1e-3


def test_onnx_of_a_model_without_classifier(tmp_path: Path, photos: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, _ = made(tmp_path, "vit", num_classes=0)
    run(model=str(folder), to="onnx", out=str(tmp_path / "out"), images=str(photos / "0.jpg"))
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [given.name for given in session.get_outputs()] == ["pooled", "grid"]


# -- other people's libraries, without ours

# Runs in a process of its own. Whoever receives the folders has no frugalvit; there, importing it fails.
ALONE = """
import importlib.util, json, sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "frugalvit":
            raise ModuleNotFoundError("there is no frugalvit here", name=name)

sys.meta_path.insert(0, Nowhere())
import numpy, timm, torch

worst = {}
for folder in sys.argv[1:]:
    images = torch.from_numpy(numpy.load(f"{folder}/../images.npy"))
    expected = torch.from_numpy(numpy.load(f"{folder}/../expected.npy"))
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.inference_mode():
        worst[f"timm {folder}"] = (model(images) - expected).abs().max().item()
    if importlib.util.find_spec("transformers") and folder.endswith("hf"):
        from transformers import AutoConfig, AutoModelForImageClassification

        names = list(AutoConfig.from_pretrained(folder).id2label.values())
        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        with torch.inference_mode():
            worst[f"transformers {folder}"] = (model(pixel_values=images).logits - expected).abs().max().item()
        assert names == json.load(open(f"{folder}/config.json"))["label_names"], names
assert "frugalvit" not in sys.modules
print(json.dumps(worst))
"""


# Windows that divide every map make our Swin timm's; at 128 pixels a ResNet needs no finer stem.
THEIRS = {"swin": {"window_size": 8}, "vit": {}, "resnet": {"img_size": 128}}


@pytest.mark.parametrize("names", [("swin",), pytest.param(("vit", "resnet"), marks=pytest.mark.slow)])
def test_folders_load_where_there_is_no_frugalvit(names: tuple[str, ...], tmp_path: Path, photographs: Path):
    folders = []
    for name in names:
        place = tmp_path / name
        keywords = MODELS[name][1] | THEIRS[name]
        folder = trained(place, MODELS[name][0], keywords, photographs)
        model = fv.load(str(folder))
        images = model.transform([str(path) for path in sorted(photographs.iterdir())])
        with torch.inference_mode():
            np.save(place / "expected.npy", model(images).numpy())
        np.save(place / "images.npy", images.numpy())
        for to in ("timm", "hf"):
            run(model=str(folder), to=to, out=str(place / to), images=str(photographs))
            folders.append(str(place / to))
    done = subprocess.run([sys.executable, "-c", ALONE, *folders], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout.splitlines()[-1])
    others = len(names) if importlib.util.find_spec("transformers") else 0
    assert len(worst) == len(folders) + others and max(worst.values()) < 1e-4, worst


@pytest.mark.parametrize("name", ["swin", pytest.param("t2t", marks=pytest.mark.slow)])
def test_pt2_has_a_free_batch(name: str, tmp_path: Path):
    folder, backbone = made(tmp_path, name)
    result = run(model=str(folder), to="pt2", out=str(tmp_path / "out"), output="features")
    assert result["checked_on"] == "5 images of noise"
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    images = torch.rand(2, 3, *backbone.img_size)
    with torch.inference_mode():
        torch.testing.assert_close(program(images)[0], backbone(images).pooled, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label_names"] == list(CLASSES)


@pytest.mark.slow
def test_a_program_of_logits_returns_them_and_is_no_model_to_load(tmp_path: Path):
    folder, backbone = made(tmp_path, "resnet")
    run(model=str(folder), to="pt2", out=str(tmp_path / "out"))
    images = torch.rand(2, 3, *backbone.img_size)
    logits = torch.export.load(tmp_path / "out" / "model.pt2").module()(images)
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, len(CLASSES))
    with pytest.raises(UserError, match="pt2 program"):
        fv.load(str(tmp_path / "out"))
    (tmp_path / "out" / "model.pt2").rename(tmp_path / "out" / "model.onnx")
    with pytest.raises(UserError, match=r"an ONNX program"):
        run(model=str(tmp_path / "out"), to="timm", out=str(tmp_path / "again"))


def test_the_command(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]):
    folder, _ = made(tmp_path, "resnet")
    words = ["export", str(folder), "--images", str(photos), "--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["config.json", "model.safetensors"]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == 2 and "already exists and is kept" in captured.err
    assert main(["export", str(folder), "--to", "tensorflow"]) == 2


@pytest.mark.parametrize("to", ["timm", "hf"])
def test_folders_load_with_timm(to: str, tmp_path: Path, photos: Path):
    folder, backbone = made(tmp_path, "resnet")
    result = run(model=str(folder), to=to, out=str(tmp_path / "out"), images=str(photos))
    assert result["files"] == (["README.md"] if to == "hf" else []) + ["config.json", "model.safetensors"]
    assert result["max_difference"] < 1e-4
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.rand(2, 3, *backbone.img_size)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), backbone.model(images))


@pytest.mark.parametrize("name", ["list.csv", "list.NDJSON", "list.txt", "list.tsv", "one.JPG"])
def test_an_export_is_checked_on_whatever_data_are_read(name: str, photos: Path):
    path = photos / name
    if name.endswith("JPG"):
        path.write_bytes((photos / "0.jpg").read_bytes())
    else:
        rows = {".csv": "path\n0.jpg\n", ".tsv": "path\n0.jpg\n", ".NDJSON": '{"path": "0.jpg"}', ".txt": "0.jpg\n"}
        path.write_text(rows[path.suffix])
    assert len(verify.read_images(str(path))) == 1
    (photos / "shard.tgz").write_bytes(b"\x1f\x8b" + bytes(2000))
    with pytest.raises(UserError, match="compressed"):
        verify.read_images(str(photos / "shard.tgz"))


def test_a_damaged_summary_is_said(tmp_path: Path):
    folder, _ = made(tmp_path / "run", "resnet")
    (folder.parent / "summary.json").write_text('{"top1": 9')
    with pytest.raises(UserError, match=r"summary\.json is not readable JSON"):
        run(model=str(folder.parent), to="hf", out=str(tmp_path / "out"))


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path, "resnet")
    with pytest.raises(UserError, match="already exists and is kept"):
        run(model=str(folder), out=str(folder))
    for found, said in ((float("nan"), "nan"), (1.1e-3, r"0\.0011 \(allowed: 0\.001\)")):
        monkeypatch.setattr(exporting, "largest_difference", lambda *_, found=found: found)
        with pytest.raises(UserError, match=f"differs from torch by {said}"):
            run(model=str(folder), out=str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    monkeypatch.undo()
    left = tmp_path / "out" / ".out.abcd1234.partial"  # by an export that was killed
    left.mkdir(parents=True)
    (left / ".lock").touch()
    run(model=str(folder), out=str(tmp_path / "out"))
    assert not left.exists()


def test_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path, "resnet")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(model=str(folder), out=".")["files"] == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "model"]


@pytest.mark.parametrize("there", [True, False])
def test_a_finished_export_that_cannot_be_moved_is_kept(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder, _ = made(tmp_path, "resnet")
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def meanwhile(*_: object) -> float:
        out.mkdir(exist_ok=True)
        (out / "config.json").write_text("another's")
        return 0.0

    monkeypatch.setattr(exporting, "largest_difference", meanwhile)
    assert main(["export", str(folder), "--out", str(out)]) == 2
    assert "the export is finished, but cannot be moved" in capsys.readouterr().err
    assert (out / "config.json").read_text() == "another's"
    [kept] = (out if there else tmp_path).glob(".out.*")
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "model.safetensors"]


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path, "resnet", num_classes=0)
    with pytest.raises(UserError, match="no classifier, so no logits"):
        run(model=str(folder), to="pt2", output="logits", out=str(tmp_path / "out"))
    for to in ("timm", "hf"):
        with pytest.raises(UserError, match="--output is for programs"):
            run(model=str(folder), to=to, output="features", out=str(tmp_path / "out"))
    for to in ("timm", "onnx", "pt2"):
        with pytest.raises(UserError, match="--license is written into the model card"):
            run(model=str(folder), to=to, license="mit", out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="nowhere"):
        run(model=str(folder), images=str(tmp_path / "nowhere"), out=str(tmp_path / "out"))
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "frugalvit\[export\]"'):
        run(model=str(folder), to="onnx", out=str(tmp_path / "out"))


def test_differences_are_found():
    images = torch.rand(3, 2)
    network = torch.nn.Linear(2, 2)
    with torch.no_grad():
        assert exporting.largest_difference(network, lambda x: [network(x)], images) == 0
        assert exporting.largest_difference(network, lambda x: [network(x) + 0.25], images) == pytest.approx(0.25)
        assert np.isnan(exporting.largest_difference(network, lambda x: [network(x) * torch.nan], images))
        for wrong in (1, 3):  # a program may be right for all images together, or for one alone
            found = exporting.largest_difference(network, lambda x, n=wrong: [network(x) + (len(x) == n)], images)
            assert found == pytest.approx(1.0)
        network.forward = lambda x: (x, x)
        assert exporting.largest_difference(network, lambda x: [x + 0.5, x], images) == pytest.approx(0.5)
        with pytest.raises(ValueError, match="shorter"):
            exporting.largest_difference(network, lambda x: [x], images)
