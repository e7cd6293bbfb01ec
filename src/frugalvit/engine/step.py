"""One training step: fetch, forward, backward, clip, step.

Everything random in a step is a function of (seed, step). The device itself sums the losses and skips steps with
non-finite gradients, so the CPU does not wait for a GPU.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import AdamW

from frugalvit.config.resolved import ResolvedRunConfig
from frugalvit.engine.muon import Muon
from frugalvit.engine.schedules import Constant, Schedule
from frugalvit.engine.sharding import plain_norm
from frugalvit.engine.task import Task
from frugalvit.errors import UserError
from frugalvit.objectives.esvit import Matching
from frugalvit.utils import console
from frugalvit.utils.text import short_message


@dataclass
class TrainPlan:
    """Length, learning rate and intervals of a run, all in steps."""

    steps: int
    steps_per_epoch: int
    lr: Schedule
    weight_decay: Schedule | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    muon: bool = False
    clip: float = 0.0
    clip_per: str = "global"
    accumulate: int = 1
    images_per_step: int = 1
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_first: bool = False  # before the first step too: the initial weights may be the best
    save_every: int = 0
    save_minutes: float = 10.0
    max_nonfinite_steps: int = 5  # in a row
    rescues: int = 0  # times that a collapsed run may go back to its last good weights
    rank_timeout: float = 300.0  # seconds

    @classmethod
    def from_config(
        cls, config: ResolvedRunConfig, images: int, world: int, *, group: int = 1, lines: int = 10
    ) -> TrainPlan:
        """Make a plan with constant rates and without evaluation; a command changes that with ``replace``.

        images: training images; world: number of ranks
        group:  images that must stay on one rank (2 for mixup pairs)
        lines:  lines of metrics that even a short run writes
        """
        batch = in_equal_parts(config.batch, images, equal_parts(world, config.accumulate, group))
        steps, optimizer = total_steps(config.steps, config.length(), images, batch), config.optimizer
        return cls(
            steps=steps,
            steps_per_epoch=steps_per_epoch(images, batch),
            lr=Constant(config.lr),
            weight_decay=Constant(optimizer.weight_decay),
            betas=optimizer.betas,
            muon=getattr(optimizer, "muon", False) is True,  # detectors and segmenters always take AdamW
            clip=optimizer.clip,
            clip_per=optimizer.clip_per,
            accumulate=config.accumulate,
            images_per_step=batch,
            seed=config.seed,
            log_every=min(config.log_every, max(1, steps // lines)),
            save_every=config.save_every,
            rank_timeout=config.peer_timeout,
        )


def make_optimizer(task: Task, plan: TrainPlan, fabric: Fabric) -> AdamW:
    """Make AdamW or Muon with the learning rate of step 0."""
    kind = Muon if plan.muon else AdamW
    return kind(task.parameter_groups(), lr=plan.lr.at(0), betas=plan.betas, fused=_fused(fabric))


class TrainStep:
    """Takes training steps of a task. ``module`` is the task as Fabric wrapped it."""

    def __init__(self, task: Task, module: nn.Module, optimizer: Any, plan: TrainPlan, fabric: Fabric) -> None:
        self.task, self.module, self.optimizer = task, module, optimizer
        self.plan, self.fabric = plan, fabric
        self.step = 0
        self.window: dict[tuple[str, ...], Tensor] = {}  # sums and counts, by the set of logged names
        self.once = torch.ones((), device=fabric.device)
        self.guard = torch.zeros(2, device=fabric.device)  # non-finite steps: in a row, in total
        self.moved, self.statistics = BufferSnapshot(task, MOVED), BufferSnapshot(task, STATISTICS)
        self.inner = unwrapped(optimizer)
        self.learning = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        self.graphs = GraphedStep(self.learning, fabric.device)
        self.scaled = getattr(fabric.strategy.precision, "scaler", None) is not None

    def one_step(self) -> None:
        plan, step = self.plan, self.step
        seed_step(plan.seed, step, self.fabric.global_rank)
        self._set_schedules(step)
        self.moved.save()
        graphed = self.task.use_cuda_graphs and self.task.is_capturable(step)
        if not (graphed and self._run_graph(step)):
            self._accumulate(step)
        norm = self._clip()
        skipped = step_if_finite(self.optimizer, norm, self.guard, scaled=self.scaled)
        self.moved.restore_if(skipped)  # a NaN would stay in a running mean or a centre
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_step(step, skipped)
        self._collect({"gradient_norm": norm})

    def _run_graph(self, step: int) -> bool:
        """Compute the gradients as a CUDA graph; return False if the run continues without graphs."""
        try:
            inputs = self.task.step_inputs(self.task.batch_at(step), step)
            self._collect(self.graphs.run(self._gradients, inputs))
        except CaptureError as error:
            if self.task.requires_cuda_graphs:
                raise UserError(f"{error} Use --compile true.") from error
            console.warning(f"{error} The run continues without CUDA graphs.")
            self.task.use_cuda_graphs = False
            for level in (module for module in self.task.modules() if isinstance(module, Matching)):
                level.forget_teacher()
            self.optimizer.zero_grad(set_to_none=True)
            self.graphs.captured.clear()
            seed_step(self.plan.seed, step, self.fabric.global_rank)  # the capture drew random numbers
        return self.task.use_cuda_graphs

    def _accumulate(self, step: int) -> None:
        """Compute the gradients of a step, micro-batch by micro-batch."""
        parts = self.plan.accumulate
        for micro in range(parts):
            batch = self.task.batch_at(step * parts + micro)
            with self.fabric.no_backward_sync(self.module, enabled=micro + 1 < parts):  # type: ignore[arg-type]
                losses = self.module(batch, step)
                self._backward(losses["loss"] / parts)
            self._collect(losses)
        self.task.before_optimizer(step)

    def _gradients(self, *inputs: Tensor | bool | None) -> dict[str, Tensor]:
        """Compute the gradients from tensors alone, so that a CUDA graph can capture it; return the losses."""
        with self.fabric.autocast():
            losses = self.task.compute_losses(*inputs)
        self._backward(losses["loss"])
        self.task.before_optimizer(self.step)
        return {name: loss.detach() for name, loss in losses.items()}

    def _backward(self, loss: Tensor) -> None:
        """Run backward, then restore BatchNorm's statistics: recomputed activations update them twice.

        timm's networks have their own recomputation, so the trainer restores the statistics.
        """
        self.statistics.save()
        self.fabric.backward(loss)
        self.statistics.restore()

    def _set_schedules(self, step: int) -> None:
        lr = self.plan.lr.at(step)
        decay = (self.plan.weight_decay or Constant(0.0)).at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            if group.get("decayed"):
                group["weight_decay"] = decay

    def _clip(self) -> Tensor:
        """Clip by the global norm, or each tensor by its own norm; return the global norm before clipping."""
        # The fp16 scaler identifies optimizers by object: with the wrapper it would unscale now and again at the step.
        self.fabric.strategy.precision.unscale_gradients(self.inner)
        if self.plan.clip_per == "tensor":
            return plain_norm(clip_per_tensor(self.learning, self.plan.clip))
        return plain_norm(nn.utils.clip_grad_norm_(self.learning, self.plan.clip if self.plan.clip > 0 else math.inf))

    def _collect(self, values: dict[str, Tensor]) -> None:
        """Add values to the window's sums on the device. Reading them each step would stall the device."""
        names = tuple(sorted(values))
        row = torch.stack([*(values[name].detach().float() for name in names), self.once])
        self.window[names] = self.window[names] + row if names in self.window else row


