"""LoRA (Hu et al. 2022): train a low-rank change of each matrix and keep the matrix itself.

W' = W + 2 · B A with A (r, in) and B (out, r). B starts at zero, so that training starts from W.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from frugalvit.backbones.timm_features import classifier_name
from frugalvit.errors import UserError

_SCALE = 2.0
_PLACE = ".parametrizations.weight."  # of a matrix and its change, in the names of the tensors


class LowRank(nn.Module):
    """Adds 2 · B A to a matrix."""

    def __init__(self, matrix: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = matrix.shape
        self.down = nn.Parameter(torch.empty(rank, columns, device=matrix.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=matrix.device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix + _SCALE * (self.up @ self.down)


def add_lora(model: nn.Module, rank: int) -> int:
    """Freeze the network except its classifier, and add LoRA to its linear layers; return the trained parameters."""
    name = classifier_name(model)
    layers = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path != name
        if module.weight.requires_grad and min(module.weight.shape) > rank  # not the blocks of --freeze
    ]
    if not layers:
        raise UserError(f"--lora {rank}: {type(model).__name__} has no linear layers of this size. Leave --lora out.")
    model.requires_grad_(False)
    if name is not None:
        model.get_submodule(name).requires_grad_(True)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def merged_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an ordinary network: each matrix of a checkpoint with LoRA plus its change."""
    merged = {name: tensor for name, tensor in state.items() if _PLACE not in name}
    for place in (name.removesuffix("0.up") for name in state if name.endswith(f"{_PLACE}0.up")):
        change = _SCALE * (state[f"{place}0.up"] @ state[f"{place}0.down"])
        merged[place.replace(_PLACE, ".weight")] = state[f"{place}original"] + change
    return merged


def merge_lora(model: nn.Module) -> None:
    """Replace each matrix by the sum, so that the network is an ordinary one."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
