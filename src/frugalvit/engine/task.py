"""Task: the interface that the trainer needs. Classification, pre-training, detection and segmentation implement it."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from frugalvit.engine.health import RunHealth
from frugalvit.utils.scores import SCORE_NAMES, read_scores


class Task(nn.Module, ABC):
    """A module that turns a batch into named losses."""

    best_metric: str  # its highest value marks the best checkpoint; of equal values, the latest
    eval_split: str  # the split that evaluate() scores; only "val" may choose the best checkpoint
    batches: Any = None  # the BatchSource of batch_at(); dense tasks have a StepLoader instead
    unprinted: tuple[str, ...] = ()  # scores that are logged, but not printed
    nonfinite_outputs = False  # True if the last evaluate() saw non-finite outputs
    export_last = False  # True if the last weights are exported, even if earlier ones scored better
    health: RunHealth | None = None  # watches the metrics; a collapsed run may go back to earlier weights
    compiles_by_default = True  # False if "auto" should replay PyTorch's own kernels instead of compiling the step
    cuda_graphs_blocker = ""  # the reason why the step cannot be a CUDA graph
    use_cuda_graphs = False  # True if CUDA graphs replay the gradients; needs step_inputs() and compute_losses()
    requires_cuda_graphs = False  # True if a step that cannot be captured is an error; else the run trains without

    def is_capturable(self, step: int) -> bool:
        """True if many steps run the same operations as this one, so that a graph of it is reused."""
        return True

    def peak_memory_step(self) -> int:
        """A step with every loss active, used to measure peak memory."""
        return 0

    def forward(self, batch: Any, step: int) -> dict[str, Tensor]:
        """Return the losses of a batch: ``loss`` is minimized, the others are logged."""
        return self.compute_losses(*self.step_inputs(batch, step))

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, with named parameters."""

    @abstractmethod
    def batch_at(self, step: int) -> Any:
        """Return this rank's part of the batch of a step."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Score the evaluation split; return {} if the run has none."""

    def describe_scores(self, scores: dict[str, float]) -> str:
        """Return the scores of evaluate() in one line: the main one with images, interval and chance level."""
        known = read_scores(scores | self.score_facts())[:1]
        others = [
            f"{name} {value:.4g}" for name, value in scores.items() if name not in {*SCORE_NAMES, *self.unprinted}
        ]
        return " · ".join([*map(str, known), *others])

    def score_facts(self) -> dict[str, Any]:
        """Return what the last evaluate() was scored on: images, intervals, chance levels; see utils/scores.py."""
        return {}

    @abstractmethod
    def on_metrics(self, step: int, metrics: dict[str, float]) -> bool:
        """Receive the logged metrics; return True to end the run because more steps cannot help."""

    @abstractmethod
    def compile_with(self, graphs: bool) -> None:
        """Compile what a step computes; with ``graphs``, replay it as CUDA graphs."""

    def step_inputs(self, batch: Any, step: int) -> tuple[Tensor | bool | None, ...]:
        """Return everything that differs between steps: tensors, and flags that choose another graph."""
        raise NotImplementedError

    def compute_losses(self, *inputs: Any) -> dict[str, Tensor]:
        """Compute the losses from ``step_inputs``."""
        raise NotImplementedError

    def before_optimizer(self, step: int) -> None:
        """Run between backward and the optimizer. Does nothing by default."""

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        """Run after the optimizer. Does nothing by default.

        skipped: True if the gradients were non-finite and the optimizer kept the weights; stays on the device
        """
