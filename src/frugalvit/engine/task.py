"""What training asks of a task; detection and segmentation have such tasks too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class Task(nn.Module, ABC):
    """A module that turns a batch into named losses, and what the loop has to know about it.

    A class to derive from rather than a protocol: Fabric and the optimiser take nothing but an ``nn.Module``.
    """

    best_metric: str  # the metric whose highest value, of equal ones the last, marks the best checkpoint
    eval_split: str  # the split that evaluate() looks at; only "val" may choose the best checkpoint
    batches: Any  # where batch_at() takes its batches from
    nonfinite_outputs = False  # whether the weights that evaluate() saw last give answers that are no numbers
    export_last = False  # whether the last weights are the result, whichever scored best
    use_cuda_graphs = False  # whether its gradients are replayed as a CUDA graph; such a task has inputs() and judge()

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether its step is known to work as CUDA graphs."""
        return False

    @property
    def cuda_graphs_blocker(self) -> str:
        """Why its step cannot be replayed as CUDA graphs, or nothing."""
        return ""

    def is_capturable(self, step: int) -> bool:
        """Whether the step is one of the many of its kind, and not of a short beginning: worth recording."""
        return True

    def peak_memory_step(self) -> int:
        """A step in which all takes part that ever does: none needs more memory."""
        return 0

    @abstractmethod
    def forward(self, batch: Any, step: int) -> dict[str, Tensor]:
        """The losses of a batch: ``loss`` is what is minimised, the others are for the log."""

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimiser is made with; parameters by name."""

    @abstractmethod
    def batch_at(self, step: int) -> Any:
        """This process's part of the run's batch of this number."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Scores on the split that is watched; nothing where there is none."""

    @abstractmethod
    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Look at what is logged; whether the run should end because going on would be a waste."""

    @abstractmethod
    def compile_with(self, graphs: bool) -> None:
        """Compile what a step computes; ``graphs``: and replay it as CUDA graphs."""

    def step_inputs(self, batch: Any, step: int) -> tuple[Tensor | bool | None, ...]:
        """All that tells one step from another: tensors, and flags for steps of another kind."""
        raise NotImplementedError

    def compute_losses(self, *inputs: Any) -> dict[str, Tensor]:
        """The losses, from what ``inputs`` gave."""
        raise NotImplementedError

    def before_optimizer(self, step: int) -> None:
        """Between the gradients and the optimiser; by itself nothing."""

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        """After the optimiser; by itself nothing.

        skipped: whether it left the weights alone, since gradients were not finite; on a GPU to be asked there only
        """
