"""The data of the explorer page: similarities of regions, best matches, attention of each head.

Two images at 14x14 with 12 heads are 1.1 million numbers. Each is stored as one byte: similarities relative to the
range of their pair of images, attention relative to the peak of its row.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frugalvit.backbones import Backbone
from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.utils import console
from frugalvit.visualization import attention as attention_lens
from frugalvit.visualization.correspondence import (
    TOP,
    best_pairs,
    cosines,
    global_feature,
    nearest_region,
    require_regions,
)
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import Box, SecondView, centre_box, crop_to, model_input, shown

MOST_REGIONS = 256  # finer grids are averaged: the page holds the square of this number per head
_MAX_PIXELS = 384  # of the longer side of a picture in the page


@dataclass(frozen=True)
class Picture:
    """A picture with its name: pixels (H, W, C), uint8 RGB or the values of the file."""

    name: str
    pixels: np.ndarray

    @property
    def pixel_type(self) -> str:
        return self.pixels.dtype.name

    @classmethod
    def of(cls, path: str, pixels: np.ndarray) -> Self:
        """Name a picture by its file, without control characters."""
        return cls(console.sanitize(Path(path).stem), pixels)


@dataclass(frozen=True)
class _View:
    """A picture, or its second view, with the share ``keep`` of its short side."""

    picture: Picture
    second: bool
    keep: float
    seed: int

    @property
    def name(self) -> str:
        change = "mirrored, grey" if self.picture.pixel_type == "uint8" else "mirrored"
        return f"{self.picture.name} ({change})" if self.second else self.picture.name

    def box(self, shape: tuple[int, int]) -> Box:
        height, width = self.picture.pixels.shape[:2]
        return centre_box((height, width), shape, self.keep)

    def render(self, shape: tuple[int, int]) -> Tensor:
        image = crop_to(self.picture.pixels, self.box(shape), shape)
        if self.second:
            image = SecondView.of(self.picture.pixel_type)(image[None], torch.Generator().manual_seed(self.seed))[0]
        return image


def gather(
    models: Sequence[tuple[str, Backbone]], pictures: Sequence[Picture], *, second_views: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Compute the explorer's data for named models and pictures, ready for JSON.

    second_views: add the paper's second view of every picture

    All models see the first one's crop. They may differ in input size, not in its aspect ratio.
    """
    if not pictures:
        raise UserError("The explorer needs at least one image.")
    shapes = [backbone.img_size for _, backbone in models]
    ratios = {round(shape[0] / shape[1], 3) for shape in shapes}
    if len(ratios) > 1:
        raise UserError("These models have inputs of different aspect ratios: explore them one by one.")
    keep, flags = models[0][1].eval_crop["crop_pct"], (False, True) if second_views else (False,)
    views = [_View(picture, second, keep, seed) for picture in pictures for second in flags]
    return {
        "images": [_encode_view(view, shapes[0]) for view in views],
        "models": [_encode_model(name, backbone, views) for name, backbone in models],
    }


def _encode_view(view: _View, shape: tuple[int, int]) -> dict[str, Any]:
    """Encode a picture at the size of the page, as a data URI."""
    box = view.box(shape)
    scale = min(_MAX_PIXELS, max(box.height, box.width)) / max(shape)
    size = (max(1, round(shape[0] * scale)), max(1, round(shape[1] * scale)))
    picture = shown(view.render(size), view.picture.pixel_type)
    return {"name": view.name, "width": size[1], "height": size[0], "src": data_uri(picture)}


