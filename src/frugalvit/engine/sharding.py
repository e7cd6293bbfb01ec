"""``--strategy fsdp``: each rank stores a part of the weights, gradients and moments (PyTorch's FSDP2, through Fabric).

Blocks of backbones gather their weights for their own forward and backward pass; everything else does so for the step.
Checkpoints hold full tensors, as those of every run, so that a run may resume with another strategy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning_fabric import Fabric
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit.backbones import Backbone
from frugalvit.errors import UserError

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def make_strategy(world: int, timeout: timedelta) -> ModelParallelStrategy:
    return ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1, timeout=timeout)


def is_sharded(fabric: Fabric) -> bool:
    return isinstance(fabric.strategy, ModelParallelStrategy)


def setup(task: nn.Module, fabric: Fabric) -> nn.Module:
    """Share the weights of a task among the ranks; return it as Fabric wrapped it."""
    if any(isinstance(module, _BatchNorm) for module in task.modules()):
        raise UserError("--strategy fsdp does not synchronize batch norms: use --strategy ddp for this network.")
    if getattr(fabric.strategy.precision, "scaler", None) is not None:
        raise UserError("--strategy fsdp does not work with fp16: use --precision bf16 or 32.")
    module: Any = fabric.setup_module(task.to(fabric.device))
    task._get_fsdp_state()._lazy_init()  # type: ignore  # the task is the root, also if its backbone runs first
    return module


def _shard(task: Any, mesh: Any) -> nn.Module:
    for network in [module for module in task.modules() if isinstance(module, Backbone)]:
        for block in _blocks(network):
            fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(task, mesh=mesh["data_parallel"])


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the innermost modules with parts of their own that stand in a list or a sequence."""
    parents = [module for module in network.modules() if isinstance(module, _CONTAINERS)]
    listed = dict.fromkeys(child for parent in parents for child in parent.children())  # in the same order on all ranks
    blocks = [child for child in listed if not isinstance(child, _CONTAINERS) and any(True for _ in child.children())]
    return [block for block in blocks if not any(part in blocks for part in [*block.modules()][1:])]


@contextmanager
def gathered_weights(task: nn.Module) -> Iterator[None]:
    """Inside this context ranks can run parts of the task on their own, as in evaluation."""
    shards: list[Any] = [module for module in task.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.unshard()
        if module is not task:  # a block would gather its weights at every forward, and ranks may run unequal numbers
            module.set_reshard_after_forward(False, recurse=False)
    yield
    for module in shards:
        if module is not task:
            module.set_reshard_after_forward(True, recurse=False)
        module.reshard()


def full_state(value: Any) -> Any:
    """Return a state with full tensors; all ranks call this together."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return type(value)((name, full_state(part)) for name, part in value.items())
    return value


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, if the parameter is shared among the ranks."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


def load_task(task: nn.Module, state: dict[str, Tensor]) -> None:
    if shards := [(name, parameter) for name, parameter in _sharded(task) if name in state]:
        state = state | {name: shard_like(state[name], parameter) for name, parameter in shards}
    task.load_state_dict(state)


def load_optimizer(optimizer: Any, state: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    moments = {
        number: {name: shard_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": moments})


def merge(task: nn.Module) -> None:
    """Give every rank the full weights again, as plain tensors in plain modules; training is over."""
    full = {name: parameter.full_tensor() for name, parameter in _sharded(task)}  # type: ignore[attr-defined]
    for module in task.modules():
        if isinstance(module, FSDPModule):
            module.__class__ = type(module).__bases__[1]  # FSDP had put its own class in front
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._state_dict_pre_hooks):
                hooks.clear()
            module._load_state_dict_pre_hooks.clear()
    for name, parameter in _sharded(task):
        path, _, leaf = name.rpartition(".")
        plain = nn.Parameter(full[name].detach().clone(), requires_grad=parameter.requires_grad)
        setattr(task.get_submodule(path), leaf, plain)


def _sharded(task: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in task.named_parameters() if isinstance(value, DTensor)]


def plain_norm(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
