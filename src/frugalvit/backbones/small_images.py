"""Choose patch size, window size and stem stride for small images, and explain the choice.

A network published for 224 pixels ends in a 1x1 grid at 32 pixels, which leaves nothing to localize or to match. So
below 224 pixels, if the final grid is too small, this module reduces the first patches (or the stem's stride) until it
is large enough. It also chooses windows that divide every map. Explicit keywords have priority.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from frugalvit.backbones.base import GridModel
from frugalvit.backbones.conv_stem import ConvStem
from frugalvit.backbones.timm_features import Size, cells_in_image, padded_sizes, to_grid
from frugalvit.errors import UserError

PUBLISHED = 224  # networks keep their published shape from this image size on

_SMALL_NETWORK = 50_000_000  # parameters; filling more with zeros is slower than a run on the meta device

SMALLEST_GRID = 4
SMALLEST_PLAIN_GRID = 7  # for a plain ViT, which has no finer maps: Drloc's 7 x 7


class Build(Protocol):
    """Builds the network with additional keywords; on the meta device it computes only shapes."""

    def __call__(self, extra: dict[str, Any], *, device: str = "meta") -> nn.Module: ...


def adapt(name: str, img_size: Size, explicit: dict[str, Any], build: Build) -> tuple[dict[str, Any], list[str]]:
    """Return keywords to add for images of ``img_size`` below 224 pixels, and notes with the reasons."""
    if min(img_size) >= PUBLISHED:
        return {}, []
    model = build({})
    published = final_grid(model, img_size)
    chosen: dict[str, Any] = {}
    reasons: list[str] = []
    plain = _is_plain(model)
    smallest = SMALLEST_PLAIN_GRID if plain else SMALLEST_GRID
    if min(published) < smallest and not {"patch_size", "stem_stride", "output_stride"} & explicit.keys():
        chosen, grid = _refine_grid(model, img_size, build, smallest, plain, published)
        if chosen:
            model = build(chosen)
            before = published if min(published) else padded_grid(build({}), img_size)
            ends = f"would end in {before[0]}x{before[1]} tokens" if min(before) else "does not accept this size"
            reasons.append(
                f"{format_keywords(chosen)} (the published shape {ends}, this one ends in {grid[0]}x{grid[1]})"
            )
        elif not min(grid):
            grid = padded_grid(model, img_size)
        if 0 < min(grid) < SMALLEST_GRID:
            reasons.append(f"no smaller patch or stride is possible: the final grid stays at {grid[0]}x{grid[1]}")
    window = None if "window_size" in explicit else _fitting_window(model, name, img_size)
    if window:
        chosen["window_size"] = window
        reasons.append(f"window_size={window} (divides every map of this image size)")
    return chosen, [f"{name} at {img_size[0]}x{img_size[1]}: " + "; ".join(reasons)] if reasons else []


def final_grid(model: nn.Module, img_size: Size) -> Size:
    """Return (h, w) of the final grid by running the network; (0, 0) if it does not accept the size."""
    is_meta = next(model.parameters()).is_meta
    if is_meta and max(img_size) < PUBLISHED and sum(p.numel() for p in model.parameters()) < _SMALL_NETWORK:
        # Real arithmetic on one small image is much faster than a run on the meta device.
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        grid = _run(model, img_size)
        if min(grid):
            return grid
        model.to("meta")  # tensors that are not buffers still have their values
    return _run(model, img_size)


def _run(model: nn.Module, img_size: Size) -> Size:
    device = next(model.parameters()).device
    convolutions = (module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d))
    images = torch.zeros(1, getattr(model, "in_chans", None) or next(convolutions, 3), *img_size, device=device)
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
    """Return (h, w) of the final grid, with padding if necessary, as in a Backbone."""
    for padded in padded_sizes(model, img_size, img_size):
        grid = final_grid(model, padded)
        if min(grid):
            return cells_in_image(grid, img_size, padded)
    return 0, 0


def note_small_grid(name: str, img_size: Size, build: Build) -> list[str]:
    """Return a note if a network that keeps its patch size ends in a smaller grid than a new one would."""
    model = build({})
    grid = padded_grid(model, img_size)
    if min(grid) >= (SMALLEST_PLAIN_GRID if _is_plain(model) else SMALLEST_GRID):
        return []
    ends = f"ends in {grid[0]}x{grid[1]} tokens" if min(grid) else "may not accept this size"
    return [f"{name} at {img_size[0]}x{img_size[1]}: keeps the patch size of its weights and {ends}"]


def set_stem_stride(model: nn.Module, stride: int) -> None:
    """Set the total stride of a convolutional stem: drop the pooling, then lower the first stride.

    The kernels stay, so weights still fit. The padding gives a map of ceil(pixels / stride). A ResNet's stem has stride
    4 = 2 (convolution) x 2 (pooling).
    """
    convolution, pooled = _stem(model)
    if not isinstance(convolution, nn.Conv2d):
        raise UserError(f"stem_stride: {type(model).__name__} does not start with a strided convolution")
    published = convolution.stride[0] * (2 if pooled else 1)
    if stride < 1 or published % stride:
        raise UserError(f"stem_stride={stride} does not divide the stride {published} of this stem; choose a divisor")
    if stride == published:
        return
    if pooled:
        model.maxpool = nn.Identity()
    if stride < convolution.stride[0]:
        convolution.stride = (stride, stride)
        if not isinstance(convolution.padding, str):
            convolution.padding = tuple(-(-(side - stride) // 2) for side in convolution.kernel_size)


def _refine_grid(
    model: nn.Module, img_size: Size, build: Build, smallest: int, plain: bool, published: Size
) -> tuple[dict[str, Any], Size]:
    """Return the smallest change that makes the grid large enough, else the change with the largest grid."""
    best: dict[str, Any] = {}
    grid = published
    for option in _options(model, img_size, plain):
        # A table of relative positions of the wrong size fails only in real arithmetic, not on the meta device.
        has_tables = "stem_stride" in option and accepts(model, "img_size")
        try:
            built = build(option, device="cpu" if has_tables else "meta")
            result = (padded_grid if plain else final_grid)(built, img_size)
        except UserError:
            continue
        if min(result) > min(grid):
            best, grid = option, result
        if min(grid) >= smallest:
            break
    return best, grid


def _options(model: nn.Module, img_size: Size, plain: bool) -> Iterator[dict[str, Any]]:
    patch = _patch_size(model)
    if patch and accepts(model, "patch_size"):
        if plain:
            finer = range(min(patch, min(img_size) // SMALLEST_PLAIN_GRID), 0, -1)
            # Prefer patches that divide the image, unless they give far too many tokens; otherwise pad the image.
            even = [size for size in finer if not (img_size[0] % size or img_size[1] % size) and 2 * size > finer[0]]
            yield from ({"patch_size": size} for size in [*even, *finer])
        else:
            tokens = isinstance(model, GridModel) or accepts(model, "img_size")
            for step in range(1, patch.bit_length()):
                if not tokens:  # ConvNeXt: a smaller stride keeps the first kernels
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
        finest = strides[-1] if strides else {}
        yield from ({**finest, "output_stride": total} for total in (16, 8))


def _fitting_window(model: nn.Module, name: str, img_size: Size) -> int | None:
    """Return the window closest to the published one that needs no padding in a Swin; None to keep it."""
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
    """Whether all blocks have one resolution, as in a ViT."""
    steps = {entry.get("reduction") for entry in getattr(model, "feature_info", None) or []}
    return len(steps) == 1 and _patch_size(model) in steps


def _patch_size(model: nn.Module) -> int | None:
    """Return the side of the first patches if the network states it or if they do not overlap."""
    for holder in (model, getattr(model, "patch_embed", None), getattr(model, "stem", None)):
        size = getattr(holder, "patch_size", None)
        if isinstance(size, int):
            return size
        if isinstance(size, tuple) and len(size) == 2:
            return int(size[0])
    first = _first_convolution(model)
    return first.stride[0] if first is not None and first.kernel_size == first.stride else None


def _stem(model: nn.Module) -> tuple[nn.Conv2d | ConvStem | None, bool]:
    """Return the first convolution if it is strided, and whether a pooling of stride 2 follows."""
    first = _first_convolution(model)
    if first is None or first.stride[0] < 2 or first.stride[0] != first.stride[1]:
        return None, False
    return first, isinstance(getattr(model, "maxpool", None), nn.MaxPool2d)


def _first_convolution(model: nn.Module) -> nn.Conv2d | ConvStem | None:
    name = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    module = dict(model.named_modules()).get(name) if isinstance(name, str) else None
    return module if isinstance(module, nn.Conv2d | ConvStem) else None


def accepts(model: nn.Module, keyword: str) -> bool:
    """Whether the constructor of the network's class or of a base class has this keyword."""
    return any(
        "__init__" in vars(kind) and keyword in inspect.signature(kind.__init__).parameters
        for kind in type(model).__mro__
    )


def format_keywords(keywords: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in keywords.items())
