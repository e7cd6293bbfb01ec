"""``frugalvit bench step``: measure a full training step, and how much of the device it uses.

A step is input, forward, losses, backward, clipping, optimizer and EMA, as in ``train`` and ``pretrain``, without the
health metrics of pre-training's log. ``--against`` also times the paper's algorithm as written: eager PyTorch, in
pre-training a loop over pairs of crops with full softmax; once with our input, once with a DataLoader and torchvision.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning_fabric import Fabric
from torch.utils.flop_counter import FlopCounterMode

import torchvision_input
from esvit_reference import ReferencePretrainingTask
from frugalvit.backbones.architectures import swin
from frugalvit.comparison.statistics import spread
from frugalvit.config.defaults import Facts
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import BenchStepConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.loader import MAX_GROUPED_STEPS, Batches
from frugalvit.engine.compile import can_replay_graphs, prepare_compiler
from frugalvit.engine.hardware import configure_cuda, make_precision, pick_device, preserve_onednn
from frugalvit.engine.step import TrainStep, make_optimizer
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import AutoValues, add_backbone_facts, resolve_pretraining, resolve_training
from frugalvit.tasks.classification import train
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.pretraining.task import PretrainingTask
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table

_IMAGES, _CLASSES = 2048, 100
_WARM_UP, _GROUP = 6, MAX_GROUPED_STEPS  # the loader may augment this many steps in one call


def bench_step(config: BenchStepConfig) -> CommandResult:
    """Measure our step, the supervised one without Drloc, and with --against the baselines; one row each."""
    device = pick_device(config.device)
    fabric = Fabric(accelerator=device, devices=1, plugins=make_precision(config.precision, device))
    if device == "cuda":
        configure_cuda()
    store, classes, examples = _store(config, fabric.device)
    batches = _batches(config, store, classes)
    rows: list[dict[str, Any]] = [{"step": "frugalvit"} | measure(config, batches, classes, fabric)]
    if config.kind == "train" and config.localization:
        without = config.model_copy(update={"localization": 0.0, "profile": None})
        rows.append({"step": "without Drloc"} | measure(without, batches, classes, fabric))
    ours = len(rows)
    if config.against:
        with mock.patch.object(swin, "TRITON_AVAILABLE", False), preserve_onednn():
            torch.backends.mkldnn.enabled = True
            rows.append({"step": "as written"} | measure(config, batches, classes, fabric, as_written=True))
            baseline = _torchvision_batches(config, batches, store, examples, fabric.device)
            name = "as written, usual input"
            rows.append({"step": name} | measure(config, baseline, classes, fabric, as_written=True, steps=_GROUP))
        for row in rows[ours:]:
            row["ratio"] = round(rows[0]["images_per_second"] / row["images_per_second"], 2)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    facts = {"device": hardware, "torch": torch.__version__, "kind": config.kind, "backbone": config.backbone}
    facts |= {"batch": config.batch, "data": config.data or "random images"}
    facts |= {"prototypes": config.prototypes} if config.kind == "pretrain" else {}
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns.remove("ms_deviation")
    shown = [row | ({"ms": f"{row['ms']} ± {row['ms_deviation']}"} if row["ms_deviation"] else {}) for row in rows]
    table = Table(columns, [[row.get(name, "") for name in columns] for row in shown])
    notes = ["±: standard deviation over groups of five steps"]
    if device == "cuda":
        notes.append("matrix rate: operations per second of the step, relative to a large bf16 matrix product")
    if "drloc_percent" in rows[0]:
        notes.append(
            "drloc_percent: steps with and without the loss alternate; the rows are measured one after the other, and "
            "the drift of the machine's speed changes their ratio"
        )
    return CommandResult(facts | {"rows": rows}, [table], notes)


def measure(
    config: BenchStepConfig, batches: Any, classes: int, fabric: Fabric, *, as_written: bool = False, steps: int = 0
) -> dict[str, Any]:
    """Measure images/s of full steps and of the input alone, host time, peak memory and operations."""
    train_step = _make_train_step(config, batches, classes, fabric, as_written)
    task: Any = train_step.task
    device = fabric.device

    def step(number: int) -> None:
        train_step.step = number
        train_step.one_step()

    operations = _operations(train_step)
    if config.compile and not as_written and device.type == "cuda":
        auto_graphs = config.compile == "auto" and can_replay_graphs(train_step.task, fabric)
        graphs = config.compile == "graphs" or auto_graphs
        prepare_compiler()
        train_step.task.compile_with(graphs)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    began = time.perf_counter()
    for number in range(_WARM_UP):
        step(number)
    _wait(device)
    warm = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    groups = timed_groups(step, steps or config.steps, device)
    seconds = statistics.median(groups)
    memory = {}
    if device.type == "cuda":  # the memory of CUDA graphs is reserved, but the allocator does not count it as used
        memory["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        memory["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    alternate = config.kind == "train" and config.localization and not as_written
    if alternate:
        _warm_up_without_drloc(train_step, step)
    inputs = timed(batches.batch_at, steps or config.steps, device)
    host = _host_seconds(step, device)
    row: dict[str, Any] = {
        "images_per_second": round(config.batch / seconds, 1),
        "ms": round(1000 * seconds, 2),
        "ms_deviation": round(1000 * spread(groups).deviation, 2) if len(groups) > 1 else None,
        "input_images_per_second": round(config.batch / inputs, 1),
        "gflop_per_image": round(operations / config.batch / 1e9, 1),
    }
    if device.type == "cuda":
        row |= {"host_ms": round(1000 * host, 2), **memory, "warm_up_s": round(warm, 1)}
        row["matrix_rate_percent"] = round(100 * operations / seconds / _matrix_rate(device), 1)
    if alternate:
        row["drloc"] = task.settings.variant
        row["drloc_percent"] = round(100 * _cost_of_drloc(train_step, step, config.steps, device), 2)
    if config.profile and not as_written:
        _profile(step, device, Path(config.profile))
    return row


def timed(action: Callable[[int], object], count: int, device: torch.device) -> float:
    """Return the median seconds per call over groups of calls."""
    return statistics.median(timed_groups(action, count, device))


def timed_groups(action: Callable[[int], object], count: int, device: torch.device) -> list[float]:
    """Return the seconds per call of every group of calls, with the device idle before and after."""
    groups = []
    for start in range(0, count, _GROUP):
        _wait(device)
        began = time.perf_counter()
        for number in range(start, start + _GROUP):
            action(number)
        _wait(device)
        groups.append((time.perf_counter() - began) / _GROUP)
    return groups


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _host_seconds(step: Callable[[int], None], device: torch.device) -> float:
    """Return the seconds to queue a step on an idle device. If below the step's time, the device is the limit."""
    seconds = 0.0
    for number in range(_GROUP):
        _wait(device)
        began = time.perf_counter()
        step(number)
        seconds += time.perf_counter() - began
    _wait(device)
    return seconds / _GROUP


