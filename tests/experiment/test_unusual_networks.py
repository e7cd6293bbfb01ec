"""Networks unlike Swin: padded, without stochastic depth, with batch norms, in fp16."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frugalvit import create_backbone
from frugalvit.config.data import CropsConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.engine import distributed
from frugalvit.engine.hardware import precision_name
from frugalvit.engine.param_groups import decay_groups
from frugalvit.experiment import builders
from frugalvit.tasks.pretraining.task import make_teacher
from frugalvit.tasks.pretraining.train import _check_crops
from helpers.tiny_runs import run_tiny


def test_grid_sizes_are_computed_before_compiling() -> None:
    """A compiled network cannot compute how local crops of 56 pixels are padded for patches of 16."""
    student = create_backbone("vit_tiny_patch16_224", img_size=128, keep_patch_size=True, depth=1)
    config = PretrainConfig.parse({"data": "x", "matching": {"region_weight": 0.0}, "localization": {"weight": 0.0}})
    augment = MultiCrop(CropsConfig(local_size=56), student.img_size)
    _check_crops(student, augment, config)
    assert student._padded_size((56, 56)) == (64, 64)


@pytest.mark.parametrize(("native", "name"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_bf16_needs_hardware_support(monkeypatch: pytest.MonkeyPatch, native: bool, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert precision_name("auto", "cuda") == name


def test_continue_in_fp16(photos: Path, tmp_path: Path) -> None:
    """A checkpoint of a run in single precision has no gradient scale."""
    run_tiny("pretrain", data=photos, out=tmp_path / "first", steps=2)
    run_tiny("pretrain", out=tmp_path / "second", steps=4, continue_from=str(tmp_path / "first"), precision="fp16")


def test_evaluation_keeps_batch_norm_statistics() -> None:
    backbone = create_backbone("test_resnet", img_size=32)
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    dims = backbone.block_dims()
    assert dims[-1] == backbone.dim and backbone.training
    assert all(torch.equal(before[name], value) for name, value in backbone.named_buffers())


def test_teacher_without_stochastic_depth() -> None:
    student = create_backbone("densenet121", img_size=32, growth_rate=4, block_config=(1, 1, 1, 1))
    twin = make_teacher(student)
    assert all(torch.equal(one, other) for one, other in zip(student.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "dropping"),
    [
        ("swin_nano", {"drop_rate": 0.5}),
        ("test_vit", {"proj_drop_rate": 0.5, "attn_drop_rate": 0.5}),
        ("cvt_13", {"proj_drop_rate": 0.5}),
        ("resnet18", {"drop_rate": 0.5}),  # by a function, not by a module
    ],
)
def test_a_teacher_drops_nothing(name: str, dropping: dict[str, Any]) -> None:
    student = create_backbone(name, img_size=32, **dropping)
    twin = make_teacher(student).train()
    images = torch.randn(4, 3, 32, 32)
    for level in ("pooled", "grid"):
        torch.testing.assert_close(getattr(twin(images), level), getattr(twin(images), level), rtol=0, atol=0)
    student.train()
    assert not torch.equal(student(images).pooled, student(images).pooled), "the student does"


@pytest.mark.parametrize("view_weight", [0.0, 0.5])
def test_unused_pooling_layers_need_no_gradient(monkeypatch: pytest.MonkeyPatch, view_weight: float) -> None:
    """DDP waits for the gradients of every parameter, unless it searches unused ones."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(builders, "Fabric", lambda **keywords: made.update(keywords) or SimpleNamespace())
    monkeypatch.setattr(distributed, "launch", lambda *_: None)
    builders.make_fabric(
        PretrainConfig.parse({"data": "x", "device": "cpu", "devices": 2, "matching": {"view_weight": view_weight}})
    )
    assert made["strategy"]._ddp_kwargs["find_unused_parameters"] is (view_weight == 0)


@pytest.mark.parametrize("name", ["attention_biases", "rel_pos_h", "cls_token_1", "pos_embed", "logit_scale"])
def test_tables_and_tokens_have_no_weight_decay(name: str) -> None:
    parameters = {
        f"model.block.{name}": nn.Parameter(torch.ones(3, 3)),
        "model.fc.weight": nn.Parameter(torch.ones(3, 3)),
    }
    groups = decay_groups(parameters.items(), 0.05)
    assert [[name for name, _ in group["params"]] for group in groups] == [["model.fc.weight"], [f"model.block.{name}"]]
