"""frugalvit beside what a user would run instead, on the same machine and the same image files.

Supervised: timm's loader, mixing, optimizer, EMA and step, as in its train script, against ``frugalvit train``.
Label-free: lightly's DINO against ``frugalvit pretrain``, with the region loss off and on. Both sides have the same
network, batch, input size, precision, augmentation strength and rates. They take turns: a machine's speed drifts.

    python benchmarks/side_by_side.py DATA --task supervised --backbone vit_small_patch16_224 --cores 2 --batch 128
    python benchmarks/side_by_side.py DATA --task label-free --cores 16 --until 30 --epochs 50 --json

DATA is a folder of image files with one folder per class. lightly is not a dependency of frugalvit: install it with
``pip install lightly``. "Side by side" in docs/SPEED_RECORD.md says what each row measures.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning_fabric import Fabric

from contenders import Lightly, Ours, Peer, Timm
from frugalvit.backbones.architectures import swin
from frugalvit.comparison.statistics import spread
from frugalvit.config.defaults import Facts
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data import open_data
from frugalvit.data.cache.build import build_store
from frugalvit.engine.hardware import configure_cpu, make_precision, pick_device, preserve_onednn
from frugalvit.errors import UserError
from frugalvit.tasks.pretraining.train import make_monitor
from frugalvit.utils import console

DROP_PATH = 0.1
PEERS: dict[str, type[Peer]] = {"supervised": Timm, "label-free": Lightly}
_WARM_UP, _FIRST_WARM_UP = 2, {"cpu": 2, "cuda": 40}  # steps; the first turn compiles and captures CUDA graphs


class Setting:
    """What both sides share: the options, the device, the files, and our decoded images."""

    def __init__(self, options: argparse.Namespace, cores: int, folder: str) -> None:
        self.options, self.cores, self.folder = options, cores, folder
        kind = pick_device(options.device)
        self.precision = ("bf16" if kind == "cuda" else "32") if options.precision == "auto" else options.precision
        self.fabric = Fabric(accelerator=kind, devices=1, plugins=make_precision(self.precision, kind))
        self.device = self.fabric.device
        torch.set_float32_matmul_precision("high")  # on a GPU timm's script allows TF32 too
        self.resolved: dict[str, Any] = {}  # the options of our runs, by task
        self.workers = cores if options.workers is None else options.workers
        self.source = open_data(options.data)
        self.images, self.classes = self.source.splits["train"], len(self.source.classes or ())
        if not self.classes or not Path(self.images.names[0]).is_file():
            raise UserError(f"{options.data} is not a folder of image files with one folder per class.")
        self.files = [(name, int(label)) for name, label in zip(self.images.names, self.images.labels, strict=True)]
        began = time.perf_counter()
        self.store = build_store(self.images, options.img_size, device=self.device, cache_dir=folder)
        self.decoding = time.perf_counter() - began

    def facts(self) -> Facts:
        count = len(self.images)
        return Facts(count, self.classes, self.options.img_size, self.device.type, eval_images=count)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def configured_for(self, side: Ours | Peer) -> Iterator[None]:
        """Inside, PyTorch has the settings of this side. A peer does not get our attention kernel."""
        ours, on_gpu, threads = side.is_ours, self.device.type == "cuda", torch.get_num_threads()
        attention, kernel = torch.backends.cuda.cudnn_sdp_enabled(), swin.TRITON_AVAILABLE
        torch.set_num_threads(1 if ours and on_gpu else self.cores)
        torch.backends.cuda.enable_cudnn_sdp(attention and not ours)
        flags = torch.backends.cudnn.flags(enabled=True, benchmark=not ours, deterministic=ours)
        try:
            with flags, preserve_onednn(), mock.patch.object(swin, "TRITON_AVAILABLE", kernel and ours):
                torch.backends.mkldnn.enabled = True
                if ours and not on_gpu:
                    configure_cpu()
                yield
        finally:
            torch.set_num_threads(threads)
            torch.backends.cuda.enable_cudnn_sdp(attention)


def make_sides(task: str, setting: Setting, length: dict[str, int], seed: int = 0) -> list[Ours | Peer]:
    """Make the peer, if it is installed, and our step or steps."""
    options = setting.options
    values: dict[str, Any] = {"backbone": options.backbone, "img_size": options.img_size, "batch": options.batch}
    values |= {"device": setting.device.type, "precision": setting.precision, "drop_path": DROP_PATH, "seed": seed}
    values |= {"cache": {"folder": setting.folder}} | length
    ours: list[Ours | Peer] = []
    if task == "supervised":
        values |= {"augment": {"operations": 2, "crop": "resized"}, "mixing": {"prob": 1.0, "smoothing": 0.1}}
        ours.append(Ours("frugalvit", TrainConfig.parse(values | {"localization": {"weight": 0}}), setting))
    else:
        matching: dict[str, Any] = {"prototypes": options.prototypes, "hidden": options.hidden}
        matching |= {"hold_last": 0} if "steps" in length else {}  # a step after the first epoch is timed
        for name, weight in (("frugalvit", 0.0), ("frugalvit, region loss", 0.5)):
            levels = {"matching": matching | {"region_weight": weight}, "crops": {"local_crops": options.local_crops}}
            ours.append(Ours(name, PretrainConfig.parse(values | levels), setting))
    peer = PEERS[task]
    return ours if is_missing(peer.name) else [peer(ours[0], setting), *ours]


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def measure_rates(task: str, setting: Setting) -> list[dict[str, Any]]:
    """Measure the images a second of each side, from files and of the step alone, in turns; one row each."""
    options, rows = setting.options, []
    sides = make_sides(task, setting, {"steps": 10**6})
    setting.resolved[task] = next(side.config for side in sides if side.is_ours).model_dump(mode="json")
    for source in ("files", "memory"):
        rates: dict[str, list[float]] = {side.name: [] for side in sides}
        for repeat in range(options.repeats):
            for side in sides:
                least = _WARM_UP if repeat else _FIRST_WARM_UP[setting.device.type]
                rates[side.name].append(time_turn(side, source, least, setting))
                console.info(f"{task}, {source}, {side.name}: {rates[side.name][-1]:.1f} images/s")
        base = rates.get(PEERS[task].name)
        for side in sides:
            row: dict[str, Any] = {"task": task, "side": side.name, "input": source}
            row |= {"images_per_second": summarize(rates[side.name])}
            if base and side.is_ours:
                ratios = [mine / theirs for mine, theirs in zip(rates[side.name], base, strict=True)]
                row["times_the_peer"] = summarize(ratios)
            if source == "files" and side.is_ours:
                row["decoding_s"] = round(setting.decoding, 2)
            rows.append(row)
    return rows


def time_turn(side: Ours | Peer, source: str, warm_up: int, setting: Setting) -> float:
    """Return the images a second of some steps. Batches that were prepared before them do not count."""
    steps = setting.options.steps
    with setting.configured_for(side), side.feed(source) as step:
        for _ in range(warm_up + (side.queued if source == "files" else 0)):
            step()
        setting.wait()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        setting.wait()
        return steps * side.batch / (time.perf_counter() - began)


def measure_minutes(setting: Setting) -> list[dict[str, Any]]:
    """Train every side until its teacher's k-NN accuracy reaches ``--until``; one row each."""
    options = setting.options
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        sides = make_sides("label-free", setting, {"epochs": options.epochs}, seed)
        ours: Any = next(side for side in sides if side.is_ours)
        monitor, split = make_monitor(ours.config, setting.source, ours.task.student, setting.fabric)
        for side, run in zip(sides, race(sides, monitor, setting), strict=True):
            runs.setdefault(side.name, []).append(run | {"scored_on": split})
    rows = []
    for name, results in runs.items():
        reached = [run["minutes"] for run in results if run["reached"]]
        row = {"task": "label-free", "side": name, "input": f"files, until k-NN {options.until:g}", "runs": results}
        rows.append(row | {"reached": f"{len(reached)} of {len(results)}"})
        rows[-1] |= {"minutes": summarize(reached)} if reached else {}
    return rows


