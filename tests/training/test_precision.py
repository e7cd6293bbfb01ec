"""Mixed precision rounds products, not what goes into the network."""

from __future__ import annotations

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.data.loader import Batch
from frugalvit.training.precision import make_precision


class Noted(nn.Linear):
    def forward(self, batch: Batch) -> Tensor:
        self.seen = (batch.images.dtype, batch.targets.dtype)  # type: ignore[union-attr]
        self.inside = super().forward(batch.images).dtype
        return super().forward(batch.images)


@pytest.mark.parametrize(("wanted", "inside"), [("bf16", torch.bfloat16), ("32", torch.float32)])
def test_inputs_stay_as_they_are(wanted: str, inside: torch.dtype) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=make_precision(wanted, "cpu"))
    network = Noted(3, 2)
    batch = Batch(torch.randn(2, 3), torch.rand(2, 5), None, torch.arange(2))
    fabric.setup_module(network)(batch)
    assert network.seen == (torch.float32, torch.float32) and network.inside == inside
