"""``frugalvit replay``: run a step that went wrong again, from what it left behind, and name the first bad tensor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones.weights.safe_load import read_checkpoint
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import ReplayConfig, TrainConfig
from frugalvit.data.loader import Batch
from frugalvit.engine.failure_dump import REPLAYABLE_TASKS, nonfinite_names
from frugalvit.engine.schedules import Constant
from frugalvit.engine.step import TrainPlan, seed_step
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.drloc_pairs import BatchShard
from frugalvit.runs.run_folder import find_run
from frugalvit.tasks.classification import train
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.utils.tables import CommandResult, Table


def replay(config: ReplayConfig) -> CommandResult:
    """Inputs, weights, every module's output, losses and gradients: which of them are not finite, in that order.

    Of a step in parts (``--accumulate``) the first part with such a tensor is told.
    """
    path = _evidence(Path(config.evidence))
    evidence = read_checkpoint(path)
    if not {"task", "step", "kind", "steps", "classes"} <= evidence.keys() or not {"parts", "batch"} & evidence.keys():
        raise UserError(f"{path} holds no failed step; give a file of RUN/fault/.")
    if evidence["kind"] not in REPLAYABLE_TASKS:
        raise UserError(
            f"{path} is of a run that replay cannot build again: only those of 'frugalvit train' and 'frugalvit "
            "pretrain'. The file holds the batch and the state: torch.load reads it."
        )
    task, stored = _rebuild(find_run(path.parent.parent), evidence)
    task.load_state_dict(evidence["task"])
    fabric = builders.make_fabric(stored.model_copy(update={"device": config.device, "devices": 1, "nodes": 1}))
    fabric.to_device(task)

    # Earlier evidence has a single part, and lacks its number and how many processes there were.
    parts, number = evidence.get("parts") or [evidence["batch"]], evidence.get("number", evidence["step"])
    seed_step(evidence["seed"], evidence["step"], evidence["process"])
    part, bad, losses = 0, [], {}
    for part, tensors in enumerate(parts):
        batch = _batch({name: tensor.to(fabric.device) for name, tensor in tensors.items()}, number + part)
        losses, bad = _take(task, batch, evidence["step"], fabric, len(parts))
        bad = [("input", name) for name in nonfinite_names(tensors.items())] + bad
        if bad:
            break

    first = f"{bad[0][0]} {bad[0][1]}" if bad else None
    note = f"first bad tensor: {first}" if first else "everything is finite here: the fault needs the other device"
    if len(parts) > 1:
        note += f" (part {part + 1} of {len(parts)})" if first else f" (all {len(parts)} parts of the step)"
    rows: list[list[object]] = []
    for stage in dict.fromkeys(stage for stage, _ in bad):
        names = [name for kind, name in bad if kind == stage]
        more = [f"and {len(names) - config.top} more"] if len(names) > config.top else []
        for name in names[: config.top] + more:
            rows.append([stage, name])
    shown = {name: value.item() for name, value in losses.items()}
    data = {"step": evidence["step"], "part": part, "first_bad": first, "bad": [list(pair) for pair in bad]}
    table = Table(["what", "name"], rows, f"step {evidence['step']}: {len(bad)} tensors are not finite")
    tables = [Table(["loss", "value"], [[name, str(value)] for name, value in shown.items()])]
    return CommandResult(data, [*tables, table] if bad else tables, [note])


def _take(
    task: Any, batch: Batch, step: int, fabric: Fabric, parts: int
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """One part of a step as the run took it, gradients added to those before: its losses, and what is not finite."""
    outputs: list[str] = []
    hooks = [module.register_forward_hook(_look(name, outputs)) for name, module in task.named_modules() if name]
    with fabric.autocast():
        losses = task(batch, step)
    for hook in hooks:
        hook.remove()
    (losses["loss"] / parts).backward()
    bad = [("weight", name) for name in nonfinite_names(task.named_parameters())]
    bad += [("output", name) for name in outputs]
    bad += [("loss", name) for name in nonfinite_names(losses.items())]
    bad += [("gradient", n) for n in nonfinite_names((n, p.grad) for n, p in task.named_parameters() if p.grad is not None)]
    return losses, bad


def _evidence(path: Path) -> Path:
    """The file itself, or the newest one of a run."""
    if path.is_dir():
        found = sorted((path / "fault").glob("*.pt"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        if not found:
            raise UserError(f"{path} holds no failed step (no fault/*.pt in it).")
        return found[-1]
    return path


def _rebuild(run: Path, evidence: dict[str, Any]) -> tuple[Any, Any]:
    """The task as the run had it, without its data."""
    plan = TrainPlan(evidence["steps"], evidence["steps_per_epoch"], Constant(0.0), log_every=evidence["log_every"])
    kind = PretrainConfig if evidence["kind"] == "PretrainingTask" else TrainConfig
    # As if it went on: with the network that it was begun with.
    stored: Any = kind.from_run(run / "config.yaml").model_copy(update={"init": None, "resume": str(run)})
    if isinstance(stored, PretrainConfig):
        task: Any = pretrain.make_task(stored, pretrain.make_network(stored), plan)
        task.batches = SimpleNamespace(augment=SimpleNamespace(config=stored.crops))
    else:
        task = train.make_task(stored, train.make_network(stored, evidence["classes"]), plan)
    task.share = BatchShard(
        evidence["seed"], evidence["process"], evidence.get("world", 1)
    )  # Drloc's pairs follow from it
    return task, stored


def _batch(tensors: dict[str, Tensor], number: int) -> Batch:
    views = [tensor for name, tensor in tensors.items() if name.startswith("batch.images.")]
    one = {name: tensors.get(f"batch.{name}") for name in ("images", "targets", "labels", "index", "clean")}
    images = one.pop("images")
    return Batch(images if images is not None else views, **one, number=number)  # type: ignore[arg-type]


def _look(name: str, found: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        parts = output if isinstance(output, list | tuple) else [output]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
        if any(not bool(torch.isfinite(part).all()) for part in tensors):
            found.append(f"{name} ({type(module).__name__})")

    return hook
