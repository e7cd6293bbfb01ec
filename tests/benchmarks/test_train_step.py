"""The measured training step, and the baselines in ``benchmarks/`` that it is compared with."""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from PIL import Image

import train_step
from esvit_reference import ReferencePretrainingTask
from frugalvit.backbones import create_backbone
from frugalvit.config.data import CropsConfig, MixingConfig
from frugalvit.config.defaults import Facts
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import BenchStepConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.loader import Batches
from frugalvit.engine.schedules import Constant
from frugalvit.experiment.resolve import AutoValues, resolve_training
from frugalvit.objectives import RegionMatching, ViewMatching
from frugalvit.tasks.pretraining.task import PretrainingTask
from frugalvit.tasks.pretraining.train import make_plan
from helpers.tiny_runs import resolve
from torchvision_input import FileDataset, TorchvisionBatches, make_loader, supervised_transform

SMALL: dict[str, Any] = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4), "img_size": 32}


def test_algorithm_1_has_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    student, teacher = (create_backbone("swin_nano", drop_path=0.0, **SMALL) for _ in range(2))
    heads = {"prototypes": 40, "hidden": 16, "bottleneck": 8}
    views, regions = ViewMatching(student.dim, **heads), RegionMatching(student.dim, **heads)
    schedules = {"teacher_temp": Constant(0.05), "momentum": Constant(0.9)}
    fast = PretrainingTask(student, teacher, views=views, regions=regions, **schedules, health_every=10**9).double()
    slow = ReferencePretrainingTask(
        copy.deepcopy(student), copy.deepcopy(teacher), views=copy.deepcopy(views), regions=copy.deepcopy(regions),
        **schedules,
    ).double()  # fmt: skip
    pixels = torch.randint(0, 256, (6, 3, 40, 40), dtype=torch.uint8)
    augment = MultiCrop(CropsConfig(local_crops=3), 32)
    batches = Batches(CachedStore.from_arrays(pixels, torch.arange(6)), 6, seed=0, augment=augment)
    batch = batches.batch_at(0)
    batch.images = [crop.double() for crop in batch.images]  # type: ignore[assignment]
    losses = []
    for task in (fast, slow):
        task.batches = batches
        loss = task(batch, 1)["loss"]
        loss.backward()
        task.before_optimizer(1)
        losses.append(loss)
    torch.testing.assert_close(*losses)
    for (name, ours), theirs in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-3, msg=name)  # fp32 inside
    assert fast.regions is not None and slow.regions is not None
    torch.testing.assert_close(fast.regions.center, slow.regions.center)


@pytest.mark.parametrize("kind", [pytest.param("train", marks=pytest.mark.slow), "pretrain"])
def test_step_is_measured_against_the_baselines(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_IMAGES": 8, "_WARM_UP": 1, "_GROUP": 1}.items():
        monkeypatch.setattr(train_step, name, value)
    config = BenchStepConfig.parse(
        {"kind": kind, "backbone": "swin_nano", "img_size": 32, "batch": 2, "steps": 5, "device": "cpu",
         "against": True, "workers": 0, **({"prototypes": 16} if kind == "pretrain" else {})}
    )  # fmt: skip
    result = train_step.bench_step(config)
    ours, *without, written, dataloader = result.data["rows"]
    assert any("drloc_percent" in note for note in result.notes) is (kind == "train")
    assert ("prototypes" in result.data) is (kind == "pretrain")
    if kind == "train":
        assert "drloc_percent" in ours and "drloc_percent" not in without[0] and ours["drloc"] == "l1"
        assert without[0]["step"] == "without Drloc" and without[0]["gflop_per_image"] <= ours["gflop_per_image"]
    assert ours["images_per_second"] > 0 and ours["gflop_per_image"] > 0
    shown = result.tables[0].rows[0][result.tables[0].columns.index("ms")]
    assert shown == f"{ours['ms']} ± {ours['ms_deviation']}" and ours["ms_deviation"] > 0
    for row in (written, dataloader):
        assert row["ratio"] == pytest.approx(ours["images_per_second"] / row["images_per_second"], rel=0.05)


@pytest.mark.parametrize(("as_written", "variant"), [(False, "ce"), (True, "l1")])
def test_drloc_has_the_variant_of_a_run(as_written: bool, variant: str) -> None:
    settings = train_step._settings(BenchStepConfig(kind="train"), as_written)
    assert isinstance(settings, TrainConfig)
    resolved = resolve_training(settings, Facts(2048, 100, 224, "cuda", "swin", 28_000_000), AutoValues())
    assert resolved.localization.variant == variant


@pytest.mark.parametrize("as_written", [False, True])
def test_heads_fit_a_network_with_another_pooled_width(as_written: bool) -> None:
    """MobileNetV3 has 1,024 pooled features and a grid of 576 channels."""
    config = BenchStepConfig(kind="pretrain", backbone="mobilenetv3_small_100", img_size=32, batch=2, prototypes=16)
    fabric = Fabric(accelerator="cpu", devices=1)
    pixels = torch.randint(0, 256, (4, 3, 40, 40), dtype=torch.uint8)
    batches = train_step._batches(config, CachedStore.from_arrays(pixels), 0)
    step = train_step._make_train_step(config, batches, 0, fabric, as_written)
    step.one_step()
    task: Any = step.task
    assert (task.views.student.mlp[0].in_features, task.regions.student.mlp[0].in_features) == (1024, 576)
    assert isinstance(task, ReferencePretrainingTask) == as_written and task.hold_last == 0
    plan = make_plan(resolve(PretrainConfig.parse({"steps": 10, "batch": 2, "lr": 0.1})), 4, 1)
    assert (step.plan.clip, step.plan.clip_per, step.plan.betas) == (plan.clip, plan.clip_per, plan.betas)


def test_cost_of_drloc_ignores_a_drift_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = SimpleNamespace(task=SimpleNamespace(localization="head"))
    with_drloc: list[bool] = []

    def slower_and_slower(*_: Any) -> float:
        with_drloc.append(step.task.localization == "head")
        return (1.5 if with_drloc[-1] else 1.0) * 1.02 ** len(with_drloc)

    monkeypatch.setattr(train_step, "timed", slower_and_slower)
    cost = train_step._cost_of_drloc(step, lambda _: None, 30, torch.device("cpu"))
    assert cost == pytest.approx(0.5, abs=0.04)
    assert with_drloc == [True, False] * 4 and step.task.localization == "head"


@pytest.mark.slow
def test_profile_without_a_gpu(tmp_path: Path) -> None:
    """In a new process: the profiler reads its log level once."""
    code = (
        "from frugalvit.utils.checkout import import_benchmark; import torch; from pathlib import Path\n"
        "_profile = import_benchmark('train_step')._profile\n"
        "_profile(lambda _: torch.ones(9) + 1, torch.device('cpu'), Path('profile.txt'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    logged = [line for line in done.stderr.splitlines() if not line.startswith("oneDNN")]
    assert logged == ["profile: profile.txt"]
    assert "aten::add" in (tmp_path / "profile.txt").read_text()


def test_dataloader_reads_files(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 24), (40 * number, 0, 0)).save(folder / f"{number}.png")
    source = open_data(str(tmp_path), split="given")
    loader = make_loader(FileDataset(source.splits["train"], supervised_transform(16)), 4, 0)
    batch = TorchvisionBatches(loader, None, Mixing(MixingConfig(), 2), torch.device("cpu")).batch_at(0)
    assert batch.images.shape == (4, 3, 16, 16)
    torch.testing.assert_close(batch.targets.sum(1), torch.ones(4))
