"""``frugalvit serve``: one page and one JSON endpoint that answer photos with a classifier.

Everything that comes from the network is bounded: the size of a body, the time to send it, the pixels of an image, the
number of connections. One image is computed at a time. Nothing is written to disk, and no file is served by its name.
"""

import asyncio
import base64
import contextlib
import importlib.util
import io
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from frugalvit.backbones.weights.model_config import find_model_folder
from frugalvit.config.tools import ServeConfig
from frugalvit.data import open_data
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import decode, read_header
from frugalvit.errors import UserError
from frugalvit.export.command import read_data, read_settings
from frugalvit.export.inference_model import ReadyModel, load
from frugalvit.features import Features
from frugalvit.report.html import render
from frugalvit.runs import layout
from frugalvit.tasks.classification.predict import answer_features, load_classifier
from frugalvit.utils import console, palette
from frugalvit.utils.files import read_json
from frugalvit.utils.tables import CommandResult

if TYPE_CHECKING:
    from starlette.applications import Starlette

MAX_MEGAPIXELS = 64.0
"""Larger photos are refused: decoding one takes up to 20 bytes a pixel."""
MAX_CONNECTIONS = 16
SECONDS = 30  # to send a photo
_NEAREST = 6
_SIDE = 160  # pixels of a thumbnail

_LEAD = "Drop a photo here, or choose one. It stays on this machine: the model answers, and nothing is stored."


def serve(config: ServeConfig) -> CommandResult:
    """Answer photos until Ctrl-C."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'serve needs {" and ".join(missing)}: pip install "frugalvit[serve]"')
    import uvicorn

    app = make_app(config)
    try:
        listener = socket.create_server((config.host, config.port))
    except OSError as error:
        raise UserError(
            f"--host {config.host} --port {config.port}: {error.strerror or error}. Try --port 0."
        ) from None
    with listener:
        console.info(f"open http://{config.host}:{listener.getsockname()[1]} (Ctrl-C stops)")
        options: dict[str, Any] = {"limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": 5}
        uvicorn.Server(uvicorn.Config(app, log_level="warning", **options)).run(sockets=[listener])
    return CommandResult({"model": config.model, "host": config.host, "port": config.port})


class Answerer:
    """A classifier with the training images that answers are compared with."""

    def __init__(self, config: ServeConfig) -> None:
        self.model, self.config = load(config.model, config.device), config
        load_classifier(config.model, "cpu")  # for its errors
        calibration = self.model.calibration
        self.coverage = None if calibration is None else config.coverage
        self.gallery = None if calibration is None else calibration.gallery
        if calibration is None:
            console.warning(f"{config.model} is not calibrated: do not read its numbers as probabilities")
        folder = find_model_folder(config.model) or Path(config.model)
        self.training = read_json(folder.parent / layout.TRAINING_IMAGES, list) or []
        if self.gallery is None or len(self.training) != len(self.gallery):
            self.training = []
        self.pictures = self._open_pictures(str(folder.parent)) if self.training else {}

    def _open_pictures(self, run: str) -> dict[str, tuple[ImageDataset, int]]:
        """Return the images of the run's data by name."""
        settings = read_settings(run)
        data, root = settings.get("data") or read_data(run), self.config.root or settings.get("root")
        try:
            splits = open_data(str(data), split="given", root=root, classes=settings.get("classes")).splits
        except UserError as error:
            console.warning(f"the nearest training images have no pictures: {error}")
            return {}
        parts = [splits[name] for name in ("test", "val", "train") if name in splits]  # of equal names train counts
        return {key: (part, row) for part in parts for row, key in enumerate(part.keys)}

    def answer(self, content: bytes) -> dict[str, Any]:
        """Answer an encoded image. Raises ``UserError`` if it is not an image, or too large."""
        header = read_header(content, name := "the photo")
        if (megapixels := header.width * header.height / 1e6) > MAX_MEGAPIXELS:
            raise UserError(f"the photo has {megapixels:,.0f} megapixels, more than {MAX_MEGAPIXELS:g}.")
        pixels = self.model.model.transform.crop(decode(content, name))
        with torch.inference_mode():
            images = self.model.transform(pixels)
            features = self.model.features(images)
            answer = answer_features(self.model.model, features.pooled, top=self.config.top, coverage=self.coverage)[0]
            weights, meaning = _token_map(self.model, images, features)
        return asdict(answer) | {
            "coverage": self.coverage,
            "nearest": self._nearest(features.pooled[0].cpu().float()),
            "map": {"shows": meaning, "image": _to_data_uri(_draw_map(pixels, weights.cpu()))},
        }

    def _nearest(self, pooled: Tensor) -> list[dict[str, Any]]:
        """Return the nearest training images: name, class, cosine, and a picture if it can be read."""
        if not self.training or self.gallery is None:
            return []
        found = []
        best = (F.normalize(pooled, dim=0) @ self.gallery.T).topk(min(_NEAREST, len(self.training)))
        for cosine, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            image, picture = self.training[row], None
            if image["key"] in self.pictures:
                examples, index = self.pictures[image["key"]]
                with contextlib.suppress(UserError):  # the file is gone
                    picture = _to_data_uri(examples.read(index, at_least=(_SIDE, _SIDE)))
            found.append({"name": image["key"], "class": image["class"], "similarity": cosine, "image": picture})
        return found


