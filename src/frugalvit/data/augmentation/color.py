"""Batched colour operations: each image of a batch has its own strength.

Images are float (B, C, H, W) in [0, 1]; a strength is a tensor (B,) on the same device. Each function equals
torchvision's functional of that name on the same image and strength. Values stay continuous between operations
(PIL and torchvision round to 1/255 after each); only ``posterize`` and ``equalize`` round to the 256 grey levels.
Colour needs three channels: with another number, ``saturation``, ``hue`` and ``grayscale`` change nothing, and
``contrast`` uses the mean over all channels.
"""

import functools

import torch
from torch import Tensor

_LUMA = (0.2989, 0.587, 0.114)


def luma(images: Tensor) -> Tensor:
    """Grey value (B, 1, H, W): ITU-R 601 weights for three channels, the mean for any other count."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


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
    """Equalise each channel's histogram with PIL's integer table; a channel with too few values stays."""
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
    """Gaussian blur with reflected borders and each image's own sigma, as two banded matrix products Ky · image · Kxᵀ.

    The kernel is torchvision's: exp(-d²/2σ²) over ``kernel_size`` pixels, normalised. Half of it must be smaller than
    height and width, as with every reflecting border; otherwise it is cut.
    """
    height, width = images.shape[-2:]
    radius = min(kernel_size // 2, height - 1, width - 1)
    dtype = torch.float16 if images.is_cuda else images.dtype
    distance = torch.arange(radius + 1, device=images.device)
    sigma = sigma.float().clamp(min=1e-3)[:, None]  # blurs nothing; the square of a smaller sigma is 0
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
    """Count how often pixel i sees pixel j at each distance, with reflections: (radius + 1, length, length)."""
    pixel = torch.arange(length)
    here, there = pixel[:, None], pixel[None, :]
    distance = torch.arange(radius + 1)[:, None, None]
    seen = ((here - there).abs() == distance).float()
    seen += ((here + there) == distance) & (there > 0)  # mirrored at the first pixel
    seen += ((2 * (length - 1) - here - there) == distance) & (there < length - 1)  # mirrored at the last
    return seen.to(device)


def _spread(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)
