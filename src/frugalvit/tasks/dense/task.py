"""DenseTask: what detection and segmentation have in common as tasks of the trainer."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.data.augmentation.operations import luma
from frugalvit.engine.param_groups import decay_groups, no_weight_decay_names
from frugalvit.engine.task import Task
from frugalvit.errors import UserError
from frugalvit.tasks.classification.predict import nonfinite_message
from frugalvit.tasks.dense.loader import ImageReader, StepLoader


class DenseTask(Task):
    """A network on a backbone. ``freeze_norms``: its batch norms keep their statistics: batches are small."""

    mean: Tensor
    std: Tensor
    loader: StepLoader[Any]
    evaluated: Any

    def __init__(self, net: Any, *, weight_decay: float = 0.05, freeze_norms: bool = False) -> None:
        """net: a Detector or a Segmenter"""
        super().__init__()
        self.net = net
        self.weight_decay, self.freezes_norms = weight_decay, freeze_norms
        self.register_buffer("mean", torch.tensor(self.backbone.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(self.backbone.std)[:, None, None], persistent=False)
        self.eval_split = "val"
        self.eval_batch = 1
        self.last_evaluation: Any = None  # the dataset evaluated since the last step, and its results
        self.fabric: Fabric | None = None

    def set_data(self, loader: StepLoader[Any], evaluated: Any, split: str, fabric: Fabric, batch: int) -> None:
        """Set the source of training batches, and the evaluation dataset with its split name and batch size."""
        self.loader, self.evaluated, self.eval_split = loader, evaluated, split
        self.fabric, self.eval_batch = fabric, batch

    @abstractmethod
    def make_dataset(self, items: list[Any], data: Any, pictures: ImageReader) -> Any:
        """Pair images with their annotations."""

    @property
    def backbone(self) -> Backbone:
        return self.net.pyramid.backbone

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize images (B, 3, H, W) in [0, 1] for the backbone; they become grey if it has one channel."""
        if len(self.mean) == 1:
            images = luma(images)
        return (images - self.mean) / self.std

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if mode and self.freezes_norms:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    # -- training

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of a batch by name; training minimizes their sum."""

    def forward(self, batch: Any, step: int) -> dict[str, Tensor]:
        losses = self.losses(batch)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def parameter_groups(self) -> list[dict[str, Any]]:
        names = no_weight_decay_names(self.net)
        return decay_groups(self.net.named_parameters(), self.weight_decay, undecayed=names)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Never stop early: supervised runs cannot collapse."""
        return False

    def compile_with(self, graphs: bool) -> None:
        """Compile the pyramid for changing image sizes; CUDA graphs would need fixed ones."""
        self.net.pyramid.compile(dynamic=True)

    # -- evaluation

    def check_finite(self, outputs: Tensor) -> None:
        """Remember if the network's outputs are non-finite: results computed from them mean nothing."""
        self.nonfinite_outputs = self.nonfinite_outputs or not bool(outputs.isfinite().all())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode; afterwards every rank knows of the non-finite outputs of any rank."""
        was_training, self.nonfinite_outputs = self.training, False
        self.eval()
        yield
        self.train(was_training)
        self.nonfinite_outputs = any(self.gather([self.nonfinite_outputs]))

    def refuse_nonfinite(self, where: str) -> None:
        """Raise UserError if the outputs of the model at path ``where`` were non-finite."""
        if self.nonfinite_outputs:
            raise UserError(nonfinite_message(where))

    def autocast(self) -> AbstractContextManager[Any]:
        return self.fabric.autocast() if self.fabric is not None else nullcontext()

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all ranks, on every rank."""
        assert self.fabric is not None
        if self.fabric.world_size == 1:
            return items
        parts: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(parts, items)
        return [item for part in parts for item in part]
