"""Muon: AdamW in which matrices and convolutions take orthogonal steps.

Jordan et al. 2024; the length of a step follows Moonlight (Liu et al. 2025), times ``STEP``.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

MOMENTUM = 0.95
STEP = 0.6
"""With Moonlight's 0.2 a step is about as long as AdamW's. Small data learns more with 0.6 (docs/FIRST_RUN.md)."""


class Muon(AdamW):
    """AdamW for the groups without weight decay, orthogonal steps for those with it (``decayed``: the matrices)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["decayed"]]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if group["decayed"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_shape[len(matrix), matrix[0].numel()].append(matrix)
        found_inf = getattr(self, "found_inf", None)  # on a GPU; the step then changes nothing
        keep = 1.0 if found_inf is None else 1 - found_inf
        for shape, matrices in by_shape.items():
            states = [self.state[matrix] for matrix in matrices]
            gradients = torch.stack([matrix.grad.reshape(shape) for matrix in matrices]).nan_to_num(0, 0, 0)  # type: ignore[union-attr]
            momenta = torch.stack([state.get("momentum", torch.zeros_like(gradients[0])) for state in states])
            momenta = momenta + keep * (1 - MOMENTUM) * (gradients - momenta)
            steps = keep * group["lr"] * STEP * math.sqrt(max(shape)) * orthogonal(gradients.lerp(momenta, MOMENTUM))
            for matrix, state, momentum, step in zip(matrices, states, momenta, steps, strict=True):
                state.update(momentum=momentum.clone(), step=torch.zeros(()))  # Adam cannot load a state without "step"
                matrix.mul_(1 - keep * group["lr"] * group["weight_decay"]).sub_(step.view_as(matrix))


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about the nearest matrices with orthogonal rows, or columns if these are fewer (Newton-Schulz)."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    result = identity = torch.eye(x.shape[1], device=x.device)
    products = x @ x.mT  # smaller than x, which halves the time
    for _ in range(5):
        factor = 3.4445 * identity - 4.7750 * products + 2.0315 * products @ products
        result, products = factor @ result, factor @ products @ factor
    return result @ x if wide else (result @ x).mT