def _cost_of_drloc(train_step: TrainStep, step: Callable[[int], None], count: int, device: torch.device) -> float:
    """Return the cost of the localization loss as a share of a step.

    Steps with and without it alternate, because a machine's speed drifts by more than the difference.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(0, 2 * count, _GROUP):
        with_it = number // _GROUP % 2 == 0
        with nullcontext() if with_it else _no_drloc(train_step):
            seconds[with_it].append(timed(step, _GROUP, device))
    return statistics.median(seconds[True]) / statistics.median(seconds[False]) - 1


def _warm_up_without_drloc(train_step: TrainStep, step: Callable[[int], None]) -> None:
    """Compile steps without the loss, and capture their graphs, before they are timed."""
    with _no_drloc(train_step):
        for number in range(_WARM_UP):
            step(number)


@contextmanager
def _no_drloc(train_step: TrainStep) -> Iterator[None]:
    """Inside, steps have no localization loss."""
    task: Any = train_step.task
    head, task.localization = task.localization, None
    try:
        yield
    finally:
        task.localization = head


# The data, the task and the step


def _store(config: BenchStepConfig, device: torch.device) -> tuple[Any, int, ImageDataset | None]:
    """Return the images on the device, the number of classes, and the dataset of the files."""
    if config.data is None:
        side = round(config.img_size * 256 / 224)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (_IMAGES, 3, side, side), dtype=torch.uint8, generator=generator)
        return CachedStore.from_arrays(pixels, torch.arange(_IMAGES) % _CLASSES, device), _CLASSES, None
    source = open_data(config.data)
    if config.kind == "train" and not source.classes:
        raise UserError(f"{config.data} has no labels, which a supervised step needs: use 'bench step pretrain'.")
    examples, size = source.splits["train"], (config.img_size, config.img_size)
    return build_store(examples, size, device=device), len(source.classes or ()), examples


def _settings(config: BenchStepConfig, as_written: bool = False) -> TrainConfig | PretrainConfig:
    """Return the options of a long run with such steps; ``as_written`` uses the paper's form of Drloc."""
    values: dict[str, Any] = {"backbone": config.backbone, "img_size": config.img_size, "batch": config.batch}
    values |= {"steps": 10**6, "device": config.device, "precision": config.precision}
    if config.kind == "pretrain":
        # The prototypes are frozen in the first epoch; a later step is measured.
        return PretrainConfig.parse(
            values | {"matching": {"prototypes": config.prototypes, "region_weight": 0.5, "hold_last": 0}}
        )
    form = {"variant": "l1"} if as_written else {}
    return TrainConfig.parse(values | {"localization": {"weight": config.localization} | form})


