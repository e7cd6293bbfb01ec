"""Time and peak memory of the losses: the papers' algorithms, plain tensors, and chunked.

    python benchmarks/losses.py                                                  # two CPU cores, a minute or two
    python benchmarks/losses.py --device cuda --batch 64 --prototypes 65536      # one GPU, bf16

Every loss is timed forward and backward, from backbone features to the gradients of features and head. "as written"
is Algorithm 1 of EsViT (a loop over crop pairs with a full log-softmax each) and the pseudocode of Drloc (gather, then
concatenate). Ratios are relative to it.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.features import Features
from frugalvit.objectives import RegionMatching, RelativeLocalization, ViewMatching, draw_pairs, match_regions

Step = Callable[[], Tensor]
MATCHING = ("as written", "plain", "chunked")
WAYS = {"views": MATCHING, "regions": MATCHING, "localization": ("as written", "64 pairs", "all pairs")}


def features(batch: int, dim: int, local_crops: int, device: str) -> list[Features]:
    """Final grids of 2 global (7×7) and some local (3×3) crops, in the precision autocast would give."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    crops = []
    for side in [7, 7] + [3] * local_crops:
        grid = torch.randn(batch, dim, side, side, device=device, dtype=dtype, requires_grad=True)
        crops.append(Features(grid, grid.mean((2, 3))))
    return crops


def as_written(matching: ViewMatching | RegionMatching, crops: list[Features], temperature: float) -> Tensor:
    """Eq. 1 or 2 as a loop over pairs of crops."""
    regions = isinstance(matching, RegionMatching)
    terms = []
    students = [matching.student(matching._rows(crop)).float() for crop in crops]
    with torch.no_grad():
        teachers = [matching.teacher(matching._rows(crop)).float() for crop in crops[:2]]
    for t, teacher in enumerate(teachers):
        target = F.softmax((teacher - matching.center) / temperature, dim=-1)
        for s, student in enumerate(students):
            if s == t:
                continue
            matched = target
            if regions:
                index = match_regions(crops[s].grid, crops[t].grid)
                matched = torch.gather(target, 1, index[..., None].expand(-1, -1, target.shape[2]))
            terms.append((-matched * F.log_softmax(student / matching.student_temp, dim=-1)).sum(-1).mean())
    return torch.stack(terms).mean()


def localization_as_written(module: RelativeLocalization, grid: Tensor) -> Tensor:
    """The supplement's pseudocode: positions on the host, columns of a flattened grid, concatenation, L1."""
    batch, channels, height, width = grid.shape
    first, second = draw_pairs(batch, (height, width), 64)
    first, second = first.to(grid.device), second.to(grid.device)
    flat = grid.view(batch, channels, -1).permute(1, 0, 2).reshape(channels, -1)
    start = torch.arange(batch, device=grid.device)[:, None] * height * width
    ends = [
        flat[:, (start + cell[..., 0] * width + cell[..., 1]).view(-1)].view(channels, batch, -1).permute(1, 2, 0)
        for cell in (first, second)
    ]
    return F.l1_loss(module.layers(torch.cat(ends, dim=2)).float(), (first - second).abs().float() / height)


@cache
def steps(batch: int, prototypes: int, dim: int, local_crops: int, device: str) -> dict[str, dict[str, Step]]:
    """Map loss -> implementation -> a function that computes the loss."""
    crops = features(batch, dim, local_crops, device)
    groups: dict[str, dict[str, Step]] = {}
    for name, kind in (("views", ViewMatching), ("regions", RegionMatching)):
        matching = kind(dim, prototypes=prototypes).to(device)

        def run(chunked: bool, matching: ViewMatching | RegionMatching = matching) -> Tensor:
            matching.chunked = chunked
            return matching(crops, crops[:2], 0.04)

        groups[name] = {
            "as written": lambda matching=matching: as_written(matching, crops, 0.04),
            "plain": lambda run=run: run(False),
            "chunked": lambda run=run: run(True),
        }
    grid = crops[0].grid
    sixty_four, every = RelativeLocalization(dim).to(device), RelativeLocalization(dim, pairs="all").to(device)
    groups["localization"] = {
        "as written": lambda: localization_as_written(sixty_four, grid),
        "64 pairs": lambda: sixty_four(grid),
        "all pairs": lambda: every(grid),
    }
    return groups


def measure(step: Step, device: str, repeats: int) -> tuple[float, float]:
    """Measure median milliseconds, and the peak memory in MiB above that before."""

    def once() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = step()
        loss.backward()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    if device == "cuda":
        for _ in range(3):
            once()
        wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident("VmRSS")
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        once()
        wait()
        times.append(1000 * (time.perf_counter() - start))
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resident("VmHWM")
    return statistics.median(times), (peak - before) / 2**20


def resident(which: str) -> int:
    """Bytes of memory of this process: now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def measure_one(
    loss: str, way: str, sizes: tuple[int, int, int, int], device: str, repeats: int
) -> tuple[float, float]:
    """Measure one implementation of one loss."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    return measure(steps(*sizes, device)[loss][way], device, repeats)


def measure_in_process(*arguments: Any) -> tuple[float, float]:
    """Measure in a new process: on a CPU the peak memory is that of the process.

    It is spawned: a forked one would wait forever for the parent's threads.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_one, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="images (64 on a GPU, 4 on a CPU)")
    parser.add_argument("--prototypes", type=int, help="65,536 on a GPU, 16,384 on a CPU")
    parser.add_argument("--dim", type=int, default=768, help="channels of the backbone's features")
    parser.add_argument("--local-crops", type=int, default=8)
    parser.add_argument("--repeats", type=int, help="20 on a GPU, 3 on a CPU")
    parser.add_argument("--only", choices=["views", "regions", "localization"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    batch = options.batch or (64 if on_gpu else 4)
    prototypes = options.prototypes or (65536 if on_gpu else 16384)
    repeats = options.repeats or (20 if on_gpu else 3)
    sizes = (batch, prototypes, options.dim, options.local_crops)
    run = measure_one if on_gpu else measure_in_process

    rows = []
    for loss, ways in WAYS.items():
        if options.only not in (None, loss):
            continue
        reference: tuple[float, float] | None = None
        for way in ways:
            milliseconds, mebibytes = run(loss, way, sizes, options.device, repeats)
            reference = reference or (milliseconds, mebibytes)
            rows.append(
                {
                    "loss": loss,
                    "way": way,
                    "milliseconds": round(milliseconds, 3),
                    "peak_mib": round(mebibytes, 1),
                    "times_faster": round(reference[0] / milliseconds, 2),
                    "share_of_memory": round(mebibytes / reference[1], 3) if reference[1] > 0 else None,
                }
            )
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    setting = {"device": name, "torch": torch.__version__, "batch": batch, "prototypes": prototypes}
    if options.json:
        json.dump({**setting, "rows": rows}, sys.stdout, indent=2)
        print()
        return
    print(f"{name}, torch {torch.__version__}, batch {batch}, {prototypes:,} prototypes, forward and backward\n")
    print("| loss | way | ms | times faster | peak MiB | share of memory |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['loss']} | {row['way']} | {row['milliseconds']:.2f} | {row['times_faster']:.2f} "
            f"| {row['peak_mib']:.0f} | {row['share_of_memory']} |"
        )


if __name__ == "__main__":
    main()
