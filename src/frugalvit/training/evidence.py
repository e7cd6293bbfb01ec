"""What a person wants to see of a finished run besides numbers: the worst mistakes, and what augmentation does."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.data.cache import ImageStore
from frugalvit.data.loader import Batches, eval_batches
from frugalvit.training.runs import Run
from frugalvit.training.setup import EvalSet


@torch.inference_mode()
def worst_mistakes(
    backbone: Backbone, dataset: EvalSet, classes: tuple[str, ...], count: int = 24
) -> list[dict[str, Any]]:
    """The wrong answers the model was surest of, as small pictures with both names."""
    backbone.eval()
    found: list[tuple[float, int, int, int]] = []
    for images, labels, index in eval_batches(dataset.store, dataset.transform, dataset.batch):
        assert labels is not None
        chances = backbone.classify(backbone(images).pooled).float().softmax(1)
        sure, guess = chances.max(1)
        wrong = (guess != labels).nonzero()[:, 0]
        rows = zip(
            sure[wrong].tolist(),
            index[wrong.cpu()].tolist(),
            labels[wrong].tolist(),
            guess[wrong].tolist(),
            strict=True,
        )
        found = sorted([*found, *rows], reverse=True)[:count]
    return [
        {
            "image": _thumbnail(dataset.store, place),
            "label": classes[label],
            "predicted": classes[guess],
            "probability": round(sure, 4),
        }
        for sure, place, label, guess in found
    ]


def augmentation_sheet(batches: Batches, backbone: Backbone, columns: int = 8) -> bytes:
    """The first training batch as the model saw it, as one JPEG."""
    batch = batches.batch_at(0)
    views = batch.images if isinstance(batch.images, list) else [batch.images]
    tiles: list[Tensor] = []
    for view in views[: 4 if len(views) > 1 else 1]:
        mean = torch.tensor(backbone.mean, device=view.device)[:, None, None]
        std = torch.tensor(backbone.std, device=view.device)[:, None, None]
        pixels = (view[: columns if len(views) > 1 else 3 * columns].float() * std + mean).clamp(0, 1)
        tiles += list((pixels * 255).round().byte().cpu())
    edge = max(64, min(112, tiles[0].shape[-1]))
    sheet = Image.new("RGB", (columns * edge, -(-len(tiles) // columns) * edge), "white")
    for place, tile in enumerate(tiles):
        picture = _picture(tile).resize((edge, edge), Image.Resampling.LANCZOS)
        sheet.paste(picture, (place % columns * edge, place // columns * edge))
    return _encode(sheet)


def save_pictures(run: Run, mistakes: list[dict[str, Any]] | None, sheet: bytes | None) -> None:
    """Lay the pictures beside the run's numbers, where the report looks for them."""
    if mistakes is not None:
        run.save_json("mistakes.json", mistakes)
    if sheet is not None and run.writer:
        picture = run.folder / "augmentations.jpg"
        picture.write_bytes(sheet)
        run.trackers.image("augmentations", picture)


def _thumbnail(store: ImageStore, place: int, edge: int = 96) -> str:
    picture = _picture(store.images[place].cpu())
    height, width = (int(side) for side in store.sizes[place])
    scale = edge / max(height, width)
    picture = picture.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.LANCZOS)
    return "data:image/jpeg;base64," + base64.b64encode(_encode(picture)).decode()


def _picture(pixels: Tensor) -> Image.Image:
    channels = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())


def _encode(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
