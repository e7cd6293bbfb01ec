"""``frugalvit serve``: one page and one JSON endpoint that answer photos with a classifier.

Everything that comes from the network is bounded: the size of a body, the time to send it, the pixels of an image, the
number of connections. One image is computed at a time. Nothing is written to disk, and no file is served by its name.
"""

import asyncio
import contextlib
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor

from frugalvit.backbones.weights.model_config import find_model_folder
from frugalvit.config.train import ServeConfig
from frugalvit.data.decode import PHOTO, decode, read_header
from frugalvit.errors import UserError
from frugalvit.export.inference_model import ReadyModel
from frugalvit.features import Features
from frugalvit.report.html import render
from frugalvit.report.sections import bar_table, gallery
from frugalvit.runs import layout
from frugalvit.tasks.classification.predict import answer_features, check_coverage, load_classifier
from frugalvit.utils import console, palette
from frugalvit.utils.files import read_json
from frugalvit.utils.tables import CommandResult
from frugalvit.visualization.correspondence import cosines, global_feature
from frugalvit.visualization.explorer_data import data_uri

MAX_BYTES = 32_000_000
MAX_MEGAPIXELS = 64.0
"""Larger photos are refused: decoding one takes up to 20 bytes a pixel."""
MAX_CONNECTIONS = 16
SECONDS = 30  # to send a photo
_NEAREST = 6
_SIDE = 320  # pixels of a picture on the page

_NEAREST_LEAD = '<p class="lead">The number is the similarity: 1 means that the network sees no difference.</p>'
_LEAD = "Drop a photo here, or choose one. The model answers. The server does not store the photo."


def serve(config: ServeConfig) -> CommandResult:
    """Answer photos until Ctrl-C."""
    try:
        import uvicorn

        app = make_app(config)
    except ImportError:
        raise UserError('serve needs starlette and uvicorn: pip install "frugalvit[serve]"') from None
    limits: dict[str, Any] = {"limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": 5}
    uvicorn.run(app, host=config.host, port=config.port, access_log=False, **limits)  # prints the address
    return CommandResult({"model": config.model, "host": config.host, "port": config.port})


class Answerer:
    """A classifier with the training images that answers are compared with."""

    def __init__(self, config: ServeConfig) -> None:
        self.classifier, _ = load_classifier(config.model, config.device)
        self.model, self.coverage = ReadyModel(self.classifier).eval(), config.coverage
        if self.model.pixels != PHOTO:
            raise UserError(f"serve answers photos, but {config.model} reads other images. Use 'frugalvit predict'.")
        self.gallery, self.training = None, []
        if self.model.calibration is None:
            self.coverage = None
            console.warning(f"{config.model} is not calibrated: do not read its percentages as probabilities")
            return
        check_coverage(self.classifier, self.coverage)
        run = (find_model_folder(config.model) or Path(config.model)).parent
        training = read_json(run / layout.TRAINING_IMAGES, list) or []
        gallery = self.model.calibration.gallery
        if gallery is not None and len(training) == len(gallery):
            self.gallery, self.training = gallery, training

    def answer(self, content: bytes) -> dict[str, Any]:
        """Answer an encoded image. Raises ``UserError`` if it is not an image, or too large."""
        header = read_header(content, name := "the photo")
        if (megapixels := header.width * header.height / 1e6) > MAX_MEGAPIXELS:
            raise UserError(f"the photo has {megapixels:,.0f} megapixels, more than {MAX_MEGAPIXELS:g}.")
        pixels = self.classifier.transform.crop(decode(content, name))
        with torch.inference_mode():
            images = self.model.transform(pixels)
            features = self.model.features(images)
            answer = answer_features(self.classifier, features.pooled, coverage=self.coverage)[0]
            weights, meaning = _token_map(self.model, images, features)
        return answer | {
            "coverage": self.coverage,
            "nearest": self._nearest(features.pooled[0].cpu().float()),
            "map": {"shows": meaning, "image": _draw_map(pixels, weights.cpu().float())},
        }

    def _nearest(self, pooled: Tensor) -> list[dict[str, Any]]:
        """Return the nearest training images: file, class, cosine, and a picture if the file can be read."""
        if self.gallery is None:
            return []
        nearest = []
        best = (F.normalize(pooled, dim=0) @ self.gallery.T).topk(min(_NEAREST, len(self.gallery)))
        for cosine, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            picture, file = None, self.training[row]["file"]
            with contextlib.suppress(UserError):  # it is gone, or inside an archive
                picture = data_uri(_shrink(decode(file, at_least=(_SIDE, _SIDE))))
            nearest.append(self.training[row] | {"score": f"{cosine:.2f}", "image": picture})
        return nearest


