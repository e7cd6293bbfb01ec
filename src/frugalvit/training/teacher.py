"""The teacher of label-free learning: the student's network, moved after it and never by chance."""

from __future__ import annotations

from typing import Any, cast

from timm.layers.drop import DropPath
from torch.nn.modules.dropout import _DropoutNd

from frugalvit.backbones import Backbone
from frugalvit.backbones.factory import from_spec
from frugalvit.backbones.vil import SparseAttention


def make_twin(backbone: Backbone) -> Backbone:
    """The same network with the same weights, in which nothing is dropped or drawn.

    It works in training mode, where batch norms see the batch that the student sees; dropouts would act there, too, and
    targets, centres and signs of life would come from a network with holes. A ViL whose student looks at one neighbour
    window, drawn each step, looks at all of them here, as it does in evaluation.
    """
    drops = any(isinstance(module, DropPath) for module in backbone.modules())
    twin = from_spec(backbone.spec(), **({"drop_path": 0.0} if drops else {}))
    twin.load_state_dict(backbone.state_dict())
    for module in twin.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if hasattr(module, "drop_rate"):  # timm's convolutional networks drop out by a function
            cast(Any, module).drop_rate = 0.0
        if isinstance(module, SparseAttention):
            module.neighbours = "all"
    return twin
