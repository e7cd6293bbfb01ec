"""A new objective in one file: variance and covariance of the grid's channels (VICReg), registered by name.

    python examples/own_objective.py

Bardes et al., "VICReg" (2022), Eq. 1 and 3, on the N = B·h·w tokens z of a batch with covariance matrix C:

    v = 1/D Σ_d max(0, γ - sqrt(C_dd + ε)),   c = 1/D Σ_{d≠e} C_de²,   L = v + μ c
"""

import torch

import frugalvit as fv
from frugalvit.features import Features
from frugalvit.objectives import Objective, ObjectiveContext, get_objective, register_objective


@register_objective("variance_covariance")  # <- 1: the name
class VarianceCovariance(Objective):
    """The standard deviation of every channel is at least γ, and the channels are not correlated."""

    def __init__(self, dim: int, gamma: float = 1.0, covariance_weight: float = 0.04) -> None:
        super().__init__(dim)
        self.gamma, self.covariance_weight = gamma, covariance_weight

    def forward(self, features: Features, context: ObjectiveContext) -> torch.Tensor:  # <- 2: features -> loss
        tokens = features.grid.float().transpose(0, 1).flatten(1)  # (D, N)
        covariance = torch.cov(tokens)
        variance = covariance.diagonal()
        spread = (self.gamma - (variance + 1e-4).sqrt()).relu().mean()
        return spread + self.covariance_weight * (covariance.square().sum() - variance.square().sum()) / self.dim


def main(steps: int = 10) -> list[float]:
    torch.manual_seed(0)
    backbone = fv.create_backbone("swin_nano", img_size=64)
    objective = get_objective("variance_covariance")(backbone.dim)  # <- 3: built by name, as a task does
    optimizer = torch.optim.AdamW([*backbone.parameters(), *objective.parameters()], lr=5e-4)
    losses: list[float] = []
    for step in range(steps):
        images = torch.rand(8, 3, 64, 64)
        loss = objective(backbone(images), ObjectiveContext(images=images, step=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    values = main()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
