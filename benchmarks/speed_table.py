"""Time the training steps of many networks: rate, memory, the cost of Drloc, and the start with and without a cache.

    python benchmarks/speed_table.py --out table.jsonl
    python benchmarks/speed_table.py --cold --out table.jsonl              # first, the starts of two Swins, each alone
    python benchmarks/speed_table.py --profile cvt_graphs --out cvt.txt    # the 25 kernels that take the most time
    python benchmarks/speed_table.py --smoke                               # tiny networks on a CPU

Every row is a process with a time limit, so that a failure or a hang costs only this row. Several rows compile at the
same time. A row that is ready is timed while all others are stopped (SIGSTOP), so that no compilation disturbs it. Each
result is one line of JSON, printed at once. A second table finds the compiler's caches of the first.

images_per_second, deviation    mean and standard deviation of five repeats
matrix_rate_percent             operations of the step, relative to a large bf16 matrix product
drloc_percent, drloc_interval   cost of Drloc in alternating groups of steps, with a 95 % interval
at_s                            seconds since the start of the table

With --cold, two lines for each of its rows: the start without a compiler cache and with one.
first_step_s     from the first step's begin to its end: compilation and loading of kernels
ready_s          from the start of Python to the end of the first step
"""

import time

BEGAN = time.monotonic()  # before torch is imported

import argparse  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import contextmanager, suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

REPEATS, TURNS, KERNELS = 5, 16, 25
TIMING_LIMIT = 45.0  # seconds that a row may stop the others


def supervised(backbone: str, batch: int, how: str = "graphs", **values: Any) -> dict[str, Any]:
    return {"kind": "train", "backbone": backbone, "batch": batch, "how": how} | values


def esvit(backbone: str, batch: int, how: str = "graphs", **values: Any) -> dict[str, Any]:
    return {"kind": "pretrain", "backbone": backbone, "batch": batch, "how": how} | values


# how: eager, replay (CUDA graphs of PyTorch's kernels), graphs (compiled). The most important rows come first; EsViT
# compiles longest, so it starts early.
ROWS: dict[str, dict[str, Any]] = {
    "esvit_64": esvit("swin_tiny_w7", 64),
    "cvt_graphs": supervised("cvt_13", 128),
    "t2t_128": supervised("t2t_vit_14", 128),
    "swin_128": supervised("swin_tiny_w7", 128),
    "cvt_eager": supervised("cvt_13", 128, "eager"),
    "t2t_128_replay": supervised("t2t_vit_14", 128, "replay"),
    "cvt_replay": supervised("cvt_13", 128, "replay"),
    "swin_128_replay": supervised("swin_tiny_w7", 128, "replay"),
    "esvit_64_replay": esvit("swin_tiny_w7", 64, "replay"),
    "t2t_256": supervised("t2t_vit_14", 256),
    "swin_256": supervised("swin_tiny_w7", 256),
    "deit_128": supervised("deit_small_patch16_224", 128),
    "convnext_128": supervised("convnext_tiny", 128),
    "convnext_128_last": supervised("convnext_tiny", 128, channels_last=True),
    "hybrid_64": supervised("hybrid_small", 64, "replay", img_size=128),
    "esvit_256": esvit("swin_tiny_w7", 256),
}
COLD = ("swin_128", "esvit_64")
SMOKE = {
    "train": supervised("swin_nano", 4, "eager", img_size=32),
    "pretrain": esvit("swin_nano", 4, "eager", img_size=32, prototypes=64),
}


# One row, in a process of its own