def _token_map(model: ReadyModel, images: Tensor, features: Features) -> tuple[Tensor, str]:
    """Return a number for each region (h, w), and what it is: the class token's attention, else a similarity."""
    size = features.grid.shape[-2:]
    with contextlib.suppress(UserError):  # a network without attention
        attention = model.backbone.attention(images)[0].mean(0)
        if (extra := len(attention) - size.numel()) > 0:
            return attention[0, extra:].view(size), "attention of the class token in the last block"
    tokens = features.grid[0].flatten(1)
    centre = tokens.mean(1, keepdim=True) if len(tokens) != features.pooled.shape[1] else features.pooled.T
    return F.cosine_similarity(tokens, centre, dim=0).view(size), "similarity of each region with the photo's feature"


def _draw_map(pixels: np.ndarray, weights: Tensor) -> np.ndarray:
    """Draw numbers (h, w) as heat over pixels (H, W, 3)."""
    share = (weights - weights.min()) / (weights.max() - weights.min()).clamp_min(1e-12)
    colours = np.frombuffer(palette.heat_bytes(), np.uint8).reshape(-1, 3)
    heat = Image.fromarray(colours[(255 * share.float()).round().byte().numpy()])
    photo = Image.fromarray(pixels)
    return np.asarray(Image.blend(photo, heat.resize(photo.size, Image.Resampling.BICUBIC), 0.55))


def _to_data_uri(pixels: np.ndarray) -> str:
    picture, buffer = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((2 * _SIDE, 2 * _SIDE))
    picture.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def make_app(config: ServeConfig) -> "Starlette":
    """Build the application: GET / is the page, POST /predict takes the bytes of an image file and returns JSON."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    answerer, limit, turn = Answerer(config), int(config.max_mb * 1e6), asyncio.Semaphore(1)
    headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
    page = _make_page(answerer.model, limit)

    async def read_body(request: Request) -> bytes:
        too_large = HTTPException(413, f"the file is larger than {config.max_mb:g} MB (--max-mb)")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)

    async def predict(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(403, "another web site sent this photo")
        try:
            async with asyncio.timeout(SECONDS):
                body = await read_body(request)
        except TimeoutError:
            raise HTTPException(408, f"the photo took longer than {SECONDS} seconds to arrive") from None
        try:
            async with turn:
                return JSONResponse(await run_in_threadpool(answerer.answer, body), headers=headers)
        except UserError as error:
            raise HTTPException(400, str(error)) from None

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def explain(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, headers=headers)

    local = ["127.0.0.1", "localhost"]  # no other name: against DNS rebinding
    hosts = local if config.host in local else ["*"]
    return Starlette(
        routes=[Route("/", show), Route("/predict", predict, methods=["POST"])],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={HTTPException: explain},
    )


def _make_page(model: ReadyModel, limit: int) -> str:
    content = (
        f'<section id="photo" data-limit="{limit}"><label id="drop" class="drop">{_LEAD}<input type="file" id="file" '
        'accept="image/*"></label><p id="state" class="lead" aria-live="polite"></p></section><div id="answer"></div>'
    )
    about = f"{model.backbone.name} · {model.backbone.num_classes} classes"
    return render(model.name, about, content, ("page.js", "serve.js"), "'self'")
