"""CUDA graphs compute the same gradients. On a CPU a replacement recomputes what a graph would replay."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

import train_step
from frugalvit.config.probe import BenchStepConfig
from frugalvit.engine import step as engine_step
from frugalvit.engine.ema import EMA
from frugalvit.engine.schedules import Constant, Cosine
from frugalvit.engine.step import WARM_UP, CaptureError, GraphedStep, TrainStep
from frugalvit.errors import UserError

Values = dict[str, Tensor]


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace graphs by functions that recompute with the captured tensors."""
    replays: list[Any] = []

    def make(learning: list[nn.Parameter]) -> Callable[..., Any]:
        def record(action: Callable[[], Values], stream: Any, pool: Any) -> tuple[Callable[[], None], Values]:
            assert all(parameter.grad is None for parameter in learning)
            with undone():
                values = action()
            gradients = [parameter.grad for parameter in learning]

            def replay() -> None:
                replays.append(action)
                for parameter in learning:
                    parameter.grad = None
                for name, value in action().items():
                    values[name].copy_(value)
                for parameter, gradient in zip(learning, gradients, strict=True):
                    assert (gradient is None) == (parameter.grad is None)
                    if gradient is not None:
                        gradient.copy_(parameter.grad)
                    parameter.grad = None

            return replay, values

        return record

    monkeypatch.setattr(engine_step, "on_side_stream", lambda action, stream: action())
    monkeypatch.setattr(GraphedStep, "_capture", _patched(make))
    return replays


STEPPED: list[nn.Module] = []
"""The task whose steps are recorded now."""


@contextmanager
def undone() -> Iterator[None]:
    """Undo what a capture did to centres and generators: a real capture computes nothing."""
    before = [{name: value.clone() for name, value in task.state_dict().items()} for task in STEPPED]
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    for task, values in zip(STEPPED, before, strict=True):
        task.load_state_dict(values)


def _patched(make: Callable[..., Any]) -> Callable[..., Any]:
    real = GraphedStep._capture

    def with_its_parameters(self: GraphedStep, action: Any, inputs: Any) -> Any:
        before = engine_step.capture
        engine_step.capture = make(list(self.parameters))
        try:
            return real(self, action, inputs)
        finally:
            engine_step.capture = before

    return with_its_parameters


def stepper_of(kind: str, recorded: bool, localization: float) -> TrainStep:
    values = {"kind": kind, "backbone": "swin_nano", "img_size": 32, "batch": 4}
    values |= {"prototypes": 16} if kind == "pretrain" else {"localization": localization}
    config = BenchStepConfig.parse(values | {"device": "cpu", "precision": "32"})
    fabric = Fabric(accelerator="cpu", devices=1)
    store, classes, _ = train_step._store(config, fabric.device)
    stepper = train_step._make_train_step(config, train_step._batches(config, store, classes), classes, fabric, False)
    stepper.plan.lr = Cosine(1e-3, 1e-4, 12)
    stepper.task.use_cuda_graphs = recorded
    if kind == "pretrain":
        task: Any = stepper.task
        task.hold_last, task.health_every = 2, 2
    STEPPED[:] = [stepper.task]
    return stepper


@pytest.mark.parametrize(("kind", "localization", "replayed"), [("train", 0.5, 10), ("pretrain", 0.0, 5)])
def test_graphed_step_equals_the_step(kind: str, localization: float, replayed: int, without_a_gpu: list[Any]) -> None:
    """Images, targets, pairs, temperatures, stochastic depth and rates differ at every step; weights are the same."""
    ends = []
    for recorded in (False, True):
        stepper = stepper_of(kind, recorded, localization)
        losses = []
        for step in range(WARM_UP + 10):
            stepper.step, stepper.window = step, {}
            stepper.one_step()
            losses.append({name: row[names.index(name)] for names, row in stepper.window.items() for name in names})
        ends.append((losses, dict(stepper.task.state_dict())))
    assert len(without_a_gpu) == replayed
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("kind", ["train", "pretrain"])
def test_skipped_graphed_step(kind: str, without_a_gpu: list[Any]) -> None:
    """Weights, centres and EMA stay."""
    stepper = stepper_of(kind, True, 0.0)
    task: Any = stepper.task
    if kind == "train":
        task.ema, task.average = 0.5, copy.deepcopy(task.backbone)
        task.average_update = EMA(task.average, task.backbone, buffers=True)
    else:
        task.momentum = Constant(0.5)
    for step in range(2 * WARM_UP + 4):
        stepper.step = step
        stepper.one_step()
    replayed = len(without_a_gpu)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    batch = task.batch_at(stepper.step + 1)
    (batch.images[0] if kind == "pretrain" else batch.images)[0] = torch.nan
    task.batch_at = lambda step: batch
    stepper.step += 1
    stepper.one_step()
    assert len(without_a_gpu) == replayed + 1 and stepper.guard.tolist() == [1, 1]
    torch.testing.assert_close(dict(task.state_dict()), before, rtol=0, atol=0)


