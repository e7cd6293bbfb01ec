"""The tables of docs/SCALING.md from measured rates: bytes, images a second, steps, hours, and what saturates first.

    python benchmarks/scaling.py --supervised 6134 --pretrain 798 --decode 213

Arithmetic, not a measurement: the rates are those of one GPU and one core, the rest follows from sizes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

GPUS = (8, 64, 512)
JPEG = 110e3  # bytes of an ImageNet photo: 138 GiB / 1.28 million
LINK = 50e9  # bytes a second between machines and GPU (400 Gbit/s each way)
PARAMETERS = {"supervised": 28.3e6, "pretrain": 74.4e6}  # Swin-T; with two heads of 65,536 prototypes


@dataclass(frozen=True)
class Case:
    """A dataset and how often it is seen."""

    name: str
    images: float
    epochs: int

    @property
    def seen(self) -> str:
        return f"{self.name}, {'once' if self.epochs == 1 else f'{self.epochs} epochs'}"


CASES = (Case("ImageNet-22K", 14.2e6, 30), Case("a billion images", 1e9, 1))


def row(case: Case, task: str, rate: float, decode: float, gpus: int, batch: int) -> str:
    """One line: total images/s, steps, hours, cores to decode, bytes/s to read, share of a step spent reducing."""
    total, seen = rate * gpus, case.images * case.epochs
    step = batch / rate
    reduce = 2 * (gpus - 1) / gpus * 4 * PARAMETERS[task] / LINK
    hours = seen / total / 3600
    cells = [
        case.seen if gpus == GPUS[0] else "",
        f"{gpus}",
        f"{total:,.0f}",
        f"{batch * gpus:,}",
        f"{seen / (batch * gpus):,.0f}",
        f"{hours:,.1f}" if hours >= 0.1 else f"{hours:.2f}",
        f"{rate / decode:.1f}",
        f"{total * JPEG / 1e9:.1f}",
        f"{100 * reduce / step:.1f} %",
    ]
    return ("| " + " | ".join(cells) + " |").replace("|  |", "| |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--supervised", type=float, default=6134, help="images/s of one GPU, batch 256")
    parser.add_argument("--pretrain", type=float, default=798, help="images/s of one GPU, batch 64")
    parser.add_argument("--decode", type=float, default=213, help="JPEGs/s of one CPU core")
    given = parser.parse_args()
    head = "| data | GPUs | images/s | batch | steps | hours | cores a GPU | GB/s read | reduction |"
    for task, rate, batch in (("supervised", given.supervised, 256), ("pretrain", given.pretrain, 64)):
        print(f"\n{task}, {rate:,.0f} images/s a GPU\n\n{head}\n|{' --- |' * 9}")
        for case in CASES:
            for gpus in GPUS:
                print(row(case, task, rate, given.decode, gpus, batch))
    for case in CASES:
        encoded, decoded = case.images * JPEG / 1e12, case.images * 3 * 256 * 341 / 1e12
        print(f"\n{case.name}: {encoded:.1f} TB of JPEGs, {decoded:.1f} TB decoded at 256 × 341")


if __name__ == "__main__":
    main()
