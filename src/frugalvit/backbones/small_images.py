"""Small images: the one place that decides patch, window and stem stride, and says why.

A network published for 224 pixels ends in a 1x1 grid at 32, where there is nothing left to localise or to match. For
images under 224 pixels the published shape is kept if its final grid is large enough; otherwise the first patches (or
the stem's strides) get smaller until it is, and windows are chosen that divide every map. Explicit keywords win.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from frugalvit.backbones.base import GridModel
from frugalvit.backbones.timm_features import Size, reduction, to_grid
from frugalvit.errors import UserError

PUBLISHED = 224
"""From this size on a network keeps its published shape."""

_SMALL_NETWORK = 50_000_000  # parameters; filling more with zeros takes longer than it spares

SMALLEST_GRID = 4
SMALLEST_PLAIN_GRID = 7
"""A plain ViT has no finer maps before its last: it gets at least Drloc's 7 x 7."""


class Build(Protocol):
    """Builds the network with further keywords; on the meta device there are shapes without arithmetic."""

    def __call__(self, extra: dict[str, Any], *, device: str = "meta") -> nn.Module: ...


def adapt(name: str, img_size: Size, given: dict[str, Any], build: Build) -> tuple[dict[str, Any], list[str]]:
    """Keywords to add for images of ``img_size``, and sentences saying why. Both empty for published sizes."""
    if min(img_size) >= PUBLISHED:
        return {}, []
    model = build({})
    stock = final_grid(model, img_size)
    chosen: dict[str, Any] = {}
    reasons: list[str] = []
    plain = _is_plain(model)
    wanted = SMALLEST_PLAIN_GRID if plain else SMALLEST_GRID
    if min(stock) < wanted and not {"patch_size", "stem_stride", "output_stride"} & given.keys():
        chosen, grid = _finer(model, img_size, build, wanted, plain, stock)
        if chosen:
            model = build(chosen)
            before = stock if min(stock) else padded_grid(build({}), img_size)
            ends = f"would end in {before[0]}x{before[1]} tokens" if min(before) else "does not take this size"
            reasons.append(f"{_words(chosen)} (the published shape {ends}, this one ends in {grid[0]}x{grid[1]})")
        elif not min(grid):
            grid = padded_grid(model, img_size)
        if 0 < min(grid) < SMALLEST_GRID:
            reasons.append(f"no smaller patch or stride is possible: the final grid stays at {grid[0]}x{grid[1]}")
    window = None if "window_size" in given else _fitting_window(model, name, img_size)
    if window:
        chosen["window_size"] = window
        reasons.append(f"window_size={window} (divides every map of this image size)")
    where = f"{name} at {img_size[0]}x{img_size[1]}: "
    return chosen, [where + "; ".join(reasons)] if reasons else []


def final_grid(model: nn.Module, img_size: Size) -> Size:
    """(h, w) of the final grid, by running the network; (0, 0) where it does not take the size."""
    if next(model.parameters()).is_meta and max(img_size) < PUBLISHED and _is_small(model):
        _fill_with_zeros(model)  # arithmetic on one small image takes a fraction of the time of shapes without it
        grid = _run(model, img_size)
        if min(grid):
            return grid
        model.to("meta")  # tensors that a network keeps outside its buffers are still there
    return _run(model, img_size)


def _is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) < _SMALL_NETWORK


