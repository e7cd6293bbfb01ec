"""Exports of calibrated models: the same probabilities and distances, int8 with its loss, and the upload to the hub."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

import frugalvit as fv
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.export import hub
from helpers.tiny_runs import write_images


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    data = write_images(folder / "photos", train=20, val=8, classes=("cat", "dog", "emu"))
    fv.run("probe logistic", "test_vit", str(data), img_size=32, device="cpu", save=str(folder / "run"))
    return folder / "run"


def test_onnx_and_int8_answer_as_torch(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "onnx"
    assert cli.main(["export", str(run), "--to", "onnx", "--int8", "--out", str(out), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["int8"]
    model, photos = fv.load(run), sorted((run.parent / "photos" / "val").rglob("*.png"))
    images = model.transform(photos)
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    logits, probabilities, distance = session.run(["logits", "probabilities", "distance"], {"images": images.numpy()})
    answers = model.answer(photos, top=3)
    names, stored = model.classes, json.loads((out / "config.json").read_text())["frugalvit"]["meta"]["calibration"]
    assert names is not None
    tempered = (torch.from_numpy(logits) / stored["temperature"]).softmax(1)
    assert np.allclose(probabilities, tempered, atol=1e-5)
    for row, answer in enumerate(answers):
        ours = {guess["class"]: guess["probability"] for guess in answer["predictions"]}
        assert [ours[name] for name in names] == pytest.approx(probabilities[row].tolist(), abs=1e-4)
        inside = {name for name, p in zip(names, probabilities[row], strict=True) if p >= stored["set_probability"][89]}
        assert inside == set(answer["set"])
    assert distance.tolist() == pytest.approx([answer["distance"] for answer in answers], abs=1e-4)
    small = onnxruntime.InferenceSession(str(out / "model_int8.onnx"))
    labels = np.array([names.index(photo.parent.name) for photo in photos])
    for name, session_ in (("top1", session), ("top1_int8", small)):
        right = [session_.run(["logits"], {"images": image[None].numpy()})[0].argmax() for image in images] == labels
        assert loss[name] == pytest.approx(100 * right.mean())
    assert loss["scored_images"] == 24
    assert (out / "model_int8.onnx").stat().st_size < 0.4 * (out / "model.onnx").stat().st_size


def test_a_timm_folder_is_calibrated(run: Path, tmp_path: Path) -> None:
    fv.export(run, to="hf", out=str(tmp_path / "hf"), quiet=True)
    photo = next((run.parent / "photos" / "val").rglob("*.png"))
    exported, model = fv.load(tmp_path / "hf"), fv.load(run)
    assert exported.answer(photo) == model.answer(photo)
    assert model.calibration is not None
    assert f"logits / {model.calibration.temperature:.6g}" in (tmp_path / "hf" / "README.md").read_text()
    assert not list((tmp_path / "hf").glob("training_images*")), "names of training images stay in the run"


@pytest.mark.parametrize("options", [{"to": "timm"}, {"to": "onnx", "output": "features"}])
def test_int8_needs_an_onnx_classifier(options: dict[str, Any], run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--int8"):
        fv.export(run, int8=True, out=str(tmp_path / "out"), quiet=True, **options)
    with pytest.raises(UserError, match="coverage"):
        fv.load(run).answer(np.zeros((9, 9, 3), np.uint8), coverage=1)


def test_push_uploads_the_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Hub(huggingface_hub.HfApi):
        def whoami(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"name": "me"}

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            calls.append((repo_id, options["private"]))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, **options: Any) -> Any:  # type: ignore[override]
            calls.append((options["repo_id"], {path.name for path in Path(options["folder_path"]).iterdir()}))

    monkeypatch.setattr(hub, "HfApi", Hub)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_right")
    result = fv.export(run, to="hf", out=str(tmp_path / "hf"), push="me/flowers", private=True, quiet=True)
    assert result["pushed"] == "https://huggingface.co/me/flowers"
    assert calls == [("me/flowers", True), ("me/flowers", {path.name for path in (tmp_path / "hf").iterdir()})]


@pytest.mark.parametrize(
    ("token", "name", "text"),
    [(None, "me/flowers", "HF_TOKEN"), ("hf_wrong", "me/flowers", "network"), ("hf_right", "a/b/c", "a/b/c")],
)
def test_pushes_that_cannot_work_fail_before_the_export(
    token: str | None, name: str, text: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: token)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(UserError, match=f"--push {name}.*{text}"):
        fv.export(run, to="hf", out=str(tmp_path / "hf"), push=name, quiet=True)
    assert not (tmp_path / "hf").exists()
