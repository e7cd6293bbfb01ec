"""Compiled steps: when they are compiled, and that results are the same."""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config as inductor
from lightning_fabric import Fabric

import train_step
from frugalvit import api
from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.base import SharedDropPath
from frugalvit.config.defaults import Facts
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import BenchStepConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.loader import Batch
from frugalvit.engine.compile import COMPILES_FROM, REPLAYS_FROM, compile_task, prepare_compiler
from frugalvit.engine.hardware import configure_cuda
from frugalvit.engine.schedules import Constant
from frugalvit.engine.step import TrainPlan
from frugalvit.experiment.resolve import AutoValues, add_backbone_facts, resolve_training
from frugalvit.objectives import DenseLocalization
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.classification.train import make_task, train
from helpers.tiny_runs import TRAIN, write_images


def fake_task(calls: list[Any], blocker: str = "", compiles: bool = True) -> Any:
    return SimpleNamespace(
        compile_with=calls.append,
        parameters=list,
        cuda_graphs_blocker=blocker,
        compiles_by_default=compiles,
        use_cuda_graphs=False,
    )


def compiled(
    steps: int = COMPILES_FROM, accumulate: int = 1, kind: type = TrainConfig, by_default: bool = True, **values: Any
) -> Any:
    """Return how a run compiles its task, or "not at all"."""
    calls: list[Any] = ["not at all"]
    task = fake_task(calls, compiles=by_default)
    plan, fabric = TrainPlan(steps, steps, Constant(0.1), accumulate=accumulate), Fabric(accelerator="cpu", devices=1)
    compile_task(task, kind.parse({"data": "photos", **values}), plan, fabric)
    return calls[-1]


def task_of(backbone: Backbone, **localization: Any) -> ClassificationTask:
    """Build the task of a run with resolved values."""
    values = {"data": "photos", "localization": {"weight": 0.5} | localization, "ema": 0.0, "batch": 2, "lr": 0.1}
    facts = add_backbone_facts(Facts(8, 3, 32, "cpu"), backbone)
    config = resolve_training(TrainConfig.parse(values | {"steps": 10}), facts, AutoValues())
    return make_task(config, backbone, TrainPlan(10, 10, Constant(0.1)))


@pytest.mark.skipif(not hasattr(inductor.triton, "mix_order_reduction"), reason="this torch has no such fusion")
def test_sums_over_rows_and_columns_are_not_fused() -> None:
    """torch's fused kernels may return wrong gradients."""
    with inductor.patch({"triton.mix_order_reduction": True}):
        prepare_compiler()
        assert not inductor.triton.mix_order_reduction


def test_cpu_compiles_only_on_request() -> None:
    assert compiled() == "not at all"
    assert compiled(compile=False) == "not at all"
    assert compiled(compile=True) is False


def test_a_hybrid_is_compiled_on_request() -> None:
    assert compiled(compile=True, by_default=False) is False


def test_attention_of_cudnn_is_off() -> None:
    """It returned wrong gradients: compiled hybrids fell back to chance."""
    with api._preserve_torch():
        configure_cuda()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def fabric_on_a_gpu(monkeypatch: pytest.MonkeyPatch, scaler: Any = None) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strategy = SimpleNamespace(precision=SimpleNamespace(scaler=scaler))
    return SimpleNamespace(device=torch.device("cuda"), world_size=1, strategy=strategy)


@pytest.mark.parametrize(
    ("steps", "blocker", "scaler", "accumulate", "compiled", "replayed"),
    [
        (COMPILES_FROM, "", None, 1, True, False),  # compile_with(True) turns the graphs on
        (COMPILES_FROM - 1, "", None, 1, "not at all", True),
        (REPLAYS_FROM - 1, "", None, 1, "not at all", False),
        (COMPILES_FROM, "its objectives", None, 1, False, False),
        (COMPILES_FROM - 1, "its objectives", None, 1, "not at all", False),
        (COMPILES_FROM, "", "of fp16", 1, False, False),
        (COMPILES_FROM, "", None, 2, False, False),
    ],
)
def test_auto_on_a_gpu(
    steps: int, blocker: str, scaler: Any, accumulate: int, compiled: Any, replayed: bool, monkeypatch: Any
) -> None:
    calls: list[Any] = ["not at all"]
    task, fabric = fake_task(calls, blocker), fabric_on_a_gpu(monkeypatch, scaler)
    plan = TrainPlan(steps, steps, Constant(0.1), accumulate=accumulate)
    compile_task(task, TrainConfig.parse({"data": "photos"}), plan, fabric)
    assert (calls[-1], task.use_cuda_graphs) == (compiled, replayed)
    slow_to_compile = fake_task(calls := ["not at all"], blocker, compiles=False)
    compile_task(slow_to_compile, TrainConfig.parse({"data": "photos"}), plan, fabric)
    assert calls == ["not at all"] and slow_to_compile.use_cuda_graphs == (replayed or compiled is True)