def toy() -> tuple[GraphedStep, nn.Parameter, Callable[..., Values]]:
    STEPPED.clear()
    weight = nn.Parameter(torch.zeros(2))

    def action(images: Tensor, more: Tensor | None, twice: bool) -> Values:
        loss = (weight * images.sum(0)).sum() * (2 if twice else 1) + (0 if more is None else more.sum() * weight.sum())
        loss.backward()
        return {"loss": loss.detach().clone()}

    return GraphedStep([weight], torch.device("cpu")), weight, action


def test_one_graph_per_kind_of_step(without_a_gpu: list[Any]) -> None:
    """A smaller last batch, a step without a tensor, one with a flag."""
    made, weight, action = toy()
    for step in range(100):
        images = torch.full((3 if step % 4 else 2, 2), float(step))
        more, twice = torch.ones(1) if step % 2 else None, step % 5 == 0
        weight.grad = None
        made.run(action, [images, more, twice])
        wanted = images.sum(0) * (2 if twice else 1) + (0 if more is None else 1)
        torch.testing.assert_close(weight.grad, wanted)
    assert len(made.captured) == 6
    assert len(without_a_gpu) == 100 - 6 * WARM_UP


def test_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, action = toy()

    def refuse(action: Any, stream: Any, pool: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(engine_step, "on_side_stream", lambda action, stream: action())
    monkeypatch.setattr(engine_step, "capture", refuse)
    for _ in range(WARM_UP):
        made.run(action, [torch.ones(2, 2), None, False])
    with pytest.raises(CaptureError, match="operation not permitted when stream is capturing"):
        made.run(action, [torch.ones(2, 2), None, False])


@pytest.mark.parametrize("kind", ["train", "pretrain"])
def test_run_continues_after_a_failed_capture(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "auto" trains on without graphs, to the same weights; ``--compile graphs`` ends with an error."""

    def refuse(action: Callable[[], Values], stream: Any, pool: Any) -> Any:
        with undone():
            action()
        torch.rand(3)  # a capture may draw random numbers
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(engine_step, "on_side_stream", lambda action, stream: action())
    monkeypatch.setattr(engine_step, "capture", refuse)
    ends = []
    for graphs in (False, True):
        stepper = stepper_of(kind, graphs, 0.5)
        for step in range(WARM_UP + 8):
            stepper.step = step
            stepper.one_step()
        assert not stepper.task.use_cuda_graphs
        ends.append(dict(stepper.task.state_dict()))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    assert capsys.readouterr().err.count("The run continues without CUDA graphs") == 1
    stepper = stepper_of(kind, True, 0.5)
    stepper.task.requires_cuda_graphs, stepper.step = True, 2
    stepper.graphs.warmed_up = defaultdict(lambda: WARM_UP)  # type: ignore[assignment]
    with pytest.raises(UserError, match="Use --compile true"):
        stepper.one_step()


def test_a_torch_without_the_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of the failed capture is raised, not the missing function."""
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.delattr(torch._C, name, raising=False)
    for name in ("CUDAGraph", "current_stream", "set_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: torch.zeros(()))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())

    def fail() -> Values:
        raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        engine_step.capture(fail, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["train", "pretrain"])
@pytest.mark.parametrize(
    "backbone",
    ["cvt_13", "cvt_tiny_w7", "t2t_vit_14", "vil_tiny_w7", "swin_nano", "vit_tiny_patch16_224", "convnext_atto"],
)
def test_replayed_gradients(kind: str, backbone: str) -> None:
    """Replayed kernels compute the losses and the norms of the gradients that PyTorch computes without graphs."""
    curves = []
    for graphs in (False, True):
        values = {"kind": kind, "backbone": backbone, "img_size": 96, "batch": 8, "device": "cuda", "precision": "32"}
        config = BenchStepConfig.parse(values | ({"prototypes": 64} if kind == "pretrain" else {}))
        fabric = Fabric(accelerator="cuda", devices=1)
        store, classes, _ = train_step._store(config, fabric.device)
        batches = train_step._batches(config, store, classes)
        stepper = train_step._make_train_step(config, batches, classes, fabric, False)
        stepper.task.use_cuda_graphs = stepper.task.requires_cuda_graphs = graphs
        rows = []
        for step in range(WARM_UP + 4):
            stepper.step, stepper.window = step, {}
            stepper.one_step()
            values = {name: row[names.index(name)] for names, row in stepper.window.items() for name in names}
            rows.append([float(values["loss"]), float(values["gradient_norm"])])
        assert bool(stepper.graphs.captured) == graphs
        curves.append(torch.tensor(rows))
    torch.testing.assert_close(curves[1], curves[0], rtol=0.02, atol=1e-3)


@pytest.mark.gpu
def test_training_after_a_failed_capture() -> None:
    """A wait in the step breaks the capture; dropout, the side stream and later captures work again."""
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    pool, values = torch.cuda.graph_pool_handle(), torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        engine_step.capture(lambda: {"loss": nn.functional.dropout(values) * values.sum().item()}, stream, pool)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert float(nn.functional.dropout(values, 0.5).sum()) in range(0, 9, 2)
    replay, outputs = engine_step.capture(lambda: {"loss": 2 * values}, stream, torch.cuda.graph_pool_handle())
    replay()
    assert outputs["loss"].tolist() == [2.0] * 4
