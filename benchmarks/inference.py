"""``frugalvit bench``: parameters, operations, speed and memory of models (EsViT B.1, Table 7, Fig. 1)."""

import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from frugalvit.backbones import Backbone
from frugalvit.backbones.registry import get_architecture, is_model_name
from frugalvit.backbones.weights.model_config import find_model_folder
from frugalvit.config.probe import BenchConfig
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.probing.extractor import resolve_precision
from frugalvit.runs import layout
from frugalvit.runs.run_folder import read_summary
from frugalvit.utils import console
from frugalvit.utils.files import PICTURES, check_new_file, read_json
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

VIT_B = get_architecture("vit_base")
VIT_B_IN_TABLE_7 = 312.0  # images/s of ViT-B in the paper's table
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_SECONDS = 20.0  # of timed passes per model


def bench(config: BenchConfig) -> CommandResult:
    """Measure every model, and the reference, under the same conditions."""
    device = torch.device(pick_device(config.device))
    precision = resolve_precision(config.precision, device)
    if config.plot:
        check_new_file(Path(config.plot), PICTURES, "--plot")
    batch = (64 if device.type == "cuda" else 8) if config.batch == "auto" else config.batch
    names = list(dict.fromkeys(config.models))
    accuracies = {name: accuracy_of(name) for name in names}
    if config.plot and not any(accuracies.values()):
        raise UserError(
            "--plot needs runs with an accuracy: give finished 'train' runs, or 'pretrain' runs with a probe."
        )
    reference = [config.reference] if config.reference else []
    every = list(dict.fromkeys([*names, *reference]))
    for name in every:
        _check_model(name)
    measured: dict[str, dict[str, Any]] = {}
    networks: dict[str, str] = {}
    for name in every:
        console.info(f"measuring {name}" + ("" if name in names else ", the reference"))
        model = load_model(name, str(device), img_size=config.img_size, random=True)
        networks[name] = get_architecture(model.backbone.name).partition(".")[0]
        measured[name] = {"model": name} | measure(model, batch, config.steps, precision, compiled=config.compile)
    rows = [measured[name] for name in names]
    speeds = {name: row["images_per_second"] for name, row in measured.items()}
    for name, row in zip(names, rows, strict=True):
        if reference:
            row["relative"] = speeds[name] / speeds[reference[0]]
        if reference and networks[reference[0]] == VIT_B:
            row["table7"] = VIT_B_IN_TABLE_7 * row["relative"]
        if accuracies[name]:
            row["accuracy_of"], row["accuracy"] = accuracies[name]  # type: ignore[misc]
    relative = {"model": reference[0], "images_per_second": speeds[reference[0]]} if reference else None
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        threads = pluralize(torch.get_num_threads(), "thread")
        hardware = f"{platform.processor() or platform.machine()} CPU, {threads}"
    conditions = {"device": hardware, "precision": precision, "batch": batch, "torch": torch.__version__}
    data: dict[str, Any] = {"models": rows, **conditions, "reference": relative}
    notes = ["GFLOPs count a multiply-add as one operation, as the papers do"]
    if config.plot:
        data["plot"] = config.plot
        _plot(Path(config.plot), rows, hardware)
        notes.append(f"accuracy against throughput: {config.plot}")
    columns = ["model", "img_size", "parameters_m", "gflops", "images_per_second"]
    optional = ("relative", "table7", "peak_memory_gib", "accuracy")
    columns += [name for name in optional if any(row.get(name) is not None for row in rows)]
    title = f"{hardware}, {'32-bit' if precision == '32' else precision}, batch {batch}"
    return CommandResult(data, [Table(columns, [[row.get(name) for name in columns] for row in rows], title)], notes)


def measure(model: Model, batch: int, steps: int, precision: str, *, compiled: bool = False) -> dict[str, Any]:
    """Measure parameters (M, no classifier), GFLOPs per image, images/s, and on CUDA peak memory (GiB)."""
    backbone = model.backbone
    device = next(backbone.parameters()).device
    height, width = model.transform.out_size
    images = torch.randn(batch, backbone.in_chans, height, width, device=device)
    row: dict[str, Any] = {
        "img_size": height if height == width else f"{height}x{width}",
        "parameters_m": count_parameters(backbone) / 1e6,
        "gflops": multiply_adds(backbone, images[:1]) / 1e9,
    }
    dtype = _DTYPES.get(precision)
    mixed = torch.autocast(device.type, dtype) if dtype is not None else nullcontext()
    run = torch.compile(backbone) if compiled else backbone
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode(), mixed:
        seconds = _time(run, images, steps, device)
    row["images_per_second"] = batch / seconds
    row["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return row


def count_parameters(backbone: Backbone) -> int:
    """Count the parameters of the backbone without its classifier, as the papers do."""
    total = sum(parameter.numel() for parameter in backbone.model.parameters())
    if backbone.num_classes:
        heads = backbone.model.get_classifier()  # type: ignore[operator]
        for head in heads if isinstance(heads, tuple | list) else (heads,):
            total -= sum(parameter.numel() for parameter in head.parameters())
    return total


@torch.no_grad()
def multiply_adds(backbone: Backbone, image: Tensor) -> int:
    """Count the multiply-adds of a forward pass over (1, C, H, W), including those of attention."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel([SDPBackend.MATH]), counter:
        backbone(image)
    return counter.get_total_flops() // 2


def accuracy_of(run: str) -> tuple[str, float] | None:
    """Return the accuracy of a run and its kind: linear, logistic or k-NN probe, else its own score."""
    folder = Path(run)
    probes = read_json(folder / layout.PROBES, dict) or {}
    for kind in ("linear", "logistic", "knn"):
        for name, result in sorted(probes.items()):
            # skip scores with few labels
            if name.startswith(f"{kind} ") and "top1" in result and "labels" not in result:
                return f"{kind} top1 on {result['data']}", float(result["top1"])
    summary = read_summary(folder) or {}
    for key in ("top1", "best_knn", "knn"):
        if isinstance(summary.get(key), int | float):
            return key, float(summary[key])
    return None


def _check_model(name: str) -> None:
    """Raise an error for an unknown model before any other is measured."""
    path = Path(name)
    if not (find_model_folder(path) if path.is_dir() else is_model_name(name)):
        load_model(name, random=True)  # raises the error


def _time(run: Any, images: Tensor, steps: int, device: torch.device) -> float:
    """Return the median seconds of a pass, after warm-up passes."""
    warm_up = 3 if device.type == "cuda" else 1
    times: list[float] = []
    for number in range(warm_up + steps):
        began = time.perf_counter()
        run(images)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if device.type == "mps":
            torch.mps.synchronize()
        if number >= warm_up:
            times.append(time.perf_counter() - began)
        if len(times) >= 3 and sum(times) > _MAX_SECONDS:
            break
    return statistics.median(times)


def _plot(path: Path, rows: list[dict[str, Any]], hardware: str) -> None:
    from frugalvit.utils.plotting import save
    from tradeoff_figure import Contender, tradeoff_figure

    with_accuracy = [row for row in rows if "accuracy" in row]
    contenders = [
        Contender(Path(row["model"]).name, row["images_per_second"], row["accuracy"], round(row["parameters_m"] * 1e6))
        for row in with_accuracy
    ]
    kinds = {row["accuracy_of"] for row in with_accuracy}
    if len(kinds) > 1:
        console.warning(f"the plot mixes different accuracies: {', '.join(sorted(kinds))}")
    save(tradeoff_figure(contenders, " / ".join(sorted(kinds)), hardware), path)
