"""``--auto-batch``: before the run, split the batch until one step fits into the device's memory.

The batch itself stays, and the learning rate with it: it is only computed in more parts (accumulate). What is learned
then differs by chance alone: crops are drawn, and images mixed, part by part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.config.train import RunConfig
from frugalvit.engine.failure_dump import is_out_of_memory
from frugalvit.engine.step import TrainPlan
from frugalvit.engine.task import Task
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils import console

_FULL = 0.95  # share of a device's memory that a step may take: what is left is for fragments and other processes


def fit_to_memory(config: RunConfig, plan: TrainPlan, task: Task, run: RunFolder, fabric: Fabric) -> TrainPlan:
    """The plan with as many parts a step as it takes; what was found is said and kept in the configuration."""
    if config.resume and run.has_checkpoint():  # a new run may have one too, of the run that it continues
        return plan  # the run has been going with what was found at its start
    if fabric.device.type != "cuda":
        console.info(f"auto-batch: {plan.images_per_step} images a step are kept; only a GPU's memory is tried out")
        return plan
    fabric.to_device(task)
    parts = parts_that_fit(task, plan.accumulate, fabric)
    if parts == plan.accumulate:
        console.info(f"auto-batch: {plan.images_per_step} images a step fit")
        return plan
    console.info(f"auto-batch: {plan.images_per_step} images a step fit in {parts} parts (accumulate = {parts})")
    task.batches = task.batches.with_batch_size(plan.images_per_step // parts)
    config.accumulate = parts
    run.save_config(config.model_copy(update={"resume": None}))
    return dataclasses.replace(plan, accumulate=parts)


def parts_that_fit(task: Task, parts: int, fabric: Fabric) -> int:
    """More and more equal parts of a step's batch until forward and backward go through, on every process."""
    whole = task.batch_at(0)
    mixed = getattr(getattr(task, "batches", None), "mixing", None) is not None
    together = 2 if mixed and fabric.world_size > 1 else 1  # a pair of mixed images stays in one process
    groups = len(whole.index) // together  # already one of ``parts``, and this process's share of it
    for more in (number for number in range(1, groups + 1) if groups % number == 0):
        if _agreed(fabric, _goes_through(task, first_images(whole, groups // more * together), fabric)):
            return parts * more
    raise UserError(
        f"Not even {together} images at once fit into this device's memory. Use a smaller --img-size or --backbone, or "
        "--checkpoint-activations."
    )


def _goes_through(task: Task, batch: Any, fabric: Fabric) -> bool:
    """Whether a step with the optimiser's two moments per weight fits; leaves no trace in the task."""
    learning = [parameter for parameter in task.parameters() if parameter.requires_grad]
    training = task.training
    task.eval()  # running means and centres must not move; activations take the same room
    try:
        moments = [torch.empty_like(parameter) for parameter in learning for _ in range(2)]
        with fabric.autocast():
            loss = task(batch, task.peak_memory_step())["loss"]
        loss.backward()
        del moments
        return _room_left(fabric.device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        task.train(training)
        for parameter in learning:
            parameter.grad = None
        if fabric.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _room_left(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.cuda.max_memory_allocated(device) < _FULL * torch.cuda.mem_get_info(device)[1]


def _agreed(fabric: Fabric, fits: bool) -> bool:
    fitting: Any = fabric.all_reduce(torch.tensor(float(fits), device=fabric.device), reduce_op="mean")
    return float(fitting) == 1.0


def first_images(batch: Any, count: int) -> Any:
    """The same batch with only its first ``count`` images."""
    if isinstance(batch, Tensor):
        return batch[:count]
    if isinstance(batch, list):
        return [first_images(part, count) for part in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: first_images(getattr(batch, field.name), count) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch
