"""The DINO projection head: features -> similarities to a set of learned prototypes.

Caron et al., "Emerging Properties in Self-Supervised Vision Transformers" (2021); EsViT (Li et al., 2022) uses one
for views and another, of the same form, for regions.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.objectives.checks import check_momentum


class Prototypes(nn.Module):
    """A linear layer without bias whose K rows are g_k · v_k / |v_k|: (…, P) -> (…, K).

    The parameters have the names of weight normalization in released checkpoints, ``weight_g`` and ``weight_v``. Unlike
    torch's hook, this module can be deep-copied at any time.
    """

    def __init__(self, bottleneck: int, prototypes: int, norm_last: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(bottleneck)
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1), requires_grad=not norm_last)
        self.weight_v = nn.Parameter(torch.empty(prototypes, bottleneck).uniform_(-bound, bound))

    def weight(self) -> Tensor:
        """Return the prototypes (K, P), at least in fp32."""
        weight = F.normalize(self.weight_v, dim=1) * self.weight_g
        return weight.to(torch.promote_types(weight.dtype, torch.float32))

    def forward(self, bottleneck: Tensor) -> Tensor:
        return F.linear(bottleneck, self.weight())


class ProjectionHead(nn.Module):
    """dim -> hidden -> … -> bottleneck (GELU between), L2-normalized, then prototypes: (…, D) -> (…, K).

    layers:    linear layers up to and including the bottleneck
    norm_last: prototypes keep length 1 (more stable); otherwise their lengths are learned

    Released EsViT and DINO heads load unchanged: ``mlp.{0,2,4}.*``, ``last_layer.weight_g``, ``last_layer.weight_v``.
    """

    def __init__(
        self,
        dim: int,
        prototypes: int = 65536,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        norm_last: bool = True,
    ) -> None:
        super().__init__()
        if min(dim, prototypes, hidden, bottleneck, layers) < 1:
            raise UserError("a projection head needs dim, prototypes, hidden, bottleneck and layers of at least 1.")
        widths = [dim, *[hidden] * (layers - 1), bottleneck]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            linear = nn.Linear(before, after)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            parts += [linear, nn.GELU()]
        self.mlp = nn.Sequential(*parts[:-1])
        self.last_layer = Prototypes(bottleneck, prototypes, norm_last)

    @property
    def prototypes(self) -> int:
        """K, the number of outputs."""
        return self.last_layer.weight_v.shape[0]

    def project(self, features: Tensor) -> Tensor:
        """(…, D) -> (…, P): the bottleneck, of length 1, at least in fp32."""
        dtype = self.last_layer.weight_v.dtype
        if features.dtype != dtype and not torch.is_autocast_enabled(features.device.type):
            features = features.to(dtype)  # the caller's autocast covered only the network
        bottleneck = self.mlp(features)
        return F.normalize(bottleneck.to(torch.promote_types(bottleneck.dtype, torch.float32)), dim=-1)

    def weight(self) -> Tensor:
        """Return the prototypes (K, P); ``forward`` returns ``project(x) @ weight().T``."""
        return self.last_layer.weight()

    def forward(self, features: Tensor) -> Tensor:
        return self.last_layer(self.project(features))


def update_average(teacher: nn.Module, student: nn.Module, momentum: float, skipped: Tensor | None = None) -> None:
    """Update the EMA: θ_t <- m θ_t + (1 - m) θ_s over all parameters at once (buffers are not averaged).

    skipped: a boolean tensor. If True, the student skipped its step and the teacher stays unchanged. On a GPU the
        value is not read, because the host would have to wait
    """
    check_momentum(momentum)
    move_towards(list(teacher.parameters()), list(student.parameters()), momentum, skipped)


@torch.no_grad()
def move_towards(
    averages: Sequence[Tensor], sources: Sequence[Tensor], momentum: float, skipped: Tensor | None = None
) -> None:
    """θ <- m θ + (1 - m) θ_source for all tensors at once, unless ``skipped``."""
    if skipped is not None and skipped.device.type == "cuda":
        # θ <- θ + s (θ_source - θ) with s = 0 after a skipped step; all tensors are finite.
        step: Any = torch._foreach_sub(sources, averages)  # pyright: ignore
        torch._foreach_mul_(step, (1.0 - momentum) * ~skipped)  # pyright: ignore
        torch._foreach_add_(averages, step)  # pyright: ignore
    elif skipped is None or not bool(skipped):
        torch._foreach_lerp_(averages, sources, 1.0 - momentum)  # pyright: ignore
