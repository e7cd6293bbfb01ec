"""Crop, flip and antialiased resize of a batch as two batched matrix products.

Resampling is linear and separable. For one image with stored rows S, stored columns S' and an output of h x w,

    out = Wy · image · Wxᵀ        Wy: (h, S), Wx: (w, S')

Row i of W holds the filter (bilinear triangle, or bicubic with a = -1/2) centred at output pixel i. It is widened by
the scale if the image shrinks (antialias), cut at the crop's border and normalized. torchvision's ``resized_crop`` does
the same for tensors, and PIL for images. A flip reverses the rows of Wx.

Boxes are in pixels of the ORIGINAL image. A cached image may have another size and aspect ratio. Then x and y have
different scales, and the geometry stays exact.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from frugalvit.data.rng import to_device_packed

Interpolation = Literal["bilinear", "bicubic"]
Border = Literal["box", "image"]
_ATTEMPTS = 10
RANDOM_BOX_COLUMNS = 2 * _ATTEMPTS + 2
_RADIUS = {"bilinear": 1.0, "bicubic": 2.0}


def boxes_from_uniform(
    sizes: Tensor,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    numbers: Tensor,
    out_size: tuple[int, int] = (1, 1),
) -> Tensor:
    """Draw boxes (B, 4) of top, left, height, width, distributed as torchvision's RandomResizedCrop.

    sizes: (B, 2) height and width in original pixels. numbers: (B, 22) uniform. The first of ten attempts that fits is
    used, or else the largest centred box within the ratio limits.

    For a rectangular output the ratio is relative to that of the output, because evaluation does not stretch images.
    If boxes of this shape cover less of an image than square boxes can, the scale shrinks by that factor. Otherwise
    hardly any box would fit, and all crops would be alike.
    """
    height, width = sizes.double().unbind(-1)
    share, aspect = numbers[:, :_ATTEMPTS], numbers[:, _ATTEMPTS : 2 * _ATTEMPTS]
    shape = out_size[1] / out_size[0]
    ratio = ratio[0] * shape, ratio[1] * shape
    room = (_covered(height, width, shape) / _covered(height, width, 1.0)).clamp(max=1)
    area = (height * width * room)[:, None] * (scale[0] + (scale[1] - scale[0]) * share)
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(log_low + (log_high - log_low) * aspect)
    tried_width, tried_height = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    fits = (tried_width > 0) & (tried_width <= width[:, None]) & (tried_height > 0) & (tried_height <= height[:, None])
    first = fits.int().argmax(1, keepdim=True)
    any_fits = fits.any(1)

    box_height, box_width = tried_height.gather(1, first)[:, 0], tried_width.gather(1, first)[:, 0]
    top = torch.floor(numbers[:, -2] * (height - box_height + 1))
    left = torch.floor(numbers[:, -1] * (width - box_width + 1))

    image_ratio = width / height
    centred_height = torch.where(image_ratio < ratio[0], (width / ratio[0]).round().clamp(min=1), height)
    centred_width = torch.where(image_ratio > ratio[1], (height * ratio[1]).round().clamp(min=1), width)
    centred_top = torch.floor((height - centred_height) / 2)
    centred_left = torch.floor((width - centred_width) / 2)
    drawn = torch.stack([top, left, box_height, box_width], 1)
    centred = torch.stack([centred_top, centred_left, centred_height, centred_width], 1)
    return torch.where(any_fits[:, None], drawn, centred).float()


def _covered(height: Tensor, width: Tensor, shape: float) -> Tensor:
    """Return the share of an image that the largest box with this aspect ratio covers."""
    wider = width / height / shape
    return torch.minimum(wider, 1 / wider)


def center_boxes(sizes: Tensor, out_size: tuple[int, int], resize_ratio: float) -> Tensor:
    """Return the boxes (B, 4) of ``Resize(int(resize_ratio * out))`` and ``CenterCrop(out)``.

    Boxes are in original pixels. The shorter edge (relative to a rectangular output) becomes int(resize_ratio * out).
    The longer edge and the offsets are rounded to pixels of the resized image, as in torchvision.
    """
    size = sizes.double()
    out = torch.tensor(out_size, dtype=torch.float64)
    short = torch.floor(out * resize_ratio)
    zoom = (short / size).amax(1, keepdim=True)
    binding = (short / size) >= zoom
    resized = torch.where(binding, short, torch.floor(size * zoom + 1e-9))  # 15 · (41 / 5) must not become 122
    corner = torch.round((resized - out) / 2)
    per_pixel = size / resized
    return torch.cat([corner * per_pixel, out * per_pixel], 1).float()


def crop_resize(
    images: Tensor,
    sizes: Tensor,
    boxes: Tensor,
    flips: Tensor | None,
    out_size: tuple[int, int],
    interpolation: Interpolation = "bilinear",
    border: Border = "box",
) -> Tensor:
    """Crop, flip and resize every image by its own box or boxes.

    images: (B, C, S, S') on any device: uint8, or normalized float32.
    sizes:  (B, 2) original height and width; boxes: (B, 4) or (B, V, 4) in original pixels; flips: (B,) or (B, V)
            or None: all on the CPU, so that the filter's length is known without waiting for the device.
    border: "box" crops first, then resizes (training crops); "image" resizes, then crops (evaluation).
    Returns float32, (B, C, h, w), or (V, B, C, h, w) for V boxes an image: in [0, 1] if ``images`` is uint8.
    """
    single = boxes.dim() == 2
    if single:
        boxes = boxes[:, None]
        flips = None if flips is None else flips[:, None]
    batch, views = boxes.shape[:2]
    rows, columns = images.shape[-2:]
    height, width = out_size
    per_pixel = torch.tensor([rows, columns]) / sizes.float()[:, None]  # (B, 1, 2) stored pixels per original pixel
    start, length = boxes[..., :2] * per_pixel, boxes[..., 2:] * per_pixel
    taps = [_taps(length[..., axis], out, interpolation) for axis, out in enumerate(out_size)]
    if flips is None:
        flips = torch.zeros(batch, views, dtype=torch.bool)

    start, length, flips = to_device_packed([start, length, flips], images.device)
    down = _filter(start[..., 0], length[..., 0], rows, height, taps[0], interpolation, border)
    across = _filter(start[..., 1], length[..., 1], columns, width, taps[1], interpolation, border, flips)
    with torch.autocast(images.device.type, enabled=False):  # bfloat16 has too few digits for pixels
        out = (_by_taps if images.device.type == "cpu" else _by_products)(images, down, across)
    out = out.mul_(1 / 255).clamp_(0, 1) if images.dtype == torch.uint8 else out
    return out[0] if single else out


class Filter(NamedTuple):
    """One axis of a resampling in sparse form: stored pixels and their weights, both (B, V, out, taps)."""

    pixels: Tensor
    weights: Tensor


def _by_products(images: Tensor, down: Filter, across: Filter) -> Tensor:
    """Compute (V, B, C, h, w) by two dense batched matrix products, for GPUs.

    Images are converted once for all views. Rows come first, so that both products are plain batched products and no
    image is repeated. On a GPU half precision is exact for uint8; the error stays below a quarter of a grey level.
    """
    dtype = torch.float16 if images.is_cuda and images.dtype == torch.uint8 else torch.float32
    batch, channels, rows, columns = images.shape
    views, height, width = down.pixels.shape[1], down.pixels.shape[2], across.pixels.shape[2]
    left = torch.zeros(batch, views * height, rows, device=images.device, dtype=dtype)
    left.scatter_(-1, down.pixels.flatten(1, 2), down.weights.flatten(1, 2).to(dtype))
    right = torch.zeros(batch * views, columns, width, device=images.device, dtype=dtype)
    right.scatter_(-2, across.pixels.flatten(0, 1).mT, across.weights.flatten(0, 1).mT.to(dtype))
    pixels = images.permute(0, 2, 1, 3).to(dtype).reshape(batch, rows, channels * columns)
    narrow = torch.bmm(left, pixels).view(batch * views, height * channels, columns)
    out = torch.bmm(narrow, right).view(batch, views, height, channels, width)
    return out.permute(1, 0, 3, 2, 4).contiguous().float()


def _by_taps(images: Tensor, down: Filter, across: Filter) -> Tensor:
    """Compute (V, B, C, h, w) by adding only the rows, then the columns, that a pixel needs.

    On a CPU this is 2 to 4 times faster. ``embedding_bag`` computes a weighted sum of table rows. The table holds first
    the rows of the images, then their columns.
    """
    batch, channels, rows, columns = images.shape
    views, height, width = down.pixels.shape[1], down.pixels.shape[2], across.pixels.shape[2]
    table = images.permute(0, 2, 1, 3).float().reshape(batch * rows, channels * columns)
    narrow = _weighted_rows(table, down, rows).view(batch, views, height, channels, columns)
    table = narrow.permute(0, 1, 4, 3, 2).reshape(batch * views * columns, channels * height)
    across = Filter(across.pixels.flatten(0, 1), across.weights)
    out = _weighted_rows(table, across, columns).view(batch, views, width, channels, height)
    return out.permute(1, 0, 3, 4, 2).contiguous()


def _weighted_rows(table: Tensor, axis: Filter, stride: int) -> Tensor:
    """Sum table rows by weight: row i of image (or view) b sums the rows pixels[b, …, i]."""
    taps = axis.pixels.shape[-1]
    offset = torch.arange(len(axis.pixels)).view(-1, *[1] * (axis.pixels.dim() - 1)) * stride
    bags, weights = (axis.pixels + offset).view(-1, taps), axis.weights.reshape(-1, taps)
    return torch.nn.functional.embedding_bag(bags, table, mode="sum", per_sample_weights=weights)


def _taps(length: Tensor, out: int, interpolation: Interpolation) -> int:
    """Return how many stored pixels the widest filter of the batch touches."""
    widest = max(float(length.max()) / out, 1.0) if length.numel() else 1.0
    return 2 * math.ceil(_RADIUS[interpolation] * widest) + 1


def _filter(
    start: Tensor,
    length: Tensor,
    stored: int,
    out: int,
    taps: int,
    interpolation: Interpolation,
    border: Border,
    flips: Tensor | None = None,
) -> Filter:
    """Build the filter of one axis from crop starts and lengths (B, V) in stored pixels."""
    device = start.device
    taps = min(taps, stored)
    position = torch.arange(out, device=device, dtype=torch.float32) + 0.5
    if flips is not None:
        position = torch.where(flips[..., None], out - position, position)
    scale = (length / out)[..., None]  # (B, V, 1) stored pixels per output pixel
    center = start[..., None] + scale * position  # (B, V, out)
    widening = scale.clamp(min=1.0)
    reach = _RADIUS[interpolation] * widening

    first = torch.floor(center - reach + 0.5).clamp_(0, stored - taps)
    pixel = first[..., None] + torch.arange(taps, device=device)  # (B, V, out, taps)
    weight = _KERNEL[interpolation]((pixel + 0.5 - center[..., None]) / widening[..., None])
    if border == "box":
        low = torch.floor(start + 0.5).clamp_(0, stored - 1)
        high = torch.maximum(torch.floor(start + length + 0.5).clamp_(max=stored), low + 1)
        weight = weight * ((pixel >= low[..., None, None]) & (pixel < high[..., None, None]))
    return Filter(pixel.long(), weight / weight.sum(-1, keepdim=True))


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * (a * x) - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


_KERNEL = {"bilinear": lambda x: (1 - x.abs()).clamp_(min=0), "bicubic": _cubic}


def pad_crop(images: Tensor, corners: Tensor, flips: Tensor, pad: int) -> Tensor:
    """Crop with a black border and flip: ``RandomCrop(size, padding=pad)``, batched, in full pixels.

    images: (B, C, H, W); corners: (B, 2) row and column in 0..2·pad; flips: (B,). Returns the same shape and dtype.
    """
    batch, channels, height, width = images.shape
    flipped = flips.nonzero()[:, 0]
    top, left, flipped = to_device_packed([corners[:, 0], corners[:, 1], flipped], images.device)
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
    tall, wide = padded.shape[-2:]
    rows = torch.arange(height, device=images.device) + top[:, None, None]
    plane = torch.arange(batch * channels, device=images.device).view(batch, channels, 1)
    first = (plane * tall + rows) * wide + left[:, None, None]  # (B, C, H) start of each row of the result
    every_row = padded.flatten().unfold(0, width, 1)  # a view: row s is the width pixels from s
    out = every_row.index_select(0, first.flatten()).view_as(images)
    return out.index_copy_(0, flipped, out.index_select(0, flipped).flip(-1))
