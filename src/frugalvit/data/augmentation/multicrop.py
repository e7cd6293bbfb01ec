"""The crops of pre-training: several global and local views of each image."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from frugalvit.config.data import CropsConfig
from frugalvit.data.augmentation.crop_resize import RANDOM_BOX_COLUMNS, boxes_from_uniform, crop_resize
from frugalvit.data.augmentation.randaugment import ColorJitter, blur_kernel_size, blur_step, chosen, run_steps
from frugalvit.data.augmentation.transforms import IMAGENET_MEAN, IMAGENET_STD, Augment, Normalize, Size, as_pair


class MultiCrop(Augment):
    """Views for pre-training: global crops first, then local ones, each (B, C, h, w), normalized.

    One pair of matrix products makes all crops of one size. Colour operations treat them as one batch.
    """

    def __init__(
        self,
        config: CropsConfig,
        out_size: Size,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        self.config, self.out_size = config, as_pair(out_size)
        self.ranges = config.views(max(self.out_size))
        self.local_size = local_crop_size(config, self.out_size)
        sizes = (config.global_crops, self.out_size), (config.local_crops, self.local_size)
        self.pixels = sum(crops * math.prod(size) for crops, size in sizes)
        self.normalize = Normalize(mean, std)
        self.jitter = ColorJitter(config.jitter, config.jitter_prob)
        self.widths = [RANDOM_BOX_COLUMNS, 1, self.jitter.columns, 1, 2, 1]  # box, flip, jitter, grey, blur, solarise
        self.views = config.global_crops + config.local_crops
        self.columns = self.views * sum(self.widths)

    def apply(self, images: Tensor, sizes: Tensor, numbers: Tensor) -> list[Tensor]:
        images = images if images.dtype == torch.uint8 else self.normalize(images)
        large, numbers = self.config.global_crops, numbers.view(len(images), self.views, -1)
        crops = self._views(images, sizes, numbers[:, :large], self.out_size, is_global=True)
        if self.config.local_crops:
            crops += self._views(images, sizes, numbers[:, large:], self.local_size, is_global=False)
        return crops

    def _views(
        self, images: Tensor, sizes: Tensor, numbers: Tensor, out_size: tuple[int, int], is_global: bool
    ) -> list[Tensor]:
        config = self.config
        scale = self.ranges.global_scale if is_global else self.ranges.local_scale
        batch, views = numbers.shape[:2]
        box, flip, *_ = numbers.split(self.widths, 2)
        every_size = sizes[:, None].expand(batch, views, 2).reshape(-1, 2)
        boxes = boxes_from_uniform(every_size, scale, config.ratio, box.reshape(batch * views, -1), out_size)
        flips = flip[..., 0] < config.flip
        crops = crop_resize(images, sizes, boxes.view(batch, views, 4), flips, out_size, config.interpolation)

        # From here a crop is an image; rows are view-major, as the crops are in memory.
        _, _, jitter, gray, blur, solar = numbers.transpose(0, 1).reshape(views * batch, -1).split(self.widths, 1)
        first = (torch.arange(views) == 0).repeat_interleave(batch)
        if is_global:
            blur_prob = torch.where(first, config.blur_first, config.blur_global)
            solar_prob = torch.where(first, 0.0, config.solarize)
        else:
            blur_prob, solar_prob = torch.full((views * batch,), config.blur_local), torch.zeros(views * batch)
        steps = self.jitter.plan(jitter)
        steps.append(chosen("grayscale", gray[:, 0], config.grayscale))
        sigma = self.ranges.blur_sigma
        steps.append(blur_step(blur, blur_prob, sigma))
        solarized = chosen("solarize", solar[:, 0], solar_prob)
        steps.append(solarized._replace(strength=torch.full((len(solarized.rows),), 127.5 / 255)))
        is_photo = images.dtype == torch.uint8
        steps = steps if is_photo else [step for step in steps if step.operation == "blur"]
        crops = run_steps(crops.flatten(0, 1), steps, blur_size=blur_kernel_size(sigma))
        return list((self.normalize(crops) if is_photo else crops).split(batch))


def local_crop_size(config: CropsConfig, out_size: tuple[int, int]) -> tuple[int, int]:
    """Return the size of local crops: the paper's 96 : 224, rounded to a multiple of 8 for the patch grid."""
    if config.local_size != "auto":
        return as_pair(config.local_size)
    height, width = (max(8, round(side * 96 / 224 / 8) * 8) for side in out_size)
    return height, width