def _batches(config: BenchStepConfig, store: Any, classes: int) -> Batches:
    settings = _settings(config)
    if isinstance(settings, PretrainConfig):
        return Batches(store, config.batch, seed=0, augment=MultiCrop(settings.crops, config.img_size))
    augment = TrainAugment(settings.augment, config.img_size)
    return Batches(store, config.batch, seed=0, augment=augment, mixing=Mixing(settings.mixing, classes))


def _make_train_step(
    config: BenchStepConfig, batches: Batches, classes: int, fabric: Fabric, as_written: bool
) -> TrainStep:
    facts = Facts(_IMAGES, classes, config.img_size, fabric.device.type, eval_images=_IMAGES)
    kind = ReferencePretrainingTask if as_written else PretrainingTask
    # the health metrics of pre-training belong to the log
    train_step, _ = make_step(_settings(config, as_written), facts, fabric, kind, health=False)
    task: Any = train_step.task
    task.batches = batches
    return train_step


def make_step(
    settings: TrainConfig | PretrainConfig,
    facts: Facts,
    fabric: Fabric,
    kind: type[PretrainingTask] = PretrainingTask,
    *,
    health: bool = True,
) -> tuple[TrainStep, Any]:
    """Make the step of a run's training loop, still without batches; return its resolved options too."""
    torch.manual_seed(settings.seed)
    auto = AutoValues()
    with console.quiet():  # every row would log the same
        if isinstance(settings, PretrainConfig):
            network = pretrain.make_network(settings)
        else:
            network = train.make_network(settings, facts.classes)
    facts = add_backbone_facts(facts, network)
    if isinstance(settings, PretrainConfig):
        resolved: Any = resolve_pretraining(settings, facts, auto)
        plan = pretrain.make_plan(resolved, facts.images, 1)
        plan = plan if health else replace(plan, log_every=plan.steps)
        task: Any = pretrain.make_task(resolved, network, plan, kind)
    else:
        resolved = resolve_training(settings, facts, auto)
        plan = train.make_plan(resolved, facts.images, 1)
        task = train.make_task(resolved, network, plan)
    module, optimizer = fabric.setup(task.train(), make_optimizer(task, plan, fabric))
    return TrainStep(task, module, optimizer, plan, fabric), resolved


def _operations(train_step: TrainStep) -> int:
    """Count the floating-point operations of the matrix products in an uncompiled step."""
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.mm: _mm, torch.ops.aten.addmm: _addmm}
    ) as counter:
        train_step.one_step()
    return counter.get_total_flops()


# PyTorch's own formulas (2.11) fail on products that accumulate in another precision.
def _mm(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _addmm(added: torch.Size, left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return _mm(left, right)


def _matrix_rate(device: torch.device) -> float:
    """Measure the operations per second of a large bf16 matrix product."""
    side = 8192
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(left, right)
    return 2 * side**3 / timed(lambda _: left @ right, 20, device)


def _torchvision_batches(
    config: BenchStepConfig, batches: Batches, store: Any, examples: ImageDataset | None, device: torch.device
) -> Any:
    """Make the same batches with a DataLoader and torchvision: from files, or random images in memory."""
    size, settings = config.img_size, _settings(config)
    if isinstance(settings, PretrainConfig):
        transform = torchvision_input.TorchvisionCrops(settings.crops, size)
    else:
        transform = torchvision_input.supervised_transform(size)
    if examples is None:
        images, _, index = store.fetcher(lambda _: torch.arange(len(store))).at(0)
        dataset: Any = torchvision_input.InMemoryDataset(images.cpu(), store.labels[index], transform)
    else:
        dataset = torchvision_input.FileDataset(examples, transform)
    console.info(f"the baseline's DataLoader: {len(dataset):,} images, {config.workers} workers")
    loader = torchvision_input.make_loader(dataset, config.batch, config.workers)
    return torchvision_input.TorchvisionBatches(loader, batches.augment, batches.mixing, device)


def _profile(step: Callable[[int], None], device: torch.device, path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    if not cuda:  # the profiler reports a missing GPU as an error
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        for number in range(3):
            step(number)
        _wait(device)
    by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    path.write_text(profiler.key_averages().table(sort_by=by, row_limit=80, max_name_column_width=90))
    console.info(f"profile: {path}")
