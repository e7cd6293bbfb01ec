"""``frugalvit demo``: compare with and without Drloc on scikit-learn's digits. It takes minutes on two cores."""

from pathlib import Path

import numpy as np
from PIL import Image

from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig, DemoConfig
from frugalvit.config.train import PredictConfig
from frugalvit.tasks.classification.predict import predict
from frugalvit.utils import console
from frugalvit.utils.files import make_folder
from frugalvit.utils.statistics import Difference
from frugalvit.utils.tables import CommandResult, Table

# Two stages are enough for 16 pixels, and fast on a CPU.
BACKBONE = {"patch_size": 2, "window_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}


def demo(config: DemoConfig) -> CommandResult:
    """Train a small transformer on few labelled digits with and without Drloc, then predict unseen digits."""
    folder = make_folder(Path(config.out))
    console.info(
        f"1/3  Writing scikit-learn's 1,797 handwritten digits (8 × 8 pixels) as folders to {folder}/digits: "
        f"{config.labels} labelled images of each digit to train with, the rest to test on."
    )
    digits = write_digits(folder / "digits", config.labels)
    console.info(
        f"2/3  Training a two-stage swin_nano (4 × 4 final tokens), {config.epochs} epochs, "
        f"{config.seeds} seeds, with and without the dense relative localization loss (Drloc)."
    )
    settings = CompareConfig.parse(
        {
            "data": str(digits),
            "split": "given",
            "backbone": "swin_nano",
            "backbone_args": BACKBONE,
            "img_size": 16,
            "epochs": config.epochs,
            "batch": 32,
            "lr": 2e-3,
            "augment": {"operations": 0, "flip": 0.0, "erasing": 0.0, "crop": "resized", "scale": [0.6, 1.0]},
            "mixing": {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.1},
            # Two evaluations only: evaluating 1,597 images takes as long as training on 500.
            "evaluate_every": max(1, config.epochs * 10 * config.labels // 32 // 2),
            "seeds": config.seeds,
            "with_settings": ["localization.weight=0.5"],
            "without_settings": ["localization.weight=0"],
            "out": str(folder / "compare"),
        }
    )
    result = compare(settings)
    first = folder / "compare" / "with" / "seed_0"
    unseen = sorted((digits / "test").glob("*/*.png"))
    unseen = unseen[:: max(1, len(unseen) // 6)][:6]
    console.info("3/3  Predicting six unseen digits.")
    predictions = predict(PredictConfig(model=str(first), images=[str(path) for path in unseen], top=2))
    difference = Difference.from_json(result.data["differences"]["with"])
    notes = [
        f"With Drloc - without (95 % interval): {difference}",
        "",
        f"See         {first}/report.html",
        f"            {folder}/compare/comparison.png",
        "Try next    frugalvit train YOUR_PHOTOS/          a folder with one folder per class",
        "            frugalvit pretrain YOUR_IMAGES/       no labels needed",
        f"            frugalvit predict {console.shell_quote(first)} IMAGE",
    ]
    tables = [
        Table(["setting", "top-1 on the test digits", *t.columns[2:]], t.rows, "Accuracy, mean ± deviation")
        for t in result.tables
    ]
    data = result.data | {"predictions": predictions.data["predictions"]}
    return CommandResult(data, [*tables, *predictions.tables], notes)


def write_digits(folder: Path, labels: int) -> Path:
    """Write scikit-learn's digits as ``train/3/0001.png`` and ``test/3/0002.png``.

    ``labels`` images of each digit are in train. Each value has its own folder, so that no image is in both splits.
    """
    from sklearn.datasets import load_digits

    folder = folder / f"{labels}_of_each"
    images, targets = load_digits(return_X_y=True)
    counts = [0] * 10
    for number, (pixels, digit) in enumerate(zip(images, targets, strict=True)):
        split = "train" if counts[digit] < labels else "test"
        counts[digit] += 1
        path = folder / split / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            Image.fromarray(np.uint8(pixels.reshape(8, 8) * (255 / 16))).save(path)
    return folder
