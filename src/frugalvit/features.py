"""Features: the final grid of tokens, which both papers train on, and its pooled vector."""

from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """The output of a backbone for a batch of images.

    grid:   (B, D, h, w), the final tokens at their positions in the image
    pooled: (B, D), the input of the classifier: the class token, or the mean of the tokens; a few networks, such as
            MobileNetV3, have a wider one
    """

    grid: Tensor
    pooled: Tensor