def data_uri(image: Tensor) -> str:
    """Encode a picture (3, H, W) in [0, 1] as a JPEG data URI; as PNG if JPEG would blur a tiny one."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    kind = "PNG" if max(pixels.shape[:2]) <= 96 else "JPEG"
    Image.fromarray(pixels).save(buffer, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _encode_model(name: str, backbone: Backbone, views: Sequence[_View]) -> dict[str, Any]:
    features: list[Features] = []
    heads: list[dict[str, Any]] = []
    notes: list[str] = []
    for view in views:
        inputs = model_input(backbone, view.render(backbone.img_size)[None])
        with eval_no_grad(backbone):
            output = backbone(inputs)
            if not torch.isfinite(output.grid).all():
                raise UserError(f"{name} has non-finite features: its training diverged.")
            require_regions(output.grid)
            full = (output.grid.shape[2], output.grid.shape[3])
            grid = _page_grid(full)
            coarse = F.adaptive_avg_pool2d(output.grid.float().cpu(), grid)
            features.append(Features(coarse, output.pooled.float().cpu()))
            heads.append(_heads(backbone, inputs, full, grid))
    grid = (features[0].grid.shape[2], features[0].grid.shape[3])
    if grid != full:
        notes.append(f"The {full[0]}x{full[1]} grid is shown at {grid[0]}x{grid[1]}.")
    regions = Regions.of(backbone, backbone.img_size).averaged(grid)
    reasons = [head["reason"] for head in heads if "reason" in head]
    notes += reasons[:1]
    pairs = [(i, j) for i in range(len(views)) for j in range(len(views))]
    similarity = {(i, j): cosines(features[i].grid, features[j].grid)[0] for i, j in pairs}
    best = {(i, j): best_pairs(features[i].grid, features[j].grid, TOP)[:2] for i, j in pairs if i < j}
    return {
        "name": name,
        "grid": list(grid),
        # The extent of the grid relative to the picture; above 1 if the network pads.
        "extent": [length / side for length, side in zip(regions.extent, regions.picture, strict=True)],
        # The opposite direction is the transpose.
        "similarity": {f"{i}-{j}": _bytes(similarity[i, j]) for i, j in pairs if i <= j},
        "best": {f"{i}-{j}": similarity[i, j].argmax(dim=1).tolist() for i, j in pairs if i != j},
        "top": {f"{i}-{j}": torch.cat(regions).T.tolist() for (i, j), regions in best.items()},
        "global": [int(nearest_region(view.grid, global_feature(view))) for view in features],
        "heads": [] if reasons else heads,
        "notes": notes,
    }


def _heads(backbone: Backbone, inputs: Tensor, full: tuple[int, int], grid: tuple[int, int]) -> dict[str, Any]:
    """Encode each head's attention between regions, (heads, T, T), as bytes relative to each row's peak."""
    try:
        attention = backbone.attention(inputs)[0].float().cpu()
    except UserError as error:
        return {"reason": str(error)}
    extra = attention.shape[-1] - full[0] * full[1]
    weights = shrink_attention(attention[:, extra:, extra:], full, grid)
    peak = weights.amax(dim=-1, keepdim=True)
    scaled = (255 * weights / peak.clamp_min(torch.finfo(torch.float32).tiny)).round().byte()
    return {
        "count": len(weights),
        "weights": _base64(scaled.numpy()),
        "peak": _base64(peak.squeeze(-1).numpy().astype("<f4")),
        "entropy": _base64(attention_lens.entropy(weights).numpy().astype("<f4")),
    }


def shrink_attention(attention: Tensor, full: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Average attention (heads, T, T) to a coarse grid: the mean over queries, the sum over keys."""
    if full == grid:
        return attention
    tokens = attention.shape[-1]
    to_coarse = F.adaptive_avg_pool2d(torch.eye(tokens).view(tokens, 1, *full), grid).flatten(1)  # (T, t)
    share = to_coarse / to_coarse.sum(dim=1, keepdim=True)
    return to_coarse.t() @ attention @ share


def _page_grid(full: tuple[int, int]) -> tuple[int, int]:
    rows, columns = full
    step = 1
    while -(-rows // step) * -(-columns // step) > MOST_REGIONS:
        step += 1
    return -(-rows // step), -(-columns // step)


def _bytes(values: Tensor) -> dict[str, Any]:
    low, high = values.min().item(), values.max().item()
    scaled = (255 * (values - low) / max(high - low, 1e-12)).round().byte()
    return {"low": low, "high": high, "data": _base64(scaled.numpy())}


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
