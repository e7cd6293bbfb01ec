"""Sets of multi-channel TIFF, 16-bit PNG and DICOM from the data to an exported model."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from timm.models import adapt_input_conv

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.data import open_data
from frugalvit.errors import UserError
from helpers.tiny_runs import PRETRAIN, SWIN, TRAIN
from helpers.wide_images import RANGES, write_set

SHORT: dict[str, Any] = {**TRAIN, "steps": 4, "report": True, "ema": 0.5, "localization": {"weight": 0.0}}


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "model" / "config.json").read_text())


@pytest.fixture(scope="module", params=RANGES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    data, run = write_set(folder / "set", request.param), folder / "run"
    assert len(fv.run("data", data)["channels"]) == 1 and fv.train(data, out=run, quiet=True, **SHORT)["steps"] == 4
    return request.param, data, run


def test_runs_keep_and_show_the_channels(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    kind, data, run = trained
    mean, std, _ = open_data(data).splits["train"].measure_statistics()
    settings, stored = config_of(run)["pretrained_cfg"], config_of(run)["frugalvit"]["keywords"]
    assert settings["input_size"] == [RANGES[kind][0], 16, 16] and (settings["mean"], settings["std"]) == (mean, std)
    assert stored["pixel_type"] == "float32"
    page, file = (run / "report.html").read_text(), str(next(data.rglob("0.*")))
    assert 'class="explorer"' in page and "data:image/" in page and "grey)" not in page
    assert fv.run("look explore", run, [file], out=tmp_path / "page.html")["images"] == 2
    assert fv.embed(run, data, neighbours=file, picture=tmp_path / "near.png")["neighbours"][0]["cosine"] > 0


@pytest.mark.parametrize("to", ["timm", pytest.param("onnx", marks=pytest.mark.slow)])
def test_every_reader_gives_the_same_answers(to: str, trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    """predict, eval, fv.load, an export with its own library, and its preprocessing.py, which needs no frugalvit."""
    _, data, run = trained
    files = sorted(str(path) for path in data.rglob("*.*"))
    fv.export(run, to=to, out=tmp_path)
    preprocess = runpy.run_path(str(tmp_path / "preprocessing.py"))["preprocess"]
    config = json.loads((tmp_path / "config.json").read_text())
    inputs = torch.from_numpy(np.concatenate([preprocess(path, config) for path in files]))
    model = fv.load(run)
    torch.testing.assert_close(inputs, model.transform(files), rtol=1e-4, atol=1e-4)
    if to == "onnx":
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
        assert json.loads(session.get_modelmeta().custom_metadata_map["mean"]) == config["pretrained_cfg"]["mean"]
        logits = torch.from_numpy(session.run(None, {"images": inputs.numpy()})[0])
    else:
        logits = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(inputs).detach()
    right = 0
    predictions = fv.predict(run, files, top=2)["predictions"]
    for row, path, expected, loaded in zip(predictions, files, logits.softmax(1), model.predict(files), strict=True):
        answers = {guess["class"]: guess["probability"] for guess in row["predictions"]}
        assert answers == pytest.approx(dict(zip(model.classes or (), expected.tolist(), strict=True)), abs=1e-4)
        assert dict(loaded) == pytest.approx(answers, abs=1e-4)
        right += max(answers, key=answers.__getitem__) == Path(path).parent.name
    assert fv.evaluate(run, data, split="all")["top1"] == pytest.approx(100 * right / len(files))


def test_pretraining_and_fine_tuning_keep_the_statistics(tmp_path: Path) -> None:
    data = write_set(tmp_path / "set", "tiff", 6)
    fv.pretrain(data, out=tmp_path / "start", quiet=True, **{**PRETRAIN, "steps": 2})
    short: dict[str, Any] = {"init": tmp_path / "start", "steps": 1, "batch": 4, "report": False, "quiet": True}
    fv.train(data, labels=4, out=tmp_path / "run", **short)
    means = [config_of(tmp_path / run)["pretrained_cfg"]["mean"] for run in ("start", "run")]
    assert means[0] == means[1] == open_data(data).splits["train"].measure_statistics()[0]
    with pytest.raises(UserError, match="network takes 5 channels of raw values"):
        fv.train(write_set(tmp_path / "grey", "png", 4), out=tmp_path / "no", **short)


def test_rgb_weights_are_adapted_as_timm_does(tmp_path: Path) -> None:
    photos, data = fv.create_backbone("swin_nano", 16, **SWIN), write_set(tmp_path / "set", "tiff", 4)
    save_model_folder(photos, tmp_path / "photos")
    fv.train(data, init=tmp_path / "photos", out=tmp_path / "run", quiet=True, lr=1e-12, steps=1, batch=4, report=False)
    models = photos.model, fv.load(tmp_path / "run").backbone.model
    original, adapted = (model.state_dict()["patch_embed.proj.weight"] for model in models)
    torch.testing.assert_close(adapted, adapt_input_conv(5, original), rtol=0, atol=1e-6)