def _token_map(model: ReadyModel, images: Tensor, features: Features) -> tuple[Tensor, str]:
    """Return a number for each region (h, w), and what it is: the class token's attention, else a similarity."""
    size = features.grid.shape[-2:]
    with contextlib.suppress(UserError):  # a network without attention
        attention = model.backbone.attention(images)[0].mean(0)
        if (extra := len(attention) - size.numel()) > 0:
            return attention[0, extra:].view(size), "attention of the class token in the last block"
    similarity = cosines(features.grid, global_feature(features)[:, :, None, None])
    return similarity.view(size), "similarity of each region to the photo as a whole"


def _draw_map(pixels: np.ndarray, weights: Tensor) -> str:
    """Draw numbers (h, w) as heat over pixels (H, W, 3)."""
    photo = _shrink(pixels)  # small models see small photos
    larger = max(1.0, _SIDE / max(photo.shape[1:]))
    photo = F.interpolate(photo[None], scale_factor=larger, mode="bilinear")[0]
    share = (weights - weights.min()) / (weights.max() - weights.min()).clamp_min(1e-12)
    colours = torch.tensor(list(palette.heat_bytes())).view(-1, 3) / 255
    heat = colours[(255 * share).round().long()].permute(2, 0, 1)[None]
    return data_uri(0.45 * photo + 0.55 * F.interpolate(heat, photo.shape[1:], mode="bicubic")[0])


def _shrink(pixels: np.ndarray) -> Tensor:
    """Return pixels (H, W, 3) as (3, h, w) in [0, 1], small enough for the page."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((_SIDE, _SIDE))
    return pil_to_tensor(picture.convert("RGB")) / 255


def make_app(config: ServeConfig) -> Any:
    """Build Starlette's application: GET / is the page; an image posted to /predict gives JSON, to /answer HTML."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    answerer, turn = Answerer(config), asyncio.Semaphore(1)
    headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
    page = make_page(answerer.model)

    async def answer(request: Request) -> Response:
        origin, body = request.headers.get("origin"), bytearray()
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(403, "another web site sent this photo")
        try:
            async with asyncio.timeout(SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise HTTPException(413, f"the file is larger than {MAX_BYTES / 1e6:g} MB")
            async with turn:
                found = await run_in_threadpool(answerer.answer, bytes(body))
        except TimeoutError:
            raise HTTPException(408, f"the photo took longer than {SECONDS} seconds to arrive") from None
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        if request.url.path == "/answer":
            return HTMLResponse(draw_answer(found), headers=headers)
        return JSONResponse(found, headers=headers)

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def explain(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, headers=headers)

    local = ["127.0.0.1", "localhost"]  # no other name: against DNS rebinding
    return Starlette(
        routes=[Route("/", show), *(Route(path, answer, methods=["POST"]) for path in ("/predict", "/answer"))],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=local if config.host in local else ["*"])],
        exception_handlers={HTTPException: explain},
    )


def make_page(model: ReadyModel) -> str:
    """Build the page, which shows the answers of /answer."""
    content = (
        f'<section id="photo" data-limit="{MAX_BYTES}"><label class="drop">{_LEAD}<input type="file" id="file" '
        'accept="image/*"></label><p id="state" class="lead" aria-live="polite"></p></section><div id="answer"></div>'
    )
    about = f"{model.backbone.name} · {model.backbone.num_classes} classes"
    return render(model.name, about, content, ("page.js", "serve.js"), "'self'")


def draw_answer(found: dict[str, Any]) -> str:
    bars = bar_table((guess["class"], guess["probability"], "") for guess in found.get("predictions", ()))
    unlike = '<ul class="alarms" id="unlike"><li>This photo is unlike the training images: do not trust it.</li></ul>'
    unlike = unlike if found["unlike_training"] else ""
    seen = ({**image, "predicted": image["label"]} for image in found["nearest"] if image["image"] is not None)
    pictures = gallery(seen, "")
    nearest = f'<section id="nearest"><h2>Nearest training images</h2>{_NEAREST_LEAD}{pictures}</section>'
    return (
        f'<section id="verdict"><h2>Answer</h2>{bars}<p id="set">{escape(_conclude(found))}</p>{unlike}</section>'
        f'<section id="map"><h2>What it looks at</h2><p class="lead">The {found["map"]["shows"]}; yellow is high.</p>'
        f'<img src="{found["map"]["image"]}" alt="the photo with heat"></section>' + (nearest if pictures else "")
    )


def _conclude(found: dict[str, Any]) -> str:
    """Return the sentence below the bars: the number, the labels, or the set of classes."""
    warning = "The model is not calibrated: do not read these percentages as probabilities."
    if "value" in found:
        return f"The answer is {found['value']:.4g}."
    if "labels" in found:
        return f"Labels above their thresholds: {', '.join(found['labels']) or 'none'}. {warning}"
    if found["set"] is None:
        return warning
    if not found["set"]:
        return "No class is sure enough. Ask a person."
    return f"In {100 * found['coverage']:g} % of cases the right class is among: {', '.join(found['set'])}."
