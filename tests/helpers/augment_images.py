"""Images for the tests of augmentation."""

import pytest
import torch
from torch import Tensor

LEVEL = 1 / 255
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def pictures(count: int = 6, height: int = 24, width: int = 20, seed: int = 0) -> Tensor:
    """Return uint8 images that break histograms and hues: noise, a gradient, a flat one, one of few values."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (max(count, 6), 3, height, width), generator=generator, dtype=torch.uint8)
    images[1] = torch.linspace(0, 255, width).round().to(torch.uint8)
    images[2] = 77
    images[3] = images[3] // 128 * 100
    images[4] = images[4, :1]
    return images[:count]
