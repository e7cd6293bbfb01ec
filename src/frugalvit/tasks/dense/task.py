"""What detection and segmentation have in common as tasks of the one loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.data.augment.color import luma
from frugalvit.engine.param_groups import decay_groups, layer_groups, no_weight_decay_names
from frugalvit.errors import UserError
from frugalvit.tasks.classification.predict import nonfinite_message
from frugalvit.tasks.dense.loader import StepLoader


class DenseTask(nn.Module):
    """A network on a backbone. Subclasses say what a batch is, what its losses are and how it is scored.

    steady: keep the statistics of the backbone's batch norms (it comes with weights, and batches are small)
    """

    best_metric: str
    use_cuda_graphs = nonfinite_outputs = export_last = False  # as in training.task.Task
    net: Any  # the network: Detector or Segmenter
    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: Backbone, *, weight_decay: float = 0.05, layer_decay: float = 1.0, steady: bool = False
    ) -> None:
        super().__init__()
        if backbone.in_chans not in (1, 3):
            raise UserError(
                f"{backbone.name} takes images of {backbone.in_chans} channels, pictures have 3, or 1 in grey: take "
                "one with in_chans 3 or 1."
            )
        self._facts = [backbone]  # in a list: the network already owns it, and a second name would save it twice
        self.weight_decay, self.layer_decay, self.is_capturable = weight_decay, layer_decay, steady
        self.register_buffer("mean", torch.tensor(backbone.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(backbone.std)[:, None, None], persistent=False)
        self.feeding: StepLoader[Any] | None = None
        self.evaluated: Any = None
        self.eval_split = "val"
        self.eval_batch = 1
        self.seen: tuple[Any, Any] | None = None  # what was scored since the last step, and what was found in it
        self.fabric: Fabric | None = None

    def set_data(self, feeding: StepLoader[Any], evaluated: Any, watched: str, fabric: Fabric, batch: int) -> None:
        """Where the steps' pictures come from; those that are scored, and what their split is called."""
        self.feeding, self.evaluated, self.eval_split = feeding, evaluated, watched
        self.fabric, self.eval_batch = fabric, batch

    @property
    def backbone(self) -> Backbone:
        return self._facts[0]

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def normalize(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] -> what the backbone was trained with; in grey where it has one channel."""
        if len(self.mean) == 1:
            images = luma(images)
        return (images - self.mean) / self.std

    def train(self, mode: bool = True) -> DenseTask:
        super().train(mode)
        if mode and self.is_capturable:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    # -- the loop's questions

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """The losses of a step by name; their sum is what is learnt."""
        raise NotImplementedError

    def forward(self, batch: Any, step: int) -> dict[str, Tensor]:
        losses = self.losses(batch)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.layer_decay == 1:
            return decay_groups(
                self.net.named_parameters(), self.weight_decay, undecayed=no_weight_decay_names(self.net)
            )
        inside = {id(parameter) for parameter in self.backbone.parameters()}
        rest = [(name, value) for name, value in self.net.named_parameters() if id(value) not in inside]
        groups = layer_groups(self.backbone.model, self.weight_decay, self.layer_decay)
        return groups + decay_groups(rest, self.weight_decay)

    def before_optimizer(self, step: int) -> None:
        """Nothing to do between the gradients and the optimiser."""

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        """Nothing to do after a step."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Supervised runs have no collapse to watch for."""
        return False

    # -- for evaluation

    def check_finite(self, answers: Tensor) -> None:
        """Note it where the network's answers are no numbers: what follows from them is chance, or nothing."""
        self.nonfinite_outputs = self.nonfinite_outputs or not bool(answers.isfinite().all())

    def agree_on_broken(self) -> None:
        """What any process has met is everybody's."""
        self.nonfinite_outputs = any(self.gather([self.nonfinite_outputs]))

    def refuse_broken(self, where: str) -> None:
        """One line instead of results that mean nothing."""
        if self.nonfinite_outputs:
            raise UserError(nonfinite_message(where))

    def autocast(self) -> AbstractContextManager[Any]:
        return self.fabric.autocast() if self.fabric is not None else nullcontext()

    def gather(self, items: list[Any]) -> list[Any]:
        """What all processes found, on each of them."""
        assert self.fabric is not None
        if self.fabric.world_size == 1:
            return items
        parts: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(parts, items)
        return [item for part in parts for item in part]
