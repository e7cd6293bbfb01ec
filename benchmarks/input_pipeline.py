"""Images per second of the input alone: batched on the device, against a DataLoader with torchvision.

Both start from the same decoded images in memory and yield normalized batches on the device. The result is the median
over rounds. A round runs both, so that a busy machine slows both.

    python benchmarks/input_pipeline.py --task supervised --size 64
    python benchmarks/input_pipeline.py --task multicrop --size 224 --batch 64 --device cuda --workers 2
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from frugalvit.config.data import AugmentConfig, CropsConfig, MixingConfig
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.loader import Batches
from torchvision_input import InMemoryDataset, TorchvisionCrops, make_loader, repeat_forever, supervised_transform

CLASSES = 10


def synthetic(count: int, size: int) -> Tensor:
    """Smooth random images, uint8: constant ones would make histogram operations too easy."""
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return v2.functional.resize(coarse, [size, size], antialias=True).mul(255).round().to(torch.uint8)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    stored = options.size if options.size <= 64 else round(options.size * 256 / 224)
    images = synthetic(options.images, stored)
    labels = torch.arange(len(images)) % CLASSES
    if options.task == "supervised":
        augment: Any = TrainAugment(AugmentConfig(), options.size)
        transform: Any = supervised_transform(options.size)
        mixing: Mixing | None = Mixing(MixingConfig(), CLASSES)
    else:
        augment, mixing = MultiCrop(CropsConfig(), options.size), None
        transform = TorchvisionCrops(CropsConfig(), options.size)
    batches = Batches(
        CachedStore.from_arrays(images, labels, device), options.batch, seed=0, augment=augment, mixing=mixing
    )

    # The DataLoader's workers start and stop in every round, so that ours has the machine to itself.
    dataset = InMemoryDataset(images, labels, transform)
    ours: list[float] = []
    theirs: list[float] = []
    step = 0
    for _ in range(options.rounds + 1):
        wait(device)
        began = time.perf_counter()
        for _ in range(options.steps):
            batches.batch_at(step)
            step += 1
        wait(device)
        ours.append(options.steps * options.batch / (time.perf_counter() - began))
        if options.alone:
            continue
        loader = make_loader(dataset, options.batch, options.workers)
        source = repeat_forever(loader, device)
        for _ in range(
            max(1, 2 * options.workers)
        ):  # batches that were prepared while the workers started do not count
            next(source)
        began = time.perf_counter()
        for _ in range(options.reference_steps):
            next(source)
        wait(device)
        theirs.append(options.reference_steps * options.batch / (time.perf_counter() - began))
        del source, loader  # stops the workers
    result: dict[str, Any] = vars(options) | {"frugalvit": round(statistics.median(ours[1:]), 1)}
    if theirs:
        result["dataloader"] = round(statistics.median(theirs[1:]), 1)
        result["ratio"] = round(result["frugalvit"] / result["dataloader"], 2)
    if options.profile:
        with torch.profiler.profile() as profile:
            batches.batch_at(step)
            wait(device)
        by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60), file=sys.stderr)
    if device.type == "cuda":
        began = time.perf_counter()
        batches.batch_at(step)  # the time to enqueue a batch: the host runs ahead of the device
        result["host_ms"] = round(1000 * (time.perf_counter() - began), 2)
        result["device"] = torch.cuda.get_device_name()
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["supervised", "multicrop"], default="supervised")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the DataLoader")
    parser.add_argument("--steps", type=int, default=8, help="batches in a round")
    parser.add_argument("--reference-steps", type=int, default=4, help="batches of the DataLoader in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="do not run the DataLoader")
    parser.add_argument("--profile", action="store_true", help="print where one batch's time goes")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
