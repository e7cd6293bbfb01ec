"""``frugalvit serve``: the page in a browser, the JSON endpoint, and hostile requests."""

import base64
import http.client
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import frugalvit as fv
from frugalvit.cli import serve as serving
from frugalvit.config.train import ServeConfig
from frugalvit.errors import UserError
from helpers.tiny_runs import write_images

uvicorn = pytest.importorskip("uvicorn", reason="pip install frugalvit[serve]")
pytest.importorskip("starlette", reason="pip install frugalvit[serve]")
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved probe with a class name that is HTML."""
    folder = tmp_path_factory.mktemp("serve")
    data = write_images(folder / "photos", train=20, val=8, classes=("cat", EVIL))
    fv.run("probe logistic", "vit_tiny_patch16_224", str(data), img_size=32, device="cpu", save=str(folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "MAX_BYTES", 500_000)
        yield from listen(serving.make_app(ServeConfig(model=str(run), device="cpu")))


def listen(app: Any) -> Iterator[tuple[str, int]]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield server.servers[0].sockets[0].getsockname()[:2]
    server.should_exit = True
    thread.join(10)


def ask(address: tuple[str, int], body: Any, path: str = "/predict", method: str = "POST", **headers: str) -> Any:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, response.read(), response.headers


def test_the_endpoint_answers_as_the_model(address: tuple[str, int], run: Path) -> None:
    photo = run.parent / "photos" / "val" / "cat" / "0.png"
    status, body, _ = ask(address, photo.read_bytes())
    found = json.loads(body)
    expected = fv.load(run).answer(photo, coverage=0.9)[0]
    assert status == 200 and found["set"] == list(expected["set"])
    assert [guess["probability"] for guess in found["predictions"]] == pytest.approx(
        [guess["probability"] for guess in expected["predictions"]], abs=1e-5
    )
    assert found["distance"] == pytest.approx(expected["distance"], abs=1e-5)
    assert found["unlike_training"] is expected["unlike_training"]
    assert found["map"]["shows"].startswith("attention of the class token")
    for picture in (found["map"]["image"], *(image["image"] for image in found["nearest"])):
        Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))).load()


def test_nearest_images_equal_the_loop(address: tuple[str, int], run: Path) -> None:
    model, train = fv.load(run), run.parent / "photos" / "train"
    photo = run.parent / "photos" / "val" / EVIL / "1.png"
    files = sorted(train.rglob("*.png"))
    with torch.inference_mode():
        pooled = model.features(model.transform([photo, *files])).pooled
    cosine = torch.cosine_similarity(pooled[:1], pooled[1:])
    best = [str(files[row]) for row in cosine.argsort(descending=True)[:6]]
    found = json.loads(ask(address, photo.read_bytes())[1])["nearest"]
    assert [image["file"] for image in found] == best
    assert [float(image["score"]) for image in found] == pytest.approx(
        cosine.sort(descending=True).values[:6], abs=6e-3
    )
    assert all(Path(image["file"]).parent.name == image["label"] for image in found)


def bomb() -> bytes:
    """A PNG of 30,000 x 30,000 pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def large() -> bytes:
    """A PNG of 100 megapixels, below the limit of the decoder but above that of the server."""
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, "PNG")
    return buffer.getvalue()


