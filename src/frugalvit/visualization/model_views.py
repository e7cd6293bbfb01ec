"""The inputs of the visualizations: an image as the model sees it, and the paper's second view of it.

EsViT (Li et al., ICLR 2022), supplement B.5: the second view of a centre crop is mirrored, colour-jittered and grey, so
that the true match of every region is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from frugalvit.backbones import Backbone
from frugalvit.data.augmentation.transforms import Normalize
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import to_picture
from frugalvit.data.preprocessing import on_planes
from frugalvit.utils import console

_JITTER = (0.4, 0.4, 0.2, 0.1)  # of brightness, contrast, saturation and hue


@dataclass(frozen=True)
class Box:
    """A rectangle of the original image, in its pixels."""

    left: float
    top: float
    width: float
    height: float


def centre_box(size: tuple[int, int], shape: tuple[int, int], keep: float = 1.0) -> Box:
    """Return the centred box of an image, ``keep`` times the largest with the aspect ratio of ``shape`` (h, w)."""
    height, width = size
    scale = keep * min(height / shape[0], width / shape[1])
    box_height, box_width = shape[0] * scale, shape[1] * scale
    return Box((width - box_width) / 2, (height - box_height) / 2, box_width, box_height)


def crop_to(pixels: np.ndarray, box: Box, shape: tuple[int, int]) -> Tensor:
    """Crop ``box`` of an image (H, W, C) and resize it to ``shape``: (C, h, w), uint8 as floats in [0, 1]."""
    from PIL import Image

    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    size, kind = (shape[1], shape[0]), Image.Resampling.BICUBIC
    resized = on_planes(pixels, lambda image: image.resize(size, kind, box=corners, reducing_gap=3.0))
    view = torch.from_numpy(resized).permute(2, 0, 1).float()
    return view / 255 if pixels.dtype == np.uint8 else view


def shown(view: Tensor, pixel_type: str) -> Tensor:
    """Return a view (C, h, w) as a picture (3, h, w) in [0, 1]: photos unchanged, other values stretched."""
    if pixel_type == "uint8":
        return view
    return torch.from_numpy(to_picture(view.permute(1, 2, 0).numpy())).permute(2, 0, 1).float() / 255


def model_view(backbone: Backbone, pixels: np.ndarray) -> tuple[Tensor, Box]:
    """Return an image (H, W, C) as the model sees it, (C, h, w): the evaluation's centre crop; and the crop's box."""
    box = centre_box((pixels.shape[0], pixels.shape[1]), backbone.img_size, backbone.eval_crop["crop_pct"])
    return crop_to(pixels, box, backbone.img_size), box


def spread_evenly(examples: ImageDataset, limit: int) -> ImageDataset:
    """Choose at most ``limit`` evenly spaced examples, including the first and the last."""
    count = min(limit, len(examples))
    return examples.subset([round(i * (len(examples) - 1) / max(count - 1, 1)) for i in range(count)])


def input_batches(examples: ImageDataset, backbone: Backbone, size: int, label: str) -> Iterator[Tensor]:
    """Yield batches of examples as the evaluation sees them, without the unreadable ones."""
    keep = backbone.eval_crop["crop_pct"]
    # Decode a JPEG at no more than twice the size of the crop.
    enough = (round(2 * backbone.img_size[0] / keep), round(2 * backbone.img_size[1] / keep))
    batch: list[Tensor] = []
    for index in console.progress(range(len(examples)), label=label):
        try:
            pixels = examples.read(index, at_least=enough)
        except UnreadableImage as error:
            console.warning(f"skipped: {error}")
            continue
        batch.append(model_view(backbone, pixels)[0])
        if len(batch) == size:
            yield torch.stack(batch)
            batch = []
    if batch:
        yield torch.stack(batch)


def model_input(backbone: Backbone, images: Tensor) -> Tensor:
    """Convert images, (B, 3, H, W) in [0, 1] or values of files, to the channels and normalization of the backbone."""
    device = next((parameter.device for parameter in backbone.parameters()), images.device)
    return Normalize(backbone.mean, backbone.std)(images.to(device))


@dataclass(frozen=True)
class SecondView:
    """The paper's second view: mirrored, with probabilities of colour jitter and of a grey image.

    The defaults are those of the released evaluation. Values of other images than photos have no colours.
    """

    jitter: float = 0.8
    grey: float = 1.0

    @classmethod
    def of(cls, pixel_type: str) -> Self:
        return cls() if pixel_type == "uint8" else cls(jitter=0.0, grey=0.0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Transform images (B, 3, H, W) in [0, 1]; each draws its own colours from ``generator`` (on the CPU)."""
        return torch.stack([self._transform_image(image, generator) for image in images])

    def _transform_image(self, image: Tensor, generator: torch.Generator) -> Tensor:
        draws = torch.rand(6, generator=generator).tolist()
        order = torch.randperm(4, generator=generator).tolist()
        image = image.flip(-1)
        if draws[0] < self.jitter:
            factors = [1 + amount * (2 * draw - 1) for amount, draw in zip(_JITTER, draws[1:5], strict=True)]
            adjust = [
                lambda x: functional.adjust_brightness(x, factors[0]),
                lambda x: functional.adjust_contrast(x, factors[1]),
                lambda x: functional.adjust_saturation(x, factors[2]),
                lambda x: functional.adjust_hue(x, factors[3] - 1),
            ]
            for index in order:
                image = adjust[index](image)
        if draws[5] < self.grey:
            image = functional.rgb_to_grayscale(image, num_output_channels=3)
        return image