def measure(name: str, options: argparse.Namespace) -> None:
    """Measure a row and print it as JSON; with ``--start`` only its first step."""
    import torch
    from lightning_fabric import Fabric

    import train_step
    from frugalvit.config.probe import BenchStepConfig
    from frugalvit.engine.compile import prepare_compiler
    from frugalvit.engine.hardware import configure_cuda, make_precision

    values = dict((SMOKE if options.smoke else ROWS)[name])
    how, channels_last = values.pop("how"), values.pop("channels_last", False)
    device = torch.device("cpu" if options.smoke else "cuda")
    config = BenchStepConfig.parse(values | {"device": device.type})
    fabric = Fabric(accelerator=device.type, devices=1, plugins=make_precision("auto", device.type))
    if device.type == "cuda":
        configure_cuda()
    store, classes, _ = train_step._store(config, fabric.device)
    batches = train_step._batches(config, store, classes)
    stepper = train_step._make_train_step(config, batches, classes, fabric, False)
    task: Any = stepper.task
    if channels_last:
        model, run = task.backbone.model, task.backbone.model.forward_features
        model.forward_features = lambda images: run(images.contiguous(memory_format=torch.channels_last))
    task.use_cuda_graphs = how == "replay"
    if how == "graphs":
        prepare_compiler()
        task.compile_with(True)
    first = max(task.regions_from, task.hold_last) if config.kind == "pretrain" else 0

    numbers = itertools.count(first)  # the input of a repeated step would be cached

    def step(_: int = 0) -> None:
        stepper.step = next(numbers)
        stepper.one_step()

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    row: dict[str, Any] = {"row": name, **values, "how": how}
    first_step = {"first_step_s": round(_seconds(step, device), 1), "ready_s": round(time.monotonic() - BEGAN, 1)}
    if options.start:
        _print(row | first_step)
        return
    steps(7)
    if config.kind == "train":
        train_step._warm_up_without_drloc(stepper, step)
    _seconds(lambda: steps(3), device)
    if options.profile:
        _profile(steps, device, Path(options.out), row)
        return
    with _others_stopped():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row |= _rate(steps, device, config.batch)
        if device.type == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        row["graphs"] = len(stepper.graphs.captured)
        row["fell_back"] = how != "eager" and not task.use_cuda_graphs
        if config.kind == "train":
            row |= _cost_of_drloc(stepper, steps, row["images_per_second"] / config.batch, device)
        matrix_rate = train_step._matrix_rate(device) if device.type == "cuda" else None
    try:
        row |= _share(stepper, row["images_per_second"] / config.batch, matrix_rate)
    except RuntimeError as error:
        row["share_error"] = str(error)[:200]
    _print(row)


@contextmanager
def _others_stopped() -> Iterator[None]:
    """Inside, the table has stopped all other rows."""
    print("ready", flush=True)
    sys.stdin.readline()
    yield
    print("timed", flush=True)


def _seconds(action: Any, device: Any) -> float:
    import train_step

    train_step._wait(device)
    began = time.perf_counter()
    action()
    train_step._wait(device)
    return time.perf_counter() - began


def _rate(steps: Any, device: Any, batch: int) -> dict[str, Any]:
    """Return mean and deviation of the images a second, over repeats of about half a second."""
    single = _seconds(lambda: steps(5), device) / 5
    count = min(100, max(2, round(0.5 / single)))
    _seconds(lambda: steps(count), device)  # the GPU's clock rises after the wait
    rates = [count * batch / _seconds(lambda: steps(count), device) for _ in range(REPEATS)]
    rate = statistics.mean(rates)
    began = time.perf_counter()
    steps(1)
    host = time.perf_counter() - began
    return {
        "images_per_second": round(rate, 1),
        "deviation": round(statistics.stdev(rates), 1),
        "ms": round(1000 * batch / rate, 2),
        "host_ms": round(1000 * host, 2),
    }


def _cost_of_drloc(stepper: Any, steps: Any, steps_per_second: float, device: Any) -> dict[str, Any]:
    """Return the cost of the localization loss: mean of neighbouring groups of steps, and a 95 % interval."""
    import train_step

    count, costs = max(2, min(10, round(steps_per_second / 8))), []
    for _ in range(TURNS):
        with_it = _seconds(lambda: steps(count), device)
        with train_step._no_drloc(stepper):
            without = _seconds(lambda: steps(count), device)
        costs.append(100 * (with_it / without - 1))
    mean, half = statistics.mean(costs), 2.13 * statistics.stdev(costs) / TURNS**0.5  # Student's t of 15
    return {"drloc_percent": round(mean, 2), "drloc_interval": [round(mean - half, 2), round(mean + half, 2)]}


def _share(stepper: Any, steps_per_second: float, matrix_rate: float | None) -> dict[str, Any]:
    """Return the operations of an uncompiled step, and their share of the matrix rate."""
    import torch

    import train_step

    stepper.task.use_cuda_graphs = False
    stepper.graphs.captured.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with torch.compiler.set_stance("force_eager"):
        operations = train_step._operations(stepper)
    share = {"matrix_rate_percent": round(100 * operations * steps_per_second / matrix_rate, 1)} if matrix_rate else {}
    return {"tflop": round(operations / 1e12, 2), **share}


def _profile(steps: Any, device: Any, path: Path, row: dict[str, Any]) -> None:
    """Write the kernels that take the most time, by name."""
    from torch.profiler import ProfilerActivity, profile

    cuda, count = device.type == "cuda", 3
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        wall = _seconds(lambda: steps(count), device)
    field = "self_device_time_total" if cuda else "self_cpu_time_total"
    kernels = sorted(profiler.key_averages(), key=lambda event: -getattr(event, field))
    total = sum(getattr(event, field) for event in kernels)
    lines = [f"{json.dumps(row)}", f"{wall / count * 1000:.2f} ms a step; kernels {total / count / 1000:.2f} ms"]
    lines += ["  % of time   ms a step  calls a step  kernel"]
    for event in kernels[:KERNELS]:
        spent = getattr(event, field)
        each = f"{100 * spent / total:11.1f} {spent / count / 1000:11.3f} {event.count / count:13.1f}"
        lines.append(f"{each}  {event.key[:160]}")
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text(), flush=True)