def _fill_with_zeros(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()


def _run(model: nn.Module, img_size: Size) -> Size:
    device = next(model.parameters()).device
    images = torch.zeros(1, _channels(model), *img_size, device=device)
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(model, GridModel):
                grid = model.forward_grid(images)[0]
            else:
                grid = to_grid(model.forward_features(images), model, img_size, model.num_features)  # type: ignore
    except (AssertionError, RuntimeError, ValueError, TypeError, IndexError, UserError):
        return 0, 0
    return grid.shape[2], grid.shape[3]


def padded_grid(model: nn.Module, img_size: Size) -> Size:
    """(h, w) of the final grid of an image that is padded where the network wants it so, as a Backbone does."""
    whole = final_grid(model, img_size)
    if min(whole):
        return whole
    for step in dict.fromkeys((reduction(model) or 32, 32, 64)):
        fit = (-(-img_size[0] // step) * step, -(-img_size[1] // step) * step)
        grid = final_grid(model, fit)
        if min(grid):  # rows and columns of padding alone are not given
            return -(-img_size[0] * grid[0] // fit[0]), -(-img_size[1] * grid[1] // fit[1])
    return 0, 0


def kept_shape(name: str, img_size: Size, build: Build) -> list[str]:
    """A sentence where a network that keeps its shape ends in so small a grid that a new one would be made finer."""
    model = build({})
    grid = padded_grid(model, img_size)
    if min(grid) >= (SMALLEST_PLAIN_GRID if _is_plain(model) else SMALLEST_GRID):
        return []
    ends = f"ends in {grid[0]}x{grid[1]} tokens" if min(grid) else "may not take this size"
    return [f"{name} at {img_size[0]}x{img_size[1]}: keeps the shape its weights were trained in and {ends}"]


def set_stem_stride(model: nn.Module, stride: int) -> None:
    """Give a convolutional stem another total stride: first without its pooling, then with a slower first step.

    The kernels stay, so weights still fit; the padding becomes what a map of ceil(pixels / stride) needs. A ResNet's
    stem has 4 = 2 (convolution) x 2 (pooling).
    """
    convolution, pooled = _stem(model)
    if convolution is None:
        raise UserError(f"stem_stride: {type(model).__name__} does not begin with a strided convolution")
    published = convolution.stride[0] * (2 if pooled else 1)
    if stride < 1 or published % stride:
        raise UserError(f"stem_stride={stride} is not possible; this stem has {published}: choose a divisor of it")
    if stride == published:
        return
    if pooled:
        model.maxpool = nn.Identity()
    if stride < convolution.stride[0]:
        convolution.stride = (stride, stride)
        if not isinstance(convolution.padding, str):
            convolution.padding = tuple(-(-(side - stride) // 2) for side in convolution.kernel_size)


def _finer(
    model: nn.Module, img_size: Size, build: Build, wanted: int, plain: bool, stock: Size
) -> tuple[dict[str, Any], Size]:
    """The mildest change that makes the final grid large enough, or the one that brings it closest."""
    best: dict[str, Any] = {}
    grid = stock
    for option in _options(model, img_size, plain):
        # Tables of relative positions, made for a size, break only in arithmetic: look for real where there may be any.
        doubtful = "stem_stride" in option and accepts(model, "img_size")
        try:
            built = build(option, device="cpu" if doubtful else "meta")
            found = (padded_grid if plain else final_grid)(built, img_size)
        except UserError:
            continue
        if min(found) > min(grid):
            best, grid = option, found
        if min(grid) >= wanted:
            break
    return best, grid


def _options(model: nn.Module, img_size: Size, plain: bool) -> Iterator[dict[str, Any]]:
    patch = _patch_size(model)
    if patch and accepts(model, "patch_size"):
        if plain:
            finer = range(min(patch, min(img_size) // SMALLEST_PLAIN_GRID), 0, -1)
            # Patches that divide the image, unless they would be so small that tokens abound: then it is padded.
            even = [size for size in finer if not (img_size[0] % size or img_size[1] % size) and 2 * size > finer[0]]
            yield from ({"patch_size": size} for size in [*even, *finer])
        else:
            tokens = isinstance(model, GridModel) or accepts(model, "img_size")
            for step in range(1, patch.bit_length()):
                if not tokens:  # of convolutions (ConvNeXt): a lesser stride leaves their first kernels as they are
                    yield {"stem_stride": patch // 2**step}
                yield {"patch_size": patch // 2**step}
        return
    convolution, pooled = _stem(model)
    strides = []
    if convolution is not None:
        stride = convolution.stride[0] * (2 if pooled else 1)
        while stride > 1:
            stride //= 2
            strides.append({"stem_stride": stride})
    yield from strides
    if accepts(model, "output_stride"):
        slowest = strides[-1] if strides else {}
        yield from ({**slowest, "output_stride": total} for total in (16, 8))


def _fitting_window(model: nn.Module, name: str, img_size: Size) -> int | None:
    """The window closest to the published one under which no map of a Swin needs padding; None to keep it."""
    if "Swin" not in type(model).__name__ or not accepts(model, "window_size"):
        return None
    nominal = getattr(model, "window_size", None)
    if nominal is None:
        named = re.search(r"window(\d+)", name)
        nominal = (int(named[1]),) * 2 if named else None
    if nominal is None or nominal[0] != nominal[1]:
        return None
    steps = [entry["reduction"] for entry in model.feature_info]  # type: ignore[union-attr]
    maps = {-(-length // step) for length in img_size for step in steps}
    published = nominal[0]
    candidates = range(max(2, published // 2), published + published // 2 + 1)
    even = [window for window in candidates if all(size <= window or size % window == 0 for size in maps)]
    closest = min(even, key=lambda window: (abs(window - published), window), default=published)
    return None if closest == published else closest


def _is_plain(model: nn.Module) -> bool:
    """All blocks at one resolution, as in a ViT."""
    steps = {entry.get("reduction") for entry in getattr(model, "feature_info", None) or []}
    return len(steps) == 1 and _patch_size(model) in steps


def _patch_size(model: nn.Module) -> int | None:
    """Side of the first patches of a network that cuts them without overlap or says so itself."""
    for holder in (model, getattr(model, "patch_embed", None), getattr(model, "stem", None)):
        size = getattr(holder, "patch_size", None)
        if isinstance(size, int):
            return size
        if isinstance(size, tuple) and len(size) == 2:
            return int(size[0])
    first = _first_convolution(model)
    return first.stride[0] if first is not None and first.kernel_size == first.stride else None


def _stem(model: nn.Module) -> tuple[nn.Conv2d | None, bool]:
    """The first convolution, if it is strided, and whether a pooling of 2 follows."""
    first = _first_convolution(model)
    if first is None or first.stride[0] < 2 or first.stride[0] != first.stride[1]:
        return None, False
    return first, isinstance(getattr(model, "maxpool", None), nn.MaxPool2d)


def _first_convolution(model: nn.Module) -> nn.Conv2d | None:
    name = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    found = dict(model.named_modules()).get(name) if isinstance(name, str) else None
    return found if isinstance(found, nn.Conv2d) else None


def _channels(model: nn.Module) -> int:
    channels = getattr(model, "in_chans", None)
    if isinstance(channels, int):
        return channels
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3


def accepts(model: nn.Module, keyword: str) -> bool:
    """Whether the network's class, or one it passes everything on to, has this keyword."""
    return any(
        "__init__" in vars(kind) and keyword in inspect.signature(kind.__init__).parameters
        for kind in type(model).__mro__
    )


def _words(keywords: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in keywords.items())
