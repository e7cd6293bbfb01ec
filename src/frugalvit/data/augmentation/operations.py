"""Batched colour operations, affine maps and random erasing; each image has its own strength.

Images are float (B, C, H, W) in [0, 1]; a strength is a tensor (B,) on the same device. Each function equals
torchvision's functional of that name on the same image and strength. Values stay continuous between operations; only
``posterize`` and ``equalize`` round to the 256 grey levels. Without three channels, ``saturation``, ``hue`` and
``grayscale`` change nothing, and ``contrast`` uses the mean over all channels.

An affine map is six numbers that take an output pixel to the input pixel it shows, counted from the image's centre:
x_in = a·x + b·y + c, y_in = d·x + e·y + f. Shears and translations act from the top left corner, as in PIL.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from frugalvit.data.preprocessing import LUMA


def luma(images: Tensor) -> Tensor:
    """Grey value (B, 1, H, W): ITU-R 601 weights for three channels, the mean for any other count."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """other + factor · (images - other), clipped to [0, 1]."""
    factor = _spread(factor)
    return (images * factor).add_(other * (1 - factor)).clamp_(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * _spread(factor)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, luma(images).mean((1, 2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, luma(images), factor) if images.shape[1] == 3 else images


def grayscale(images: Tensor) -> Tensor:
    return luma(images).expand_as(images).clone() if images.shape[1] == 3 else images


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue by ``shift`` of a full circle (-0.5 to 0.5); HSV's saturation and value stay.

    With V = max, chroma = max - min and H in sixths, channel n of (red 5, green 3, blue 1) becomes
    V - chroma · max(0, min(k, 4 - k, 1)) with k = (n + H) mod 6: HSV to RGB without a case per sextant.
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    safe = torch.where(chroma > 0, chroma, 1.0)
    sextant = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    channel = 5 - 2 * torch.arange(3, device=images.device).view(1, 3, 1, 1)
    k = (sextant + 6 * shift.view(-1, 1, 1))[:, None] + channel
    k.sub_(torch.floor(k / 6), alpha=6)
    return value[:, None] - torch.minimum(k, 4 - k).clamp_(0, 1).mul_(chroma[:, None])


def invert(images: Tensor) -> Tensor:
    return 1 - images


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert every value at or above the threshold (in [0, 1]; usually 128/255)."""
    above = (images >= _spread(threshold)).to(images.dtype)
    return above.sub_(images).abs_()  # |1 - x| above, |0 - x| below


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    """Add ``amount`` to every value below the middle (128/255), clipped at 1."""
    below = (images < 127.5 / 255).to(images.dtype)
    return below.mul_(_spread(amount)).add_(images).clamp_(max=1)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest ``bits`` (0 to 8) of each 8-bit value."""
    step = torch.exp2(8 - _spread(bits).float())
    return torch.floor((images * 255).round_() / step) * step / 255


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to the full range; a constant channel stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = high == low
    low, span = torch.where(flat, 0.0, low), torch.where(flat, 1.0, high - low)
    return ((images - low) / span).clamp_(0, 1)


def equalize(images: Tensor) -> Tensor:
    """Equalize each channel's histogram with PIL's integer table; a channel with too few values stays."""
    levels = (images * 255).round_().long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    last = torch.where(counts > 0, torch.arange(256, device=images.device), 0).amax(2, keepdim=True)
    step = (levels.shape[2] - counts.gather(2, last)) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    mapped = table.gather(2, levels).to(images.dtype).view_as(images) / 255
    return torch.where((step > 0)[..., None], mapped, images)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a 3 x 3 smoothing (centre 5, others 1, over 13); the one-pixel border stays."""
    if min(images.shape[-2:]) <= 2:
        return images
    across = images[..., :-2] + images[..., 1:-1] + images[..., 2:]
    inner = images[..., 1:-1, 1:-1]
    smooth = (across[..., :-2, :] + across[..., 1:-1, :]).add_(across[..., 2:, :]).add_(inner, alpha=4).div_(13)
    out = images.clone()
    out[..., 1:-1, 1:-1] = blend(inner, smooth, factor)
    return out


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Blur each image by its own sigma, with reflected borders: Ky · image · Kxᵀ with banded Ky, Kx.

    The kernel is torchvision's: exp(-d²/2σ²) over ``kernel_size`` pixels, normalized. Reflection needs a radius smaller
    than height and width; a larger kernel is cut.
    """
    height, width = images.shape[-2:]
    radius = min(kernel_size // 2, height - 1, width - 1)
    dtype = torch.float16 if images.is_cuda else images.dtype
    distance = torch.arange(radius + 1, device=images.device)
    sigma = sigma.float().clamp(min=1e-3)[:, None]  # this blurs nothing; a smaller sigma has the square 0
    taps = torch.exp(-(distance**2) / (2 * sigma**2))  # (B, radius + 1)
    taps = taps / (2 * taps.sum(1, keepdim=True) - taps[:, :1])
    batch, channels = images.shape[:2]
    with torch.autocast(images.device.type, enabled=False):  # bfloat16 has too few digits for pixels
        down = (taps @ _reach(height, radius, images.device).flatten(1)).view(-1, height, height).to(dtype)
        # Built transposed: products with a transposed view are slow on a CPU.
        across = (taps @ _reach(width, radius, images.device).mT.flatten(1)).view(-1, width, width).to(dtype)
        narrow = torch.bmm(images.to(dtype).reshape(batch, channels * height, width), across)
        rows = narrow.view(batch, channels, height, width).transpose(1, 2).reshape(batch, height, channels * width)
        out = torch.bmm(down, rows).view(batch, height, channels, width).transpose(1, 2)
    return out.contiguous().to(images.dtype)


@functools.lru_cache(maxsize=32)
def _reach(length: int, radius: int, device: torch.device) -> Tensor:
    """Count how often pixel i sees pixel j at each distance, reflected: (radius + 1, length, length)."""
    pixel = torch.arange(length)
    here, there = pixel[:, None], pixel[None, :]
    distance = torch.arange(radius + 1)[:, None, None]
    seen = ((here - there).abs() == distance).float()
    seen += ((here + there) == distance) & (there > 0)  # mirrored at the first pixel
    seen += ((2 * (length - 1) - here - there) == distance) & (there < length - 1)  # mirrored at the last
    return seen.to(device)


def _spread(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


# -- affine maps and erasing

_ATTEMPTS = 10
ERASING_COLUMNS = 2 * _ATTEMPTS + 3
_NOISE_LENGTH = 1 << 20


def rotation(degrees: Tensor) -> Tensor:
    """Rotate counter-clockwise about the centre: (B, 6)."""
    angle = torch.deg2rad(degrees)
    cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero], 1)


def shear_x(factor: Tensor, height: int) -> Tensor:
    """x_in = x + factor · y with y from the top edge: (B, 6)."""
    one, zero = torch.ones_like(factor), torch.zeros_like(factor)
    return torch.stack([one, factor, factor * height / 2, zero, one, zero], 1)


def shear_y(factor: Tensor, width: int) -> Tensor:
    """y_in = y + factor · x with x from the left edge: (B, 6)."""
    one, zero = torch.ones_like(factor), torch.zeros_like(factor)
    return torch.stack([one, zero, zero, factor, one, factor * width / 2], 1)


def translation(x: Tensor, y: Tensor) -> Tensor:
    """x_in = x + shift in pixels (a positive shift moves the picture left and up): (B, 6)."""
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    return torch.stack([one, zero, x, zero, one, y], 1)


def affine(images: Tensor, maps: Tensor, fill: Tensor, mode: str = "bilinear") -> Tensor:
    """Resample (B, C, H, W) in [0, 1] by maps (B, 6); pixels outside the image get ``fill`` (C,).

    mode: "bilinear" and "nearest" as torchvision's affine, "bicubic" as PIL's, which timm's RandAugment uses.
    """
    height, width = images.shape[-2:]
    # float32 throughout: positions in half precision would be off by a tenth of a pixel.
    a, b, c, d, e, f = (column.view(-1, 1, 1) for column in maps.float().unbind(1))
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = (torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2)[:, None]
    x_in, y_in = (a * x + c) + b * y, (d * x + f) + e * y  # (B, H, W) in pixels from the centre
    if mode == "bicubic":
        picture = cubic_by_two(images, x_in, y_in).clamp_(0, 1)
    else:
        picture = _sample(images, x_in, y_in, mode)
    fill = fill.view(1, -1, 1, 1)
    if mode != "bilinear":
        inside = (x_in.abs() < width / 2) & (y_in.abs() < height / 2)
        return torch.where(inside[:, None], picture, fill)
    # The share of a pixel's four neighbours that is inside the image.
    cover = ((width + 1) / 2 - x_in.abs()).clamp_(0, 1) * ((height + 1) / 2 - y_in.abs()).clamp_(0, 1)
    return picture.sub_(fill).mul_(cover[:, None]).add_(fill)


def cubic_by_two(images: Tensor, x_in: Tensor, y_in: Tensor) -> Tensor:
    """Sample with PIL's cubic kernel, a = -1, at positions (B, H, W) in pixels from the centre.

    grid_sample's kernel has a = -0.75, and kernels are linear in a: w₋₁ = (4 w₋₀.₇₅ - w₀) / 3, where w₀ is bilinear
    sampling at positions bent by 3t² - 2t³. Along both axes at once this omits (4/9) of the product of the two
    differences w₀ - w₋₀.₇₅, which are at most 0.11 each: half a per cent of a mixed second difference of pixels.
    """
    if images.device.type == "mps":  # Apple's GPU has no bicubic sampling
        return cubic_by_two(images.cpu(), x_in.cpu(), y_in.cpu()).to(images.device)
    height, width = images.shape[-2:]
    sharp = _sample(images, x_in, y_in, "bicubic", "border")
    smooth = _sample(images, _bend(x_in, width), _bend(y_in, height), "bilinear", "border")
    return sharp.mul_(4 / 3).sub_(smooth, alpha=1 / 3)


def _bend(position: Tensor, side: int) -> Tensor:
    """Bend the fraction t after a pixel; positions are from the centre of ``side`` pixels."""
    pixel = (position + (side - 1) / 2).floor() - (side - 1) / 2
    part = position - pixel
    return pixel + part * part * (3 - 2 * part)


def _sample(images: Tensor, x_in: Tensor, y_in: Tensor, mode: str, outside: str = "zeros") -> Tensor:
    height, width = images.shape[-2:]
    grid = torch.stack([x_in * (2 / width), y_in * (2 / height)], -1)
    return grid_sample(images, grid, mode=mode, padding_mode=outside, align_corners=False)


def erasing_boxes(
    numbers: Tensor, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Draw boxes (B, 4) to erase, distributed as timm's: top, left, height, width.

    numbers: (B, 23) uniform. The first of ten attempts that is smaller than the image is used, or else height 0.
    """
    height, width = size
    share, aspect = numbers[:, :_ATTEMPTS], numbers[:, _ATTEMPTS : 2 * _ATTEMPTS]
    target = height * width * (area[0] + (area[1] - area[0]) * share)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * aspect)
    tall, wide = torch.sqrt(target * aspect).round(), torch.sqrt(target / aspect).round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    box_height = torch.where(fits.any(1), tall.gather(1, first)[:, 0], 0.0)
    box_width = wide.gather(1, first)[:, 0]
    top = torch.floor(numbers[:, -3] * (height - box_height + 1))
    left = torch.floor(numbers[:, -2] * (width - box_width + 1))
    return torch.stack([top, left, box_height, box_width], 1).float()


def erase(images: Tensor, boxes: Tensor, noise_start: Tensor) -> Tensor:
    """Fill each image's box (B, 4) with standard normal noise, pixel by pixel.

    The noise is a part of one long stored sequence; ``noise_start`` (B,) in 0..2^20 is where it starts. So it is the
    same on every device and in every process, without a random generator on the device.
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    top, left, tall, wide = (part.view(-1, 1, 1, 1) for part in boxes.unbind(1))
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    length = channels * height * width
    every_start = _noise(length, images.device).unfold(0, length, 1)  # a view: row s is the sequence from s
    noise = every_start.index_select(0, noise_start).view(batch, channels, height, width)
    return torch.where(inside, noise.to(images.dtype), images)


@functools.lru_cache(maxsize=8)
def _noise(extra: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20211)
    return torch.randn(_NOISE_LENGTH + extra, generator=generator).to(device)


def noise_starts(numbers: Tensor) -> Tensor:
    """Turn uniform numbers (B,) in [0, 1) into starts in the noise sequence."""
    return (numbers * _NOISE_LENGTH).long()
