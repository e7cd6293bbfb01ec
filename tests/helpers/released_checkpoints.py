"""Checkpoints in every released format, made from small random models."""

import argparse
import re
from pathlib import Path

import numpy as np
import timm
import torch
from timm.models.resnet import Bottleneck
from torch import Tensor, nn

SWIN = {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 16)}
VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3}


def swin(window: int = 7, num_classes: int = 10, **keywords) -> nn.Module:
    return randomized(
        timm.create_model(
            "swin_tiny_patch4_window7_224", window_size=window, num_classes=num_classes, **SWIN | keywords
        )
    )


def vit(img_size: int = 64, num_classes: int = 10, **keywords) -> nn.Module:
    return randomized(
        timm.create_model("vit_base_patch16_224", img_size=img_size, num_classes=num_classes, **VIT | keywords)
    )


def resnet(num_classes: int = 10, **keywords) -> nn.Module:
    return randomized(timm.models.ResNet(Bottleneck, (1, 1, 1, 1), num_classes=num_classes, channels=(8, 8, 8, 8)))


def randomized(model: nn.Module) -> nn.Module:
    """Set every tensor to random values, norms too, so that a misplaced tensor changes the output."""
    generator = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2 + 0.1)
    return model.eval()


def microsoft(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's Swin under Microsoft's names, with the buffers in their files."""
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        renamed[name.replace("head.fc.", "head.")] = tensor
    renamed["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    renamed["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    return renamed


def projection_head(dim: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"mlp.0.weight": (20, dim), "mlp.2.weight": (20, 20), "mlp.4.weight": (8, 20)}
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    shapes |= {"last_layer.weight_g": (32, 1), "last_layer.weight_v": (32, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def esvit(state: dict[str, Tensor], prefix: str = "module.", wrapper: str = "", dense: bool = True) -> dict:
    """A training checkpoint as EsViT and DINO write it: teacher, student, optimizer with NumPy numbers, Namespace."""
    dim = 192
    bare = {wrapper + name: tensor for name, tensor in state.items() if not name.startswith(("head.", "fc."))}
    heads = {f"head.{name}": tensor for name, tensor in projection_head(dim, 1).items()}
    if dense:
        heads |= {f"head_dense.{name}": tensor for name, tensor in projection_head(dim, 2).items()}
    teacher = bare | heads
    centres = {"center": torch.full((1, 32), 0.5)} | ({"center_grid": torch.full((1, 32), 0.25)} if dense else {})
    return {
        "student": {
            prefix + name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in teacher.items()
        },
        "teacher": teacher,
        "optimizer": {"param_groups": [{"lr": np.float64(1e-3), "weight_decay": np.float32(0.5), "step": np.int64(3)}]},
        "epoch": 300,
        "args": argparse.Namespace(arch="swin_tiny", local_crops_number=[8]),
        "dino_loss": centres,
        "fp16_scaler": {"scale": 65536.0},
    }


def drloc(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{i}.{part}": torch.full((2, 2), float(i)) for i in (0, 2, 4) for part in ("weight", "bias")}


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def save(content: dict, folder: Path, old_format: bool = False) -> Path:
    path = folder / "weights.data"  # the name gives no format
    torch.save(content, path, _use_new_zipfile_serialization=not old_format)
    return path