# All rows


class Table:
    """Runs rows as processes, several at a time, and times one at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cache = Path(options.cache)
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.one_at_a_time = threading.Lock()  # a row is timed, or a row starts

    def run(self, names: list[str]) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        for name in self.options.cold or ():
            shutil.rmtree(self.cache / name, ignore_errors=True)
            for cache in ("cold", "warm"):
                self.print(self.run_row(name, "--start") | {"cache": cache})
        with ThreadPoolExecutor(self.options.parallel) as pool:
            list(pool.map(lambda name: self.print(self.run_row(name)), names))

    def print(self, row: dict[str, Any]) -> None:
        _print(row | {"at_s": round(time.monotonic() - BEGAN)}, self.options.out)

    def run_row(self, name: str, *more: str) -> dict[str, Any]:
        """Run a row in a process; return its result, or the reason why it has none."""
        notes, stopped = self.cache / f"{name}.txt", threading.Event()
        with notes.open("w") as errors:
            with self.one_at_a_time:
                left = self.options.seconds - (time.monotonic() - BEGAN)
                if left < 15:
                    return {"row": name, "error": "no time left"}
                process = self.running[name] = self.start(name, errors, *more)
            timer = threading.Timer(left, lambda: (stopped.set(), _signal(process, signal.SIGKILL)))
            timer.start()
            lines = list(self.lines(process))
            code = process.wait()
            timer.cancel()
            del self.running[name]
        written = notes.read_text()
        if code or not lines:
            reason = f"stopped after {left:.0f} s" if stopped.is_set() else f"exit {code}"
            return {"row": name, "error": reason, "stderr": written[-1500:]}
        warnings = [line for line in written.splitlines() if "without CUDA graphs" in line]
        return json.loads(lines[-1]) | ({"notes": warnings} if warnings else {})

    def start(self, name: str, errors: Any, *more: str) -> subprocess.Popen[str]:
        words = [sys.executable, __file__, "--row", name, *(["--smoke"] if self.options.smoke else []), *more]
        pipe, threads = subprocess.PIPE, {}
        if not more:
            threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(2, 2 * (os.cpu_count() or 1) // self.options.parallel))}
        environment = os.environ | _cache_folders(self.cache / name) | threads
        return subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True)

    def lines(self, process: subprocess.Popen[str]) -> Iterator[str]:
        """Return the results that a row prints; time the row when it is ready."""
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                with self.one_at_a_time, self.others_stopped(process):
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    process.stdout.readline()
            elif line.startswith("{"):
                yield line

    @contextmanager
    def others_stopped(self, timed: subprocess.Popen[str]) -> Iterator[None]:
        others = [process for process in list(self.running.values()) if process is not timed]
        limit = threading.Timer(TIMING_LIMIT, lambda: _signal(timed, signal.SIGKILL))
        for process in others:
            _signal(process, signal.SIGSTOP)
        limit.start()
        try:
            with suppress(BrokenPipeError):  # the row failed or was killed
                yield
        finally:
            limit.cancel()
            for process in others:
                _signal(process, signal.SIGCONT)


def _cache_folders(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a row and the processes it started; its compile workers are in a session of their own."""
    if process.poll() is not None:
        return
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children[int(path.read_text().rpartition(")")[2].split()[1])].append(int(path.parent.name))
    tree = [process.pid]
    for parent in tree:
        tree += children[parent]
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, number)


def _print(row: dict[str, Any], path: str | None = None) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if path:
        with Path(path).open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--cold", nargs="*", choices=[*ROWS], metavar="ROW", help=f"default: {', '.join(COLD)}")
    parser.add_argument("--out", help="file for the results, or for the profile")
    parser.add_argument("--profile", metavar="ROW", help="write the kernels of this row to --out")
    parser.add_argument("--parallel", type=int, default=6, help="rows that compile at the same time")
    parser.add_argument("--seconds", type=float, default=220, help="time limit of the table")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "frugalvit_speed"), help="compiler caches")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on a CPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cold == []:
        options.cold = ["train"] if options.smoke else COLD
    if options.profile:
        options.out = options.out or f"profile_{options.profile}.txt"
        os.environ |= _cache_folders(Path(options.cache) / options.profile)  # the table's, if it ran before
    if not (options.profile or options.row):
        return Table(options).run([*SMOKE] if options.smoke else [*(options.rows or ROWS)])
    try:
        measure(options.profile or options.row, options)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
