"""``--auto-batch``: split the batch into micro-batches until a step fits into the device's memory.

Batch size and learning rate stay. Results differ only by chance: each micro-batch draws its own crops and mixup.
"""

import dataclasses
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.config.train import RunConfig
from frugalvit.engine.distributed import all_reduce_max
from frugalvit.engine.failure_dump import is_out_of_memory
from frugalvit.engine.step import TrainPlan
from frugalvit.engine.task import Task
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils import console

_FULL = 0.95  # share of the device's memory for a step; fragmentation and other processes need the rest


def fit_to_memory(config: RunConfig, plan: TrainPlan, task: Task, run: RunFolder, fabric: Fabric) -> TrainPlan:
    """Return the plan with enough micro-batches to fit; log the number and save it in the configuration."""
    if config.resume and run.has_checkpoint():  # a new run has a checkpoint too if it continues another
        return plan  # a resumed run keeps its number of micro-batches
    if fabric.device.type != "cuda":
        console.info(f"auto-batch: batch stays {plan.images_per_step}; only GPU memory is measured")
        return plan
    fabric.to_device(task)
    parts = parts_that_fit(task, plan.accumulate, fabric)
    if parts == plan.accumulate:
        console.info(f"auto-batch: a batch of {plan.images_per_step} fits")
        return plan
    console.info(f"auto-batch: a batch of {plan.images_per_step} fits in {parts} parts (accumulate = {parts})")
    task.batches = task.batches.with_batch_size(plan.images_per_step // parts)
    run.save_config(config.model_copy(update={"accumulate": parts}))
    return dataclasses.replace(plan, accumulate=parts)


def parts_that_fit(task: Task, parts: int, fabric: Fabric) -> int:
    """Return the number of micro-batches with which forward and backward fit on every rank."""
    batch = task.batch_at(0)
    mixed = getattr(getattr(task, "batches", None), "mixing", None) is not None
    group = 2 if mixed and fabric.world_size > 1 else 1  # a mixup pair stays on one rank
    groups = len(batch.index) // group  # in one of ``parts`` micro-batches, on this rank
    for factor in (number for number in range(1, groups + 1) if groups % number == 0):
        fits = _step_fits(task, first_images(batch, groups // factor * group), fabric)
        if all_reduce_max(fabric, int(not fits)) == 0:  # on all ranks
            return parts * factor
    raise UserError(
        f"Not even {group} images fit into this device's memory. Use a smaller --img-size or --backbone, or "
        "--checkpoint-activations."
    )


def _step_fits(task: Task, batch: Any, fabric: Fabric) -> bool:
    """True if a step with AdamW's two moments fits. Leaves the task unchanged."""
    learning = [parameter for parameter in task.parameters() if parameter.requires_grad]
    training = task.training
    task.eval()  # running means and centres stay; activations take the same memory
    try:
        moments = [torch.empty_like(parameter) for parameter in learning for _ in range(2)]
        with fabric.autocast():
            loss = task(batch, task.peak_memory_step())["loss"]
        loss.backward()
        del moments
        if fabric.device.type != "cuda":
            return True
        return torch.cuda.max_memory_allocated(fabric.device) < _FULL * torch.cuda.mem_get_info(fabric.device)[1]
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


def first_images(batch: Any, count: int) -> Any:
    """Return the batch with only its first ``count`` images."""
    if isinstance(batch, Tensor):
        return batch[:count]
    if isinstance(batch, list):
        return [first_images(part, count) for part in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: first_images(getattr(batch, field.name), count) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch
