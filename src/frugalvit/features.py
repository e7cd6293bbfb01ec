"""The one thing both papers act on: the grid of tokens a network ends with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """What a backbone makes of a batch of images.

    grid:   (B, D, h, w), the final tokens, where they lie in the image
    pooled: (B, D), what the classifier sees: the class token, or the mean of the tokens; of a few networks, such as
            MobileNetV3, wider than the grid
    """

    grid: Tensor
    pooled: Tensor