CASES: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "not an image": (b"GIF89a; DROP TABLE", {}, 400, "not an image"),
    "nothing": (b"", {}, 400, "empty"),
    "web page": (b"<html><script>alert(1)</script>", {}, 400, "not an image"),
    "bomb": (bomb(), {}, 400, "megapixels"),
    "many pixels": (large(), {}, 400, "100 megapixels"),
    "large body": (bytes(500_001), {}, 413, "0.5 MB"),
    "large body in chunks": ((bytes(100_000) for _ in range(6)), {}, 413, "0.5 MB"),
    "other site": (b"", {"Origin": "https://evil.example"}, 403, "another web site"),
    "other host": (b"", {"Host": "evil.example"}, 400, "Invalid host"),
    "path of a file": (None, {"path": "/../../../../etc/passwd", "method": "GET"}, 404, ""),
    "encoded path": (None, {"path": "/%2e%2e/%2e%2e/etc/passwd", "method": "GET"}, 404, ""),
    "other method": (b"", {"method": "PUT"}, 405, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_requests_are_refused(case: str, address: tuple[str, int]) -> None:
    body, options, status, text = CASES[case]
    found, answer, _ = ask(address, body, **options)
    assert found == status and text in answer.decode() and b"Traceback" not in answer


def test_the_page_in_a_browser(browser: Any, address: tuple[str, int], run: Path) -> None:
    """Drop a photo and a text file on the page."""
    browser.open(f"http://{address[0]}:{address[1]}/")
    drop = """(() => {{ const bytes = Uint8Array.from(atob("{}"), c => c.charCodeAt(0)), data = new DataTransfer();
        data.items.add(new File([bytes], "../../{}.png"));
        document.dispatchEvent(new DragEvent("drop", {{dataTransfer: data, bubbles: true, cancelable: true}})); }})()"""
    photo = run.parent / "photos" / "val" / EVIL / "0.png"
    browser.value(drop.format(base64.b64encode(photo.read_bytes()).decode(), "evil"))
    browser.wait_for("document.querySelector('#nearest img') !== null")
    assert EVIL in browser.value("document.getElementById('verdict').innerText")
    assert "right class is among" in browser.value("document.getElementById('set').textContent")
    assert browser.value("document.querySelectorAll('#nearest figure').length") == 6
    browser.wait_for("[...document.images].every(image => image.naturalWidth > 0)")
    assert browser.value("[...document.images].every(image => image.src.startsWith('data:'))"), "no image of the name"
    assert browser.complaints() == []
    assert [url.rpartition("/")[2] for url in browser.requests()] == ["answer"]
    noise = io.BytesIO()  # coloured noise is unlike the grey training images
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (4, 40, 3), dtype=np.uint8)).save(noise, "PNG")
    browser.value(drop.format(base64.b64encode(noise.getvalue()).decode(), "noise"))
    browser.wait_for("document.getElementById('unlike') !== null")
    browser.value(drop.format(base64.b64encode(b"no image").decode(), "text"))
    browser.wait_for("document.getElementById('state').textContent.startsWith('Refused: ')")
    assert browser.value("document.getElementById('answer').childElementCount") == 0


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"value": 33.154}, "The answer is 33.15."),
        ({"labels": ["cat", "pet"]}, "Labels above their thresholds: cat, pet."),
        ({"labels": []}, "thresholds: none."),
        ({}, "not calibrated"),
        ({"set": [], "coverage": 0.9}, "No class is sure enough."),
        ({"set": ["cat"], "coverage": 0.9}, "In 90 % of cases the right class is among: cat."),
    ],
)
def test_every_kind_of_answer_is_drawn(facts: dict[str, Any], sentence: str) -> None:
    map_ = {"shows": "similarity", "image": "data:,"}
    found = {"set": None, "unlike_training": None, "coverage": None, "nearest": [], "map": map_} | facts
    assert sentence in serving.draw_answer(found)


def test_a_small_photo_has_a_large_map() -> None:
    drawn = serving._draw_map(np.zeros((32, 64, 3), np.uint8), torch.rand(2, 4))
    assert Image.open(io.BytesIO(base64.b64decode(drawn.partition(",")[2]))).size == (320, 160)


def test_models_of_other_images_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "cells" / name).mkdir(parents=True)
        for number in range(4):
            np.save(tmp_path / "cells" / name / f"{number}.npy", np.full((16, 16, 5), number, np.float32))
    options = {"backbone": "swin_nano", "img_size": 16, "steps": 1, "batch": 2, "device": "cpu", "report": False}
    fv.train(str(tmp_path / "cells"), out=str(tmp_path / "run"), **options)
    with pytest.raises(UserError, match="frugalvit predict"):
        serving.make_app(ServeConfig(model=str(tmp_path / "run"), device="cpu"))


def test_the_page_escapes_names_and_allows_only_its_scripts(run: Path) -> None:
    model = fv.load(run)
    model.name = "</title><script>alert(1)</script>"
    page = serving.make_page(model)
    assert "<script>alert" not in page and "script-src 'sha256-" in page and "connect-src 'self'" in page
