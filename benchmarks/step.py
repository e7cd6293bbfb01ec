"""Images a second and peak memory of a whole training step: input, forward, losses, backward, optimiser, averages.

    python benchmarks/step.py pretrain --batch 64 --prototypes 65536
    python benchmarks/step.py train --batch 256

Images are random bytes in the cache, augmentation is real. ``--against`` times the paper's algorithm as written in the
same run (a loop over pairs of crops with full softmax, transforms by CPU workers left out) and prints the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import frugalvit as fv
from frugalvit.config.data import AugmentConfig, CropsConfig, MixingConfig
from frugalvit.config.train import LocalizationConfig
from frugalvit.data.augment import MultiCrop, TrainAugment
from frugalvit.data.loader import Batches
from frugalvit.data.mixing import Mixing
from frugalvit.data.store import ImageStore
from frugalvit.objectives import RegionMatching, RelativeLocalization, ViewMatching
from frugalvit.training.gradients import clip_each, gate, guard_of
from frugalvit.training.schedules import Constant
from frugalvit.training.selfsupervised import PretrainTask
from frugalvit.training.supervised import SupervisedTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["train", "pretrain"])
    parser.add_argument("--backbone", default="swin_tiny_w7")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prototypes", type=int, default=65536)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--weight", type=float, default=0.5, help="of the localization loss in a supervised step")
    parser.add_argument("--chunked", choices=["auto", "yes", "no"], default="auto")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    task, batches = make(options)
    print(json.dumps(measure(task, batches, options)), flush=True)


def make(options: argparse.Namespace) -> tuple[nn.Module, Batches]:
    device, size, classes = torch.device(options.device), options.img_size, 100
    stored = round(size * 256 / 224)
    pixels = torch.randint(0, 256, (options.images, 3, stored, stored), dtype=torch.uint8)
    store = ImageStore.from_arrays(pixels, torch.randint(0, classes, (options.images,)), device)
    if options.kind == "train":
        backbone = fv.create_backbone(options.backbone, img_size=size, num_classes=classes)
        localization = RelativeLocalization(backbone.dim) if options.weight else None
        weight = Constant(options.weight)
        task: nn.Module = SupervisedTask(backbone, localization, LocalizationConfig(), weight, ema=0.999)
        augment, mixing = TrainAugment(AugmentConfig(), size), Mixing(MixingConfig(), classes)
        compiled = [backbone]
    else:
        student = fv.create_backbone(options.backbone, img_size=size, drop_path=0.1)
        teacher = fv.create_backbone(options.backbone, img_size=size, drop_path=0.0)
        chunked = {"auto": "auto", "yes": True, "no": False}[options.chunked]
        heads = {"prototypes": options.prototypes, "chunked": chunked}
        task = PretrainTask(
            student,
            teacher,
            views=ViewMatching(student.dim, **heads),
            regions=RegionMatching(student.dim, **heads),
            teacher_temp=Constant(0.04),
            momentum=Constant(0.996),
            health_every=10**9,
        )
        augment, mixing = MultiCrop(CropsConfig(), size), None
        compiled = [student, teacher]
    batches = Batches(store, options.batch, seed=0, augment=augment, mixing=mixing)
    task.batches = batches  # type: ignore[assignment]
    task.to(device).train()
    if not options.no_compile and device.type == "cuda":
        for backbone in compiled:
            backbone.compile(dynamic=False)
    return task, batches


def measure(task: nn.Module, batches: Batches, options: argparse.Namespace) -> dict[str, object]:
    device = torch.device(options.device)
    optimizer = torch.optim.AdamW(task.parameter_groups(), lr=1e-4, fused=device.type == "cuda")  # type: ignore[operator]
    guard = guard_of(device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(number: int) -> None:
        batch = batches.batch_at(number)
        with autocast:
            losses = task(batch, number + 1)
        losses["loss"].backward()
        task.before_optimizer(number + 1)  # type: ignore[operator]
        norm = clip_each(parameters, 3.0)
        gate(optimizer, norm, guard)
        optimizer.zero_grad(set_to_none=True)
        task.after_step(number)  # type: ignore[operator]

    warm = time.perf_counter()
    for number in range(6):
        step(number)
    wait(device)
    warm = time.perf_counter() - warm
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, options.steps, device)
    inputs = timed(lambda number: batches.batch_at(number), options.steps, device)
    if options.profile:
        show_profile(step, device)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "kind": options.kind,
        "backbone": options.backbone,
        "batch": options.batch,
        "images_per_second": round(options.batch / seconds, 1),
        "input_images_per_second": round(options.batch / inputs, 1),
        "peak_gib": None if memory is None else round(memory, 2),
        "warm_up_seconds": round(warm, 1),
    }


def timed(action: Callable[[int], object], count: int, device: torch.device) -> float:
    """Median seconds a call, over groups of five calls each with the device idle before and after."""
    groups = []
    for start in range(0, count, 5):
        wait(device)
        began = time.perf_counter()
        for number in range(start, start + 5):
            action(number)
        wait(device)
        groups.append((time.perf_counter() - began) / 5)
    return statistics.median(groups)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show_profile(step: Callable[[int], None], device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        for number in range(3):
            step(number)
        wait(device)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main()