def race(sides: list[Any], monitor: Any, setting: Setting) -> list[dict[str, Any]]:
    """Train an epoch of each side in turns. Our minutes begin with decoding; scoring does not count."""
    options, runs = setting.options, []
    for side in sides:
        minutes = setting.decoding / 60 if side.is_ours else 0.0
        runs.append({"minutes": minutes, "reached": False, "scores": [], "epochs": side.epochs()})
    for _ in range(options.epochs):
        for side, run in zip(sides, runs, strict=True):
            if run["reached"]:
                continue
            with setting.configured_for(side):
                began = time.perf_counter()
                next(run["epochs"])
                setting.wait()
                run["minutes"] += (time.perf_counter() - began) / 60
            was_training = side.teacher.training
            run["scores"].append(round(monitor.evaluate(side.teacher.eval()).get("knn", 0.0), 2))
            side.teacher.train(was_training)
            run["reached"] = run["scores"][-1] >= options.until
    for run in runs:
        run.pop("epochs").close()  # stops the workers
    return runs


def summarize(values: list[float]) -> dict[str, Any]:
    """Return mean, deviation and the values."""
    result = spread(values)
    rounded = [float(f"{value:.5g}") for value in values]
    return {"mean": float(f"{result.mean:.5g}"), "deviation": float(f"{result.deviation:.2g}"), "values": rounded}