NETWORKS: dict[str, dict[str, Any]] = {
    "hybrid_nano": {},
    "swin_nano": {"embed_dim": 16, "depths": (2, 4), "num_heads": (2, 4)},
    "cvt_13": {"embed_dim": (16, 32), "depths": (1, 3), "num_heads": (1, 2), "head_dim": 16},
    "cvt_tiny_w7": {"embed_dim": (16, 32), "depths": (1, 3), "num_heads": (1, 2)},
    "t2t_vit_14": {"embed_dim": 32, "depth": 4, "num_heads": 2},
    "vil_tiny_w7": {"embed_dim": 32, "depths": (1, 1, 1, 3), "num_heads": (1, 1, 2, 2)},
    "vit_tiny_patch16_224": {"depth": 4, "embed_dim": 48},
    "convnext_atto": {"depths": (1, 1, 4, 1), "dims": (16, 16, 32, 32)},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_auto_takes_graphs_for_every_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(create_backbone(name, img_size=64, num_classes=3, **NETWORKS[name]))
    plan = TrainPlan(COMPILES_FROM, COMPILES_FROM, Constant(0.1))
    compile_task(task, TrainConfig.parse({"data": "photos"}), plan, fabric_on_a_gpu(monkeypatch))
    assert task.use_cuda_graphs and not task.requires_cuda_graphs
    is_compiled = any(module._compiled_call_impl is not None for module in task.backbone.modules())
    assert is_compiled == (name != "hybrid_nano")


def gradients_of(network: Backbone, images: torch.Tensor) -> list[torch.Tensor]:
    features = network(images)
    loss = features.grid.float().square().mean() + features.pooled.float().sin().sum()
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss, *(gradient for gradient in gradients if gradient is not None)]


REGIONS = {
    "swin_nano": 4,
    "cvt_13": 6,
    "t2t_vit_14": 3,
    "vil_tiny_w7": 12,
    "vit_tiny_patch16_224": 1,
    "convnext_atto": 4,
}


@pytest.mark.parametrize(("name", "regions"), REGIONS.items())
def test_equal_blocks_are_compiled_once(name: str, regions: int) -> None:
    """The number of compiled graphs is that of different blocks, not of blocks; the results are the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = create_backbone(name, img_size=64, num_classes=3, drop_path=0.0, **NETWORKS[name]).train()
    images = torch.randn(2, 3, 64, 64)
    plain = gradients_of(network, images)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    network.compile(dynamic=False, backend=counter, fullgraph=True)
    torch.testing.assert_close(gradients_of(network, images), plain, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == regions
    with torch.inference_mode():
        network(images[:1])
    network.eval()(images[:1])
    assert counter.frame_count == regions  # evaluations compile nothing


@pytest.mark.gpu
@pytest.mark.parametrize("name", REGIONS)
def test_compiled_blocks_on_a_device(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = create_backbone(name, img_size=64, num_classes=3, drop_path=0.0, **NETWORKS[name]).cuda().train()
    images, gradients = torch.randn(16, 3, 64, 64, device="cuda"), []
    prepare_compiler()
    for compiled in (False, True):
        if compiled:
            network.compile(dynamic=False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            gradients.append(torch.cat([part.float().flatten() for part in gradients_of(network, images)]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


def test_rates_of_stochastic_depth_share_code() -> None:
    """Every block has another rate; a dropped branch leaves the input, and the mean is that of the network."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = create_backbone("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=6, embed_dim=48, drop_path=0.9)
    counter = torch._dynamo.testing.CompileCounter()
    network.compile(dynamic=False, backend=counter)
    rates = [module for module in network.modules() if isinstance(module, SharedDropPath)]
    assert len(rates) == 10  # two in every block but the first, whose rate is 0
    network.train()(torch.randn(2, 3, 32, 32))
    assert counter.frame_count == 2
    dropped = rates[-1](torch.ones(4000, 3))
    assert dropped.unique().tolist() == pytest.approx([0.0, 10.0])
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.2)
    assert rates[-1].eval()(dropped) is dropped


@pytest.mark.slow
def test_compiled_kernels_compute_the_same() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = create_backbone("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=3, embed_dim=48, drop_path=0.0)
    images = torch.randn(2, 3, 32, 32)
    plain = gradients_of(network.train(), images)
    network.compile(dynamic=False)
    torch.testing.assert_close(gradients_of(network, images), plain, rtol=1e-4, atol=1e-5)


def test_the_dense_loss_has_no_graphs() -> None:
    task = task_of(create_backbone("swin_nano", img_size=32, num_classes=3), variant="dense")
    assert "every block" in task.cuda_graphs_blocker


def test_unsupported_graphs_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(compile="graphs") is False
    assert "there is no CUDA device" in capsys.readouterr().err
    assert compiled(kind=PretrainConfig, compile="graphs", crops_at_once=2) is False


@pytest.mark.parametrize(
    "values",
    [
        {"weight": 0.0},
        {},
        {"variant": "ce"},
        {"variant": "dense"},
        *(
            pytest.param(values, marks=pytest.mark.slow)
            for values in (
                *({"pairs": "all"}, {"images": "clean"}, {"schedule": "ramp"}),
                {"variant": "dense", "images": "clean"},
            )
        ),
    ],
)
def test_supervised_step_is_compiled(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two embeddings, two blocks and each localization head compile, with the same results."""
    torch.manual_seed(0)
    backbone = create_backbone(
        "swin_nano", img_size=32, num_classes=3, embed_dim=24, depths=(1, 1), num_heads=(2, 4), drop_path=0.0
    )
    task = task_of(backbone, **values)
    images, clean = torch.randn(2, 4, 3, 32, 32)
    batch = Batch(images, torch.rand(4, 3).softmax(1), None, torch.arange(4), clean)
    plain = task(batch, 3)
    if task.localization is not None:
        other = task(replace(batch, clean=images), 3)
        assert torch.equal(other["localization"], plain["localization"]) == (values.get("images") != "clean")
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    task.compile_with(graphs=False)
    torch.testing.assert_close(task(batch, 3), plain)
    task(batch, 4)
    heads = len(task.localization.levels) if isinstance(task.localization, DenseLocalization) else 1
    assert counter.frame_count == 4 + (heads if task.localization is not None else 0)


def test_every_setting_of_a_comparison_is_compiled() -> None:
    """torch stops compiling a function after a few graphs; a comparison has one per setting."""

    class Setting(torch.nn.Module):
        compiles_by_default = True

        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def compute_losses(self, images: torch.Tensor) -> torch.Tensor:
            return images * self.width

        def compile_with(self, graphs: bool) -> None:
            self.compute_losses = torch.compile(self.compute_losses, dynamic=False, backend=counter)

    counter, count = torch._dynamo.testing.CompileCounter(), 12
    config, fabric = TrainConfig.parse({"data": "photos", "compile": True}), Fabric(accelerator="cpu", devices=1)
    for width in range(count):
        setting = Setting(width)
        compile_task(setting, config, TrainPlan(1, 1, Constant(0.1)), fabric)
        setting.compute_losses(torch.ones(2))
    assert counter.frame_count == count


@pytest.mark.gpu
@pytest.mark.parametrize("backbone", ["swin_nano", "resnet10t"])
@pytest.mark.parametrize("kind", ["train", "pretrain"])
def test_training_with_graphs_gives_the_same_losses(kind: str, backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, replayed, replay = [], [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(1) or replay(graph))
    for graphs in (False, True):
        torch._dynamo.reset()
        values = {"kind": kind, "backbone": backbone, "img_size": 64, "batch": 16, "device": "cuda"}
        config = BenchStepConfig.parse(values | ({"prototypes": 64} if kind == "pretrain" else {}))
        fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
        store, classes, _ = train_step._store(config, fabric.device)
        stepper = train_step._make_train_step(
            config, train_step._batches(config, store, classes), classes, fabric, False
        )
        stepper.task.compile_with(graphs)
        losses = []
        for step in range(12):
            stepper.step, stepper.window = step, {}
            stepper.one_step()
            losses.append(
                float(next(row[names.index("loss")] for names, row in stepper.window.items() if "loss" in names))
            )
        curves.append(losses)
        assert bool(replayed) == graphs
    assert curves[0] == pytest.approx(curves[1], rel=0.05)
    assert curves[1][0] != curves[1][-1]


@pytest.mark.gpu
def test_graphs_of_an_earlier_run_free_their_memory(tmp_path: Path) -> None:
    """A comparison trains many runs in one process."""
    values = TRAIN | {"data": str(write_images(tmp_path / "images")), "device": "cuda", "compile": "graphs"}
    reserved = []
    for run in range(3):
        train(TrainConfig.parse(values | {"batch": 24, "img_size": 128, "out": str(tmp_path / f"run{run}")}))
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] - reserved[0] < 2 * 2**20  # bytes; the graphs of a run take twenty times that
