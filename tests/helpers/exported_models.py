"""Small models in folders, and photographs, for tests of exports."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.tools import ExportConfig
from frugalvit.export.command import export

CLASSES = ("daisy", "<script>alert(1)</script>", "pipe | _dream_")
MODELS = {
    "swin": ("swin_tiny_w7", {"img_size": 64, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4)}),
    "cvt": ("cvt_13", {"img_size": 64, "embed_dim": (16, 24, 32), "depths": (1, 1, 1), "num_heads": (1, 1, 1)}),
    "cvt windowed": ("cvt_tiny_w7", {"img_size": 96, "embed_dim": (16, 16), "depths": (1, 1), "num_heads": (1, 2)}),
    "vil": (
        "vil_tiny_w7",
        {"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "sparse_stages": 1},
    ),
    "t2t": ("t2t_vit_14", {"img_size": 64, "embed_dim": 48, "depth": 1, "num_heads": 4, "token_dim": 16}),
    "vit": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2, "patch_size": 16}),
    "resnet": ("test_resnet", {"img_size": 64}),
}


def write_photos(folder: Path) -> Path:
    """Write seven images of different shapes, one of them unreadable."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(7):
        coarse = random.integers(0, 256, (6, 5, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((80 + 9 * index, 100), Image.Resampling.BICUBIC).save(folder / f"{index}.jpg")
    (folder / "1.jpg").write_bytes((folder / "0.jpg").read_bytes()[:200])
    return folder


def made(folder: Path, name: str, num_classes: int = 3) -> tuple[Path, fv.Backbone]:
    torch.manual_seed(0)
    architecture, keywords = MODELS[name]
    backbone = fv.create_backbone(architecture, num_classes=num_classes, **keywords).eval()
    for parameter in backbone.parameters():  # zero biases would hide errors
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.0)
    classes = CLASSES if num_classes else None
    meta = {"data": "flowers | 3", "recipe": "small", "top1": 87.5}
    return save_model_folder(backbone, folder / "model", classes=classes, meta=meta), backbone


def run_export(**options: Any) -> dict[str, Any]:
    return export(ExportConfig(**options)).data


def train_briefly(folder: Path, architecture: str, keywords: dict, photographs: Path, steps: int = 6) -> Path:
    """Train a model for a few steps on the photographs, so that all its weights change, and save it."""
    torch.manual_seed(0)
    backbone = fv.create_backbone(architecture, num_classes=len(CLASSES), **keywords)
    start = {name: value.clone() for name, value in backbone.state_dict().items() if value.is_floating_point()}
    save_model_folder(backbone, folder / "untrained")
    ready = fv.load(str(folder / "untrained"))
    images = ready.transform([Image.open(path).convert("RGB") for path in sorted(photographs.iterdir())[:6]])
    labels = torch.arange(6) % len(CLASSES)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=3e-3)
    backbone.train()
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(backbone.classify(backbone(images).pooled), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = {name for name, value in backbone.state_dict().items() if name in start and not value.equal(start[name])}
    assert len(moved) > 0.9 * len([name for name in start if "index" not in name and "mask" not in name])
    return save_model_folder(backbone.eval(), folder / "trained", classes=CLASSES)
