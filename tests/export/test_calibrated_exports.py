"""Exports of calibrated models: the same probabilities and distances, int8 with its loss, and the upload to the hub."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

import frugalvit as fv
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.export import int8
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
        ours = {guess["class"]: guess["probability"] for guess in answer.predictions}
        assert [ours[name] for name in names] == pytest.approx(probabilities[row].tolist(), abs=1e-4)
        inside = {name for name, p in zip(names, probabilities[row], strict=True) if p >= stored["set_probability"][89]}
        assert inside == set(answer.set or ())
    assert distance.tolist() == pytest.approx([answer.distance for answer in answers], abs=1e-4)
    small = onnxruntime.InferenceSession(str(out / "model_int8.onnx"))
    labels = np.array([names.index(photo.parent.name) for photo in photos])
    for name, session_ in (("top1", session), ("top1_int8", small)):
        right = [session_.run(["logits"], {"images": image[None].numpy()})[0].argmax() for image in images] == labels
        assert loss[name] == pytest.approx(100 * right.mean())
    assert loss["scored_images"] == 24 and loss["mb_int8"] < 0.4 * loss["mb"]
    assert "instead of" in int8.describe_int8(loss)


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
        fv.load(run).answer([], coverage=0.955)


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that an upload of small files uses."""

    files: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _reply(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer hf_right"
        self._reply(
            {"name": "me", "siblings": [], "id": "me/flowers"} if known else {"error": "no"}, 200 if known else 401
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}/me/flowers"
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            self._reply({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
            return
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    type(self).files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self._reply({"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("RecordingHub", (Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    server.server_close()


def test_the_folder_arrives_on_the_hub(
    hub: type[Hub], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    result = fv.export(run, to="hf", out=str(tmp_path / "hf"), push="me/flowers", private=True, quiet=True)
    assert result["pushed"].endswith("/me/flowers")
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize(
    ("token", "name", "text"),
    [(None, "me/flowers", "HF_TOKEN"), ("hf_wrong", "me/flowers", "token"), ("hf_right", "a/b/c", "a/b/c")],
)
def test_pushes_that_cannot_work_fail_before_the_export(
    token: str | None, name: str, text: str, hub: type[Hub], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setenv("HF_TOKEN", token or "")
    with pytest.raises(UserError, match=f"--push {name}.*{text}"):
        fv.export(run, to="hf", out=str(tmp_path / "hf"), push=name, quiet=True)
    assert not (tmp_path / "hf").exists() and not hub.files
