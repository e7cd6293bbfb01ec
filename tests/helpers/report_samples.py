"""Run folders as training leaves them, made up from a seed."""

import base64
import io
import json
import math
from pathlib import Path

import numpy as np
import yaml
from PIL import Image


def picture(seed: int, height: int = 240, width: int = 320) -> np.ndarray:
    """A smooth scene with a few discs: different regions look different."""
    rng = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width] / max(height, width)
    image = np.stack([down * rng.uniform(60, 200) + across * rng.uniform(20, 90) + 20 for _ in range(3)], axis=2)
    for _ in range(7):
        y, x, radius = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(12, 50)
        disc = (down * max(height, width) - y) ** 2 + (across * max(height, width) - x) ** 2 < radius**2
        image[disc] = rng.integers(0, 256, 3)
    return image.clip(0, 255).astype(np.uint8)


def write_picture(path: Path, seed: int, height: int = 240, width: int = 320) -> Path:
    Image.fromarray(picture(seed, height, width)).save(path)
    return path


def add_to_summary(run: Path, **values: object) -> None:
    """Change values of a run's summary.json."""
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    weight: float = 0.5,
    epochs: int = 20,
    steps: int = 10,
    classes: tuple[str, ...] = ("cat", "dog", "bird"),
    extras: bool = True,
) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(epochs * steps):
        epoch = step / steps
        decay = math.exp(-3 * epoch / epochs)
        line = {
            "step": step,
            "epoch": epoch,
            "split": "train",
            "loss": 2.3 * decay + 0.2 + 0.1 * rng.random() - 0.05 * weight,
            "cross_entropy": 2.1 * decay + 0.1 + 0.1 * rng.random(),
            "localization": 0.3 * decay + 0.02 * rng.random(),
            "localization_error": 2.5 * decay + 0.3,
            "lr": 1e-3 * min(1, epoch / 2) * (0.5 + 0.5 * math.cos(math.pi * epoch / epochs)),
            "gradient_norm": 1 + 5 * decay * rng.random(),
            "effective_rank": 40 + 10 * epoch / epochs,
        }
        lines.append(line)
        if step % steps == steps - 1:
            line = {"step": step, "epoch": epoch, "split": "val", "loss": 2 * decay + 0.5, "knn": 0.5 - 0.3 * decay}
            lines.append(line | {"top1": 0.8 - 0.6 * decay + 0.05 * weight, "top5": 0.98 - 0.4 * decay})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    setting = {
        "data": "photos",
        "backbone": "swin_tiny_w7",
        "epochs": epochs,
        "batch": 64,
        "lr": 1e-3,
        "seed": seed,
        "localization": {"weight": weight, "pairs": 64, "variant": "l1"},
        "augment": {"mixup": 0.8, "cutmix": 1.0, "erasing": 0.25},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(setting))
    matrix = rng.integers(0, 4, (len(classes), len(classes))) + 20 * np.eye(len(classes), dtype=int)
    summary = {
        "task": "train",
        "run": str(folder),
        "top1": 0.78 + 0.01 * seed,
        "top5": 0.97,
        "mean_per_class": 0.77,
        "knn": 0.62,
        "seconds": 321.5,
        "seed": seed,
        "auto": [
            {"name": "epochs", "value": epochs, "reason": "2,000 images: as many as fit into 20,000 steps"},
            {"name": "localization.weight", "value": weight, "reason": "the paper's value for Swin"},
        ],
        "classes": list(classes),
        "confusion": matrix.tolist(),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    if extras:
        mistakes = []
        for index in range(6):
            buffer = io.BytesIO()
            Image.fromarray(picture(index, 96, 96)).save(buffer, "JPEG")
            uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
            truth, guess = classes[index % len(classes)], classes[(index + 1) % len(classes)]
            mistakes.append({"image": uri, "label": truth, "predicted": guess, "probability": 0.99 - 0.03 * index})
        (folder / "mistakes.json").write_text(json.dumps(mistakes))
        tiles = [np.hstack([picture(8 * row + column, 96, 96) for column in range(8)]) for row in range(2)]
        Image.fromarray(np.vstack(tiles)).save(folder / "augmentations.jpg")
    return folder
