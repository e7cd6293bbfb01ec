"""Transforms from cached images to network inputs: training and evaluation; ``multicrop.py`` has those of views.

Cached uint8 images are photos: colour operations see them in [0, 1], and normalization comes last. float32 images keep
the values of their files: normalization comes first, and colour operations are left out.

Each transform declares how many uniform numbers it uses per image (``columns``). ``apply`` is a pure function of
images, sizes and those numbers; calling the transform draws them first. ``operations`` and ``crop_resize`` contain
the operations, and ``randaugment`` chooses those of each image.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from frugalvit.config.data import SMALL_INPUT, AugmentConfig
from frugalvit.config.semi_supervised import SemiConfig
from frugalvit.data.augmentation import operations
from frugalvit.data.augmentation.crop_resize import (
    RANDOM_BOX_COLUMNS,
    boxes_from_uniform,
    center_boxes,
    crop_resize,
    pad_crop,
)
from frugalvit.data.augmentation.operations import luma
from frugalvit.data.augmentation.randaugment import (
    ColorJitter,
    RandAugment,
    blur_kernel_size,
    blur_step,
    chosen,
    run_steps,
)
from frugalvit.data.decode import PHOTO, PixelFormat, as_pixels
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.data.rng import to_device_packed, uniform
from frugalvit.errors import UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Size = int | tuple[int, int]


class Augment(ABC):
    """The interface of a training transform for the loader.

    columns: uniform numbers per image.   repeats: copies of an image in a batch.   pixels: in all views of an image.
    """

    columns: int
    repeats: int = 1
    pixels: int

    def __call__(self, images: Tensor, sizes: Tensor, generator: torch.Generator) -> Any:
        return self.apply(images, sizes, uniform(len(images), self.columns, generator))

    @abstractmethod
    def apply(self, images: Tensor, sizes: Tensor, numbers: Tensor) -> Any:
        """images (B, C, S, S') on the device, sizes (B, 2) and numbers (B, columns) on the CPU."""


def as_pair(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise UserError(f"The image size {height} x {width} is not positive.")
    return height, width


class Normalize:
    """(x - mean) / std per channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or min(std) <= 0:
            raise UserError(f"mean {tuple(mean)} and std {tuple(std)} must have equal lengths and std above 0.")
        self.mean, self.std = tuple(mean), tuple(std)
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and 1/std (1, C, 1, 1), copied to the device once."""
        if device not in self._on:
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
            self._on[device] = (mean.to(device), (1 / std).to(device))
        return self._on[device]

    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1] == 3 and len(self.mean) == 1:  # the network has one input channel
            images = luma(images)
        elif images.shape[1] not in (1, len(self.mean)):
            raise UserError(f"The network takes images of {len(self.mean)} channels; these have {images.shape[1]}.")
        mean, inverse = self.statistics(images.device)
        return (images - mean).mul_(inverse)


class TrainAugment(Augment):
    """Supervised training, in timm's order: crop, flip, RandAugment, jitter, grey, blur, normalize, erase.

    ``experiment/resolve.py`` resolves operations "auto" for a run; otherwise "auto" is 2.

    >>> augment = TrainAugment(AugmentConfig(), 224)
    >>> batch = augment(stored_images, sizes, generator)          # (B, 3, 224, 224), normalized
    """

    def __init__(
        self,
        config: AugmentConfig,
        out_size: Size,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        self.config, self.out_size, self.repeats = config, as_pair(out_size), config.repeats
        self.pixels = math.prod(self.out_size)
        self.normalize = Normalize(mean, std)
        self.crop = default_crop(max(self.out_size)) if config.crop == "auto" else config.crop
        layers = 2 if config.operations == "auto" else config.operations
        self.rand = RandAugment(layers, config.operation_prob, config.magnitude, config.magnitude_std)
        self.jitter = ColorJitter(config.jitter, config.jitter_prob)
        self.widths = {
            "box": RANDOM_BOX_COLUMNS if self.crop == "resized" else 2,
            "flip": 1,
            "rand": self.rand.columns,
            "jitter": self.jitter.columns,
            "gray": 1,
            "blur": 2,
            "erase": 1 + operations.ERASING_COLUMNS,
        }
        self.columns = sum(self.widths.values())

    def apply(self, images: Tensor, sizes: Tensor, numbers: Tensor) -> Tensor:
        parts = dict(zip(self.widths, numbers.split(list(self.widths.values()), 1), strict=True))
        config, is_photo = self.config, images.dtype == torch.uint8
        batch = self._cropped(images if is_photo else self.normalize(images), sizes, parts["box"], self.flips(numbers))
        steps = self.rand.plan(parts["rand"], self.out_size)
        steps += self.jitter.plan(parts["jitter"])
        steps.append(chosen("grayscale", parts["gray"][:, 0], config.grayscale))
        steps.append(blur_step(parts["blur"], config.blur, config.blur_sigma))
        fill, affine = self.normalize.statistics(batch.device)[0], config.affine
        if not is_photo:
            steps = [step for step in steps if step.operation in ("affine", "blur")]
            fill, affine = torch.zeros_like(fill), "bilinear"  # bicubic overshoots: it needs the range of photos
        batch = run_steps(batch, steps, fill, blur_kernel_size(config.blur_sigma), affine)
        return self._erased(self.normalize(batch) if is_photo else batch, parts["erase"])

    def flips(self, numbers: Tensor) -> Tensor:
        """Return which images ``apply`` flips with these numbers: (B,) bool on the CPU."""
        return numbers[:, self.widths["box"]] < self.config.flip

    def _cropped(self, images: Tensor, sizes: Tensor, numbers: Tensor, flips: Tensor) -> Tensor:
        config = self.config
        if self.crop == "resized":
            boxes = boxes_from_uniform(sizes, config.scale, config.ratio, numbers, self.out_size)
            return crop_resize(images, sizes, boxes, flips, self.out_size, config.interpolation)
        has_out_size = images.shape[-2:] == self.out_size and bool((sizes == torch.tensor(self.out_size)).all())
        if self.crop == "center" or not has_out_size:
            boxes = center_boxes(sizes, self.out_size, 1.0)
            early = flips if self.crop == "center" else None
            images = crop_resize(images, sizes, boxes, early, self.out_size, config.interpolation, border="image")
        if self.crop == "padded":
            corners = torch.floor(numbers * (2 * config.padding + 1)).long()
            images = pad_crop(images, corners, flips, config.padding)
        return images.float().div_(255) if images.dtype == torch.uint8 else images

    def _erased(self, batch: Tensor, numbers: Tensor) -> Tensor:
        config = self.config
        rows = (numbers[:, 0] < config.erasing).nonzero()[:, 0]
        if not len(rows):
            return batch
        numbers = numbers[rows, 1:]
        boxes = operations.erasing_boxes(numbers, self.out_size, config.erasing_area, (0.3, 1 / 0.3))
        rows, boxes, starts = to_device_packed([rows, boxes, operations.noise_starts(numbers[:, -1])], batch.device)
        return batch.index_copy_(0, rows, operations.erase(batch.index_select(0, rows), boxes, starts))


class WeakStrongViews(Augment):
    """Two views of an unlabelled image: a weak one for its pseudo-label, a strong one to learn it on (FixMatch).

    Both crop and flip as ``augment`` says. The strong view also has RandAugment with random magnitudes and an erased
    rectangle, as in FlexMatch and SoftMatch.
    """

    def __init__(
        self,
        augment: AugmentConfig,
        semi: SemiConfig,
        out_size: Size,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        none = {"jitter": (0.0, 0.0, 0.0, 0.0), "grayscale": 0.0, "blur": 0.0, "repeats": 1}
        weak = none | {"operations": 0, "erasing": 0.0, "scale": semi.weak_scale}
        strong = none | {"operations": semi.operations, "operation_prob": 1.0, "magnitude": 10.0}
        strong |= {"magnitude_std": math.inf, "erasing": semi.erasing, "erasing_area": (0.02, 0.25)}
        self.views = [TrainAugment(augment.model_copy(update=values), out_size, mean, std) for values in (weak, strong)]
        self.widths = [view.columns for view in self.views]
        self.columns, self.pixels = sum(self.widths), sum(view.pixels for view in self.views)

    def apply(self, images: Tensor, sizes: Tensor, numbers: Tensor) -> list[Tensor]:
        """Return [weak, strong], each (B, C, h, w); arguments as for ``TrainAugment``."""
        parts = numbers.split(self.widths, 1)
        return [view.apply(images, sizes, part) for view, part in zip(self.views, parts, strict=True)]


def default_crop(side: int) -> Literal["padded", "resized"]:
    """Return the crop for training images of this size: a resized crop leaves too little of a small image."""
    return "padded" if side <= SMALL_INPUT else "resized"


class EvalTransform:
    """Resize the shorter edge to out / crop_pct, crop the centre, normalize; no randomness.

    ``crop_pct`` "auto" is 0.875, and 1 up to 64 pixels, because small images lose too much at the border. ``crop``
    makes the pixels: training's evaluation, every command and every export use the same ones. ``pixel_type`` is that
    of the images: uint8 for 8-bit RGB; other types have one channel per number of ``mean``.
    """

    def __init__(
        self,
        out_size: Size,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        crop_pct: float | str = "auto",
        interpolation: str = "bicubic",
        squash: bool = False,
        pixel_type: str = "uint8",
    ) -> None:
        self.out_size = as_pair(out_size)
        self.pixels = PHOTO if pixel_type == "uint8" else PixelFormat(pixel_type, len(mean))
        share = (1.0 if max(self.out_size) <= 64 else 0.875) if crop_pct == "auto" else float(crop_pct)
        if not 0 < share <= 1:
            raise UserError(f"crop_pct {share} is not above 0 and at most 1: the crop would not fit the image.")
        if interpolation.upper() not in Image.Resampling.__members__:
            raise UserError(f"interpolation {interpolation!r} is not one of bilinear, bicubic, lanczos, nearest, box.")
        self.crop = CenterCrop(self.out_size, share, interpolation, squash)
        self.normalize = Normalize(mean, std)

    def __call__(self, crops: Tensor) -> Tensor:
        """Normalize the results of ``crop``, (B, C, h, w) on any device, to floats."""
        assert crops.shape[-2:] == self.out_size, (crops.shape, self.out_size)
        return self.normalize(crops.float().div_(255) if crops.dtype == torch.uint8 else crops)

    def image(self, picture: Any, device: torch.device | str = "cpu") -> Tensor:
        """Transform one image of any kind that :func:`as_pixels` accepts: (1, C, h, w)."""
        pixels = as_pixels(picture, self.pixels)
        if pixels.shape[2] == 1 and self.pixels == PHOTO:
            pixels = np.repeat(pixels, 3, 2)
        return self(torch.from_numpy(self.crop(pixels)).permute(2, 0, 1)[None].to(device))

    def spec(self) -> dict[str, Any]:
        """Return the arguments that create this transform."""
        return {
            "out_size": list(self.out_size),
            "mean": list(self.normalize.mean),
            "std": list(self.normalize.std),
            "crop_pct": self.crop.crop_pct,
            "interpolation": self.crop.interpolation,
            "squash": self.crop.squash,
        } | ({} if self.pixels == PHOTO else {"pixel_type": self.pixels.type})
