"""``frugalvit demo``: few labels, on scikit-learn's digits. It takes about three minutes on two cores."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from frugalvit.comparison.compare import compare, run_once
from frugalvit.config.compare import CompareConfig, DemoConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import PredictConfig, TrainConfig
from frugalvit.tasks.classification.predict import predict
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from frugalvit.utils import console
from frugalvit.utils.files import make_folder
from frugalvit.utils.scores import read_scores
from frugalvit.utils.tables import CommandResult, Table

SIDE = 16  # pixels; the digits have 8, and are enlarged
# A digit must not be mirrored, and RandAugment's rotations turn a 6 into a 9.
AUGMENT = {"operations": 0, "flip": 0.0, "erasing": 0.0, "crop": "resized", "scale": [0.6, 1.0]}
ONLY_AT_THE_END = 1_000_000  # evaluating 1,597 images takes as long as training on 500
HYBRID = {"patch_size": 2}  # maps of 8 x 8, as the digits: a third of the time of 16 x 16
# With 512 and 256 a step takes half as long again. Both of EsViT's losses are on, to show them.
HEADS = {"region_weight": 0.5, "hidden": 128, "bottleneck": 64, "koleo": 0.1}
# Two stages are enough for 16 pixels, and fast on a CPU.
SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}


def demo(config: DemoConfig) -> CommandResult:
    """Pre-train on digits without labels, learn from a few labels, and compare with and without Drloc."""
    folder = make_folder(Path(config.out))
    count = 10 * config.labels
    console.info(
        f"1/5  Writing scikit-learn's 1,797 handwritten digits (8 × 8 pixels) to {folder}/data: {count} with a label "
        f"to train with, {1797 - count:,} to test on, and all of them without labels."
    )
    unlabelled, digits = write_digits(folder / "data", config.labels, config.seed)
    console.info(f"2/5  Pre-training hybrid_nano on all digits without labels, {config.pretrain_epochs} epochs.")
    features = run_once(pretraining_config(config, unlabelled, folder / "pretrain"), pretrain)
    console.info(f"3/5  Learning from the {count} labels and all unlabelled digits, {config.epochs} epochs.")
    classifier = run_once(training_config(config, digits, unlabelled, folder / "train", features["run"]), train)
    run, floor = classifier["run"], classifier["floor"]
    unseen = sorted((digits / "test").glob("*/*.png"))
    unseen = unseen[:: max(1, len(unseen) // 6)][:6]
    console.info("4/5  Predicting six test digits.")
    predictions = predict(PredictConfig(model=run, images=[str(path) for path in unseen], top=2))
    console.info(
        f"5/5  Drloc, with and without: a two-stage Swin from random weights, {config.drloc_epochs} epochs, "
        f"{config.seeds} seeds. This is a short run of a small network, not what Drloc was made for."
    )
    comparison = compare(_comparison(config, digits, folder / "compare"))
    names = {
        "majority": "most frequent digit",
        "nearest_neighbour": "nearest neighbour",
        "logistic": "logistic regression",
    }
    rows: list[list[object]] = [[f"{label}, no network", f"{floor[name]:.1f} %"] for name, label in names.items()]
    top1 = read_scores(classifier)[0]
    shown = f"{top1.value:.1f} % ({top1.interval_text})"
    rows.append(["pre-trained without labels, then trained on both", shown])
    title = f"{classifier['scored_images']:,} test digits, which it saw without labels"
    scores = Table([f"{count} labels", "right"], rows, title)
    tables = [
        Table(table.columns, table.rows, f"Drloc, mean ± deviation over seeds, {table.title}")
        for table in comparison.tables
    ]
    notes = [
        f"Drloc: {comparison.data['verdict']}",
        "",
        f"See         {run}/report.html",
        f"            {features['run']}/report.html",
        "Try next    frugalvit train YOUR_PHOTOS/          a folder with one folder per class",
        "            frugalvit pretrain YOUR_IMAGES/       no labels needed",
        f"            frugalvit predict {console.shell_quote(run)} IMAGE",
    ]
    data: dict[str, Any] = {"run": run, "top1": classifier["top1"], "floor": floor, "drloc": comparison.data}
    data["predictions"] = predictions.data["predictions"]
    return CommandResult(data, [*predictions.tables, *tables, scores], notes)


def pretraining_config(config: DemoConfig, data: Path, out: Path) -> PretrainConfig:
    values: dict[str, Any] = {"data": str(data), "backbone": "hybrid_nano", "img_size": SIDE, "seed": config.seed}
    values |= {"backbone_args": HYBRID, "matching": HEADS, "crops": {"local_crops": 2}, "out": str(out)}
    return PretrainConfig.parse(values | {"epochs": config.pretrain_epochs, "batch": 64, "lr": 5e-4})


def training_config(config: DemoConfig, data: Path, unlabelled: Path, out: Path, init: str) -> TrainConfig:
    values: dict[str, Any] = {"data": str(data), "split": "given", "init": init, "seed": config.seed, "out": str(out)}
    # The pre-trained network is right early, so pseudo-labels count from the first step.
    semi = {"method": "flexmatch", "ratio": 4, "start": 0.0, "warmup": 0.3}
    values |= {"unlabelled": str(unlabelled), "semi": semi, "batch": 32, "lr": 1.6e-3}
    return TrainConfig.parse(values | {"epochs": config.epochs, "augment": AUGMENT, "evaluate_every": ONLY_AT_THE_END})


def _comparison(config: DemoConfig, data: Path, out: Path) -> CompareConfig:
    values: dict[str, Any] = {"data": str(data), "split": "given", "out": str(out), "seeds": config.seeds}
    values |= {"backbone": "swin_nano", "backbone_args": SWIN, "img_size": SIDE, "batch": 32, "lr": 2e-3}
    values |= {"epochs": config.drloc_epochs, "augment": AUGMENT, "mixing": {"mixup": 0.0, "cutmix": 0.0}}
    values |= {"evaluate_every": ONLY_AT_THE_END, "report": False}
    values |= {"with_settings": ["localization.weight=0.5"], "without_settings": ["localization.weight=0"]}
    return CompareConfig.parse(values)


def write_digits(folder: Path, labels: int, seed: int) -> tuple[Path, Path]:
    """Write scikit-learn's digits twice; return the folder without labels and the one with train and test.

    ``labels`` random images of each digit are in train, all others in test. Each value and seed has its own folder, so
    that no image is in both splits.
    """
    from sklearn.datasets import load_digits

    unlabelled, folder = folder / "unlabelled/digits", folder / f"{labels}_of_each_seed_{seed}/digits"
    data: Any = load_digits(return_X_y=True)
    images, targets = data
    counts = [0] * 10
    for number in np.random.default_rng(seed).permutation(len(images)):
        digit = int(targets[number])
        split = "train" if counts[digit] < labels else "test"
        counts[digit] += 1
        picture = Image.fromarray(np.uint8(images[number].reshape(8, 8) * (255 / 16)))
        for path in (unlabelled / f"{number:04d}.png", folder / split / str(digit) / f"{number:04d}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                picture.save(path)
    return unlabelled, folder
