"""The baseline input: a DataLoader whose workers decode and transform images one by one with torchvision.

Nothing trains with it. Benchmarks compare our input with it, with the same augmentation of the same images.
"""

from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from frugalvit.config.data import CropsConfig
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import local_crop_size
from frugalvit.data.augmentation.transforms import IMAGENET_MEAN, IMAGENET_STD, default_crop
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.loader import Batch


class InMemoryDataset(Dataset[Any]):
    """Decoded images in memory, from (B, C, H, W) uint8, with transforms per image."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Any) -> None:
        self.images = [v2.functional.to_pil_image(image) for image in images]
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.labels[index]


class FileDataset(Dataset[Any]):
    """Images in files, which are read and decoded in every epoch."""

    def __init__(self, examples: ImageDataset, transform: Any) -> None:
        self.examples, self.transform = examples, transform

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        label = 0 if self.examples.labels is None else int(self.examples.labels[index])
        return self.transform(Image.fromarray(self.examples.read(index))), label


def supervised_transform(size: int) -> Any:
    """Crop, flip, RandAugment and erasing as in ``TrainAugment``, by torchvision."""
    crop: Any = v2.RandomCrop(size, padding=4)
    if default_crop(size) == "resized":
        crop = v2.RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.RandAugment(2, 9), *_normalize(), v2.RandomErasing(0.25)])


class TorchvisionCrops:
    """DINO's multi-crop as in ``MultiCrop``, by torchvision, one crop after the other."""

    def __init__(self, config: CropsConfig, size: int) -> None:
        (local, _) = local_crop_size(config, (size, size))
        ranges = config.views(size)
        blur = v2.GaussianBlur(13, ranges.blur_sigma)

        def view(out: int, scale: tuple[float, float], blurred: float, solarized: float) -> Any:
            return v2.Compose(
                [
                    v2.RandomResizedCrop(out, scale=scale, interpolation=InterpolationMode.BICUBIC),
                    v2.RandomHorizontalFlip(config.flip),
                    v2.RandomApply([v2.ColorJitter(*config.jitter)], config.jitter_prob),
                    v2.RandomGrayscale(config.grayscale),
                    v2.RandomApply([blur], blurred),
                    v2.RandomSolarize(128, solarized),
                    *_normalize(),
                ]
            )

        first = view(size, ranges.global_scale, config.blur_first, 0.0)
        second = view(size, ranges.global_scale, config.blur_global, config.solarize)
        small = view(local, ranges.local_scale, config.blur_local, 0.0)
        self.views = [first, second, *[small] * config.local_crops]

    def __call__(self, image: Any) -> list[Tensor]:
        return [view(image) for view in self.views]


def make_loader(dataset: Dataset[Any], batch: int, workers: int) -> DataLoader[Any]:
    """Make a DataLoader of shuffled, full batches; each worker has one thread."""
    options: dict[str, Any] = {"num_workers": workers, "worker_init_fn": _use_one_thread}
    if workers:  # spawned: a forked worker may wait forever for threads of its parent
        options |= {"prefetch_factor": 2, "persistent_workers": True, "multiprocessing_context": "spawn"}
    return DataLoader(dataset, batch, shuffle=True, drop_last=True, **options)


def repeat_forever(loader: DataLoader[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Yield (images or list of crops, labels) on the device, epoch after epoch."""
    while True:
        for images, labels in loader:
            moved = [crop.to(device) for crop in images] if isinstance(images, list) else images.to(device)
            yield moved, labels.to(device)


class TorchvisionBatches:
    """A DataLoader with the interface of ``Batches``; the step number is ignored."""

    def __init__(self, loader: DataLoader[Any], augment: Any, mixing: Mixing | None, device: torch.device) -> None:
        self.augment, self.mixing = augment, mixing
        self.source = repeat_forever(loader, device)
        self.generator = torch.Generator().manual_seed(0)
        self.seed, self.rank, self.world = 0, 0, 1

    def batch_at(self, step: int) -> Batch:
        images, labels = next(self.source)
        if self.mixing is None:
            return Batch(images, labels, labels, torch.arange(len(labels)))
        mixed, targets = self.mixing(images, labels, self.generator)
        return Batch(mixed, targets, labels, torch.arange(len(labels)))


def _normalize() -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def _use_one_thread(_: int) -> None:
    torch.set_num_threads(1)