def _fused(fabric: Fabric) -> bool:
    """True if fused AdamW works. On a CPU it takes a quarter of plain AdamW's time."""
    return fabric.device.type in ("cuda", "cpu")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout and stochastic depth by (seed, step, rank), so that resume needs no stored state."""
    torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + rank) % 2**63)


def equal_parts(world: int, accumulate: int, group: int = 1) -> int:
    """Return the number that the batch size must be a multiple of. ``group``: images that share a rank."""
    return world * accumulate * (group if world > 1 else 1)


def in_equal_parts(batch: int, images: int, parts: int) -> int:
    """Return the largest multiple of ``parts`` up to ``batch`` and ``images``; at least ``parts``."""
    return max(parts, min(batch, images) // parts * parts)


def steps_per_epoch(images: int, batch: int) -> int:
    """Return the number of full batches in an epoch, at least 1."""
    return max(1, images // batch)


def total_steps(steps: int | None, epochs: float, images: int, batch: int) -> int:
    """Return the length of a run in optimizer steps: ``steps`` if it is set, else from ``epochs``."""
    return steps if steps is not None else max(1, round(epochs * steps_per_epoch(images, batch)))


# -- gradients between backward and the optimizer: clip them, skip non-finite steps, restore buffers

_foreach: Any = torch  # the multi-tensor functions have private names


def clip_per_tensor(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Clip each gradient tensor to the norm ``limit``, as EsViT does; return the global norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = _foreach._foreach_norm(gradients)
    joint = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    if limit > 0:
        scales = _foreach._foreach_add(norms, 1e-6)
        _foreach._foreach_reciprocal_(scales)
        _foreach._foreach_mul_(scales, limit)
        _foreach._foreach_clamp_max_(scales, 1.0)
        _foreach._foreach_mul_(gradients, scales)
    return joint


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer without Fabric's wrapper; gradient scalers identify it by this object."""
    return getattr(optimizer, "optimizer", optimizer)


