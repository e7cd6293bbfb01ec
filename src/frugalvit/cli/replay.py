"""``frugalvit replay``: repeat a failed step from its dump and name the first non-finite tensor."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones.weights.safe_load import read_checkpoint
from frugalvit.config.resolved import ResolvedPretrainConfig, ResolvedTrainConfig
from frugalvit.config.train import ReplayConfig
from frugalvit.data.loader import Batch, BatchShard
from frugalvit.engine.failure_dump import REPLAYABLE_TASKS, nonfinite_names
from frugalvit.engine.schedules import Constant
from frugalvit.engine.step import TrainPlan, seed_step
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.runs import layout
from frugalvit.runs.layout import find_run
from frugalvit.tasks.classification import train
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.utils.tables import CommandResult, Table


def replay(config: ReplayConfig) -> CommandResult:
    """Report the non-finite inputs, weights, outputs, losses and gradients of a step, in this order.

    With ``--accumulate`` the first part of the step with a non-finite tensor is reported.
    """
    path = _find_dump(Path(config.evidence))
    dump = read_checkpoint(path)
    if not {"task", "step", "kind", "steps", "classes", "parts", "number", "world"} <= dump.keys():
        raise UserError(f"{path} is not the dump of a failed step. Pass a file of RUN/fault/.")
    if dump["kind"] not in REPLAYABLE_TASKS:
        raise UserError(
            f"{path}: replay supports runs of 'frugalvit train' (without --unlabelled) and 'frugalvit pretrain' only. "
            "Read the batch and the state with torch.load."
        )
    task, stored = _rebuild(find_run(path.parent.parent), dump)
    task.load_state_dict(dump["task"])
    fabric = builders.make_fabric(stored.model_copy(update={"device": config.device, "devices": 1, "nodes": 1}))
    fabric.to_device(task)

    parts = dump["parts"]
    seed_step(dump["seed"], dump["step"], dump["process"])
    part, bad, losses = 0, [], {}
    for part, tensors in enumerate(parts):
        batch = _batch({name: tensor.to(fabric.device) for name, tensor in tensors.items()}, dump["number"] + part)
        losses, bad = _run_part(task, batch, dump["step"], fabric, len(parts))
        bad = [("input", name) for name in nonfinite_names(tensors.items())] + bad
        if bad:
            break

    first = f"{bad[0][0]} {bad[0][1]}" if bad else None
    note = f"first non-finite tensor: {first}" if first else "all tensors are finite here: use the device of the run"
    if len(parts) > 1:
        note += f" (part {part + 1} of {len(parts)})" if first else f" (all {len(parts)} parts of the step)"
    rows: list[list[object]] = []
    for stage in dict.fromkeys(stage for stage, _ in bad):
        names = [name for kind, name in bad if kind == stage]
        rows.extend([stage, name] for name in names[: config.top])
    data = {"step": dump["step"], "part": part, "first_bad": first, "bad": [list(pair) for pair in bad]}
    table = Table(["kind", "name"], rows, f"step {dump['step']}: {len(bad)} non-finite tensors")
    tables = [Table(["loss", "value"], [[name, str(value.item())] for name, value in losses.items()])]
    return CommandResult(data, [*tables, table] if bad else tables, [note])


def _run_part(
    task: Any, batch: Batch, step: int, fabric: Fabric, parts: int
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Run one part of a step; return its losses and its non-finite tensors. Gradients accumulate."""
    outputs: list[str] = []
    hooks = [module.register_forward_hook(_make_hook(name, outputs)) for name, module in task.named_modules() if name]
    with fabric.autocast():
        losses = task(batch, step)
    for hook in hooks:
        hook.remove()
    (losses["loss"] / parts).backward()
    bad = [("weight", name) for name in nonfinite_names(task.named_parameters())]
    bad += [("output", name) for name in outputs]
    bad += [("loss", name) for name in nonfinite_names(losses.items())]
    bad += [
        ("gradient", n) for n in nonfinite_names((n, p.grad) for n, p in task.named_parameters() if p.grad is not None)
    ]
    return losses, bad


def _find_dump(path: Path) -> Path:
    if path.is_dir():
        dumps = sorted((path / layout.FAULT).glob("*.pt"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        if not dumps:
            raise UserError(f"{path} has no failed step (no fault/*.pt).")
        return dumps[-1]
    return path


def _rebuild(run: Path, dump: dict[str, Any]) -> tuple[Any, Any]:
    """Build the task of the run without its data; return it with the run's configuration."""
    plan = TrainPlan(dump["steps"], dump["steps_per_epoch"], Constant(0.0), log_every=dump["log_every"])
    kind = ResolvedPretrainConfig if dump["kind"] == "PretrainingTask" else ResolvedTrainConfig
    # "resume" keeps the network that the run started with.
    stored: Any = kind.from_run(run / layout.CONFIG).model_copy(update={"init": None, "resume": str(run)})
    if isinstance(stored, ResolvedPretrainConfig):
        task: Any = pretrain.make_task(stored, pretrain.make_network(stored), plan)
        task.batches = SimpleNamespace(augment=SimpleNamespace(config=stored.crops))
    else:
        task = train.make_task(stored, train.make_network(stored, dump["classes"]), plan)
    task.share = BatchShard(dump["seed"], dump["process"], dump["world"])  # decides Drloc's pairs
    return task, stored


def _batch(tensors: dict[str, Tensor], number: int) -> Batch:
    views = [tensor for name, tensor in tensors.items() if name.startswith("batch.images.")]
    fields = {name: tensors.get(f"batch.{name}") for name in ("images", "targets", "labels", "index", "clean")}
    images = fields.pop("images")
    return Batch(images if images is not None else views, **fields, number=number)  # type: ignore[arg-type]


def _make_hook(name: str, nonfinite: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        parts = output if isinstance(output, list | tuple) else [output]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
        if any(not bool(torch.isfinite(part).all()) for part in tensors):
            nonfinite.append(f"{name} ({type(module).__name__})")

    return hook