@contextmanager
def limited_to(cores: int | None) -> Iterator[int]:
    """Inside, every thread of this process, and the processes it starts, run on ``cores`` cores; yield their number."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("This script binds processes to cores, which needs Linux.")
    before = os.sched_getaffinity(0)
    if cores and cores > len(before):
        raise UserError(f"--cores {cores} is more than the {len(before)} that this process may use.")
    bind(chosen := set(sorted(before)[: cores or None]))
    try:
        yield len(chosen)
    finally:
        bind(before)


def bind(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def describe(value: Any) -> str:
    """Return a cell of the table."""
    if not isinstance(value, dict):
        return str(value)
    return f"{value['mean']:g}" + (f" ± {value['deviation']:g}" if len(value["values"]) > 1 else "")


def print_table(rows: list[dict[str, Any]], out: Any) -> None:
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "runs"]
    print("| " + " | ".join(name.replace("_", " ") for name in columns) + " |", file=out)
    print("| --- " * len(columns) + "|", file=out)
    for row in rows:
        print("| " + " | ".join(describe(row.get(name, "")) for name in columns) + " |", file=out)


def describe_machine(setting: Setting) -> dict[str, Any]:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    device = torch.cuda.get_device_name() if setting.device.type == "cuda" else f"{platform.machine()} CPU"
    facts = {"device": device, "torch": torch.__version__, "commit": commit, "images": len(setting.images)}
    facts |= {peer.name: version(peer.name) for peer in PEERS.values() if not is_missing(peer.name)}
    facts |= {"cores": setting.cores, "workers": setting.workers, "precision": setting.precision}
    return vars(setting.options) | facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of images with one folder per class, in splits or not")
    parser.add_argument("--task", choices=[*PEERS, "both"], default="both")
    parser.add_argument("--backbone", default="vit_small_patch16_224")
    parser.add_argument("--peer-backbone", help="the peer's own name of the network (default: the same object)")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64, help="images in a step; even, for timm's mixing")
    parser.add_argument("--local-crops", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048, help="width of the heads")
    parser.add_argument("--prototypes", type=int, default=65536)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="auto", choices=["auto", "32", "bf16"], help="auto: bf16 on a GPU")
    parser.add_argument("--compile-peers", action="store_true", help="torch.compile the peers' networks")
    parser.add_argument("--cores", type=int, help="cores of both sides (default: all)")
    parser.add_argument("--workers", type=int, help="workers of the peers' DataLoader (default: one per core)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=24, help="timed steps of a turn; a multiple of 8 on a GPU")
    parser.add_argument("--until", type=float, help="also train until this k-NN accuracy in percent (label-free)")
    parser.add_argument("--epochs", type=int, default=50, help="the most epochs of --until, and of its schedules")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each side for --until")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the error stream")
    options = parser.parse_args()
    tasks, rows = [*PEERS] if options.task == "both" else [options.task], []
    out = sys.stderr if options.json else sys.stdout
    with limited_to(options.cores) as cores, tempfile.TemporaryDirectory() as folder:
        setting = Setting(options, cores, folder)
        machine = describe_machine(setting)
        for task in tasks:
            if is_missing(PEERS[task].name):
                print(f"{PEERS[task].name} is not installed: its rows of {task} are left out", file=out)
            rows += measure_rates(task, setting)
        if options.until is not None and "label-free" in tasks:
            rows += measure_minutes(setting)
    print(", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "\n", file=out)
    print_table(rows, out)
    if options.json:
        print(json.dumps(machine | {"resolved": setting.resolved, "rows": rows}))


if __name__ == "__main__":
    main()
