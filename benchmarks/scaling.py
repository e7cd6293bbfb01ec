"""Print the tables of docs/SCALING.md from measured rates: bytes, images per second, steps, hours.

    python benchmarks/scaling.py --supervised 6134 --pretrain 798 --decode 213

This is arithmetic: the rates of one GPU and one core are measured, the rest follows from sizes.
"""

import argparse
from dataclasses import dataclass

GPUS = (8, 64, 512)
JPEG = 110e3  # bytes of an ImageNet photo: 138 GiB / 1.28 million
LINK = 50e9  # bytes a second between machines and GPU (400 Gbit/s each way)
PARAMETERS = {"supervised": 28.3e6, "pretrain": 74.4e6}  # Swin-T; with two heads of 65,536 prototypes


@dataclass(frozen=True)
class Case:
    """A dataset and the number of epochs."""

    name: str
    images: float
    epochs: int

    @property
    def seen(self) -> str:
        return f"{self.name}, {'once' if self.epochs == 1 else f'{self.epochs} epochs'}"


CASES = (Case("ImageNet-22K", 14.2e6, 30), Case("a billion images", 1e9, 1))


def row(case: Case, task: str, rate: float, decode: float, gpus: int, batch: int) -> str:
    """Make one line: images/s, steps, hours, cores to decode, bytes/s to read, share of the all-reduce."""
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
    options = parser.parse_args()
    head = "| data | GPUs | images/s | batch | steps | hours | cores a GPU | GB/s read | reduction |"
    for task, rate, batch in (("supervised", options.supervised, 256), ("pretrain", options.pretrain, 64)):
        print(f"\n{task}, {rate:,.0f} images/s a GPU\n\n{head}\n|{' --- |' * 9}")
        for case in CASES:
            for gpus in GPUS:
                print(row(case, task, rate, options.decode, gpus, batch))
    for case in CASES:
        encoded, decoded = case.images * JPEG / 1e12, case.images * 3 * 256 * 341 / 1e12
        print(f"\n{case.name}: {encoded:.1f} TB of JPEGs, {decoded:.1f} TB decoded at 256 × 341")


if __name__ == "__main__":
    main()