def step_if_finite(optimizer: Any, norm: Tensor, guard: Tensor, *, scaled: bool = False) -> Tensor:
    """Step the optimizer if the gradients are finite, else count the step; return True if it was skipped.

    On a GPU the decision stays on the device: fused AdamW reads ``found_inf`` and keeps weights and moments. With fp16
    (``scaled``) the gradient scaler does the same and halves its scale.
    """
    bad = ~torch.isfinite(norm)
    guard[0] = torch.where(bad, guard[0] + 1, torch.zeros_like(guard[0]))
    guard[1] += bad
    inner = unwrapped(optimizer)
    if norm.device.type == "cuda":
        inner.grad_scale, inner.found_inf = None, bad.float()
        optimizer.step()
    elif scaled or not bool(bad):
        optimizer.step()
    return bad


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""BatchNorm buffers, which every forward pass changes."""

THRESHOLDS = ("confident_class", "confidence_mean", "confidence_variance", "mean_probs")
"""Buffers of pseudo-labels (``objectives/pseudo_labels.py``)."""

MOVED = (*STATISTICS, *THRESHOLDS, "window_counts", "center")  # all buffers that a step changes


class BufferSnapshot:
    """A copy of the buffers with these names, to restore later."""

    def __init__(self, task: nn.Module, names: tuple[str, ...]) -> None:
        kinds: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, buffer in task.named_buffers():
            if name.rpartition(".")[2] in names:
                kinds[buffer.dtype].append(buffer)
        self.kinds = list(kinds.values())
        self.before: list[Tensor] = []

    def save(self) -> None:
        self.before = [_flatten(buffers) for buffers in self.kinds]

    def restore(self) -> None:
        for buffers, before in zip(self.kinds, self.before, strict=True):
            _fill(buffers, before)

    def restore_if(self, bad: Tensor) -> None:
        """Restore if ``bad``; on a GPU without synchronizing."""
        if bad.device.type == "cpu" and not bool(bad):
            return
        for buffers, before in zip(self.kinds, self.before, strict=True):
            _fill(buffers, torch.where(bad, before, _flatten(buffers)))


def _flatten(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])


def _fill(buffers: list[Tensor], values: Tensor) -> None:
    parts = values.split([buffer.numel() for buffer in buffers])
    _foreach._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])


# -- CUDA graphs: capture the gradients of a step and replay them
#
# With small images the CPU is the limit: it queues hundreds of kernels per step. A graph is one call, and reserves
# memory. Inputs are copied into fixed tensors; dropout and stochastic depth read the generator's seed at each replay.
# Clipping, the optimizer and the EMA stay outside the graph. The first steps run normally on a side stream: they
# compile and load kernels, which must not happen during capture.

WARM_UP = 3  # normal steps before a kind of input is captured
Inputs = Sequence[Tensor | bool | None]
Values = dict[str, Tensor]


class CaptureError(UserError):
    """A step cannot be captured as a CUDA graph."""


class CapturedGraph(NamedTuple):
    """A captured step: how to replay it, its input tensors, its losses and gradients."""

    replay: Callable[[], None]
    inputs: Inputs
    values: Values
    gradients: list[Tensor | None]


class GraphedStep:
    """Runs a step as CUDA graphs: one graph for each combination of shapes, flags and missing tensors."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.stream = _stream(device) if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.warmed_up: Counter[object] = Counter()
        self.captured: dict[object, CapturedGraph] = {}

    def run(self, action: Callable[..., Values], inputs: Inputs) -> Values:
        """Run one step and return its losses (the next step overwrites them); gradients go to the parameters."""
        kind = tuple((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in inputs)
        if kind not in self.captured:
            self.warmed_up[kind] += 1
            if self.warmed_up[kind] <= WARM_UP:
                return on_side_stream(lambda: action(*inputs), self.stream)
            self.captured[kind] = self._capture(action, inputs)
        graph = self.captured[kind]
        for fixed, value in zip(graph.inputs, inputs, strict=True):
            if isinstance(fixed, Tensor) and isinstance(value, Tensor):
                fixed.copy_(value)
        graph.replay()
        for parameter, gradient in zip(self.parameters, graph.gradients, strict=True):
            parameter.grad = gradient
        return graph.values

    def _capture(self, action: Callable[..., Values], inputs: Inputs) -> CapturedGraph:
        fixed = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
        try:
            replay, values = capture(lambda: action(*fixed), self.stream, self.pool)
        except RuntimeError as error:
            reason = short_message(error.__context__ or error)  # type: ignore[arg-type]
            raise CaptureError(f"This step cannot be captured as a CUDA graph ({reason}…).") from error
        return CapturedGraph(replay, fixed, values, [parameter.grad for parameter in self.parameters])


@functools.cache
def _stream(device: torch.device) -> Any:
    """Return one stream for all graphs: cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)


def on_side_stream(action: Callable[[], Values], stream: Any) -> Values:
    """Run on another stream: autograd accumulates gradients on the forward pass's stream."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        values = action()
    current.wait_stream(stream)
    return values


def capture(action: Callable[[], Values], stream: Any, pool: Any) -> tuple[Callable[[], None], Values]:
    """Capture an action as a graph; return its replay function and its output tensors.

    Graphs of one ``pool`` share temporary memory, since no two run at once.
    """
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    try:
        # thread_local: threads that decode and prefetch images may allocate during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            values = action()
    except RuntimeError:
        torch.cuda.set_stream(current)
        with suppress(RuntimeError, AttributeError, TypeError):  # private functions close the pool
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # type: ignore[attr-defined]
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)  # type: ignore[attr-defined]
        # The next capture ends the capture mode of the random generator.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros((), device=current.device)
        raise
    return graph.replay, values
