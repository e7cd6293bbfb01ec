"""``frugalvit segment train | eval | predict``."""

import itertools
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from frugalvit.backbones import Backbone
from frugalvit.config.dense import SegmentConfig, SegmentEvalConfig, SegmentPredictConfig, TestConfig
from frugalvit.config.resolved import ResolvedSegmentConfig
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.schedules import Polynomial, Schedule
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import Facts
from frugalvit.experiment.dense_auto_values import resolve_segmentation
from frugalvit.experiment.summary import run_result
from frugalvit.runs import layout
from frugalvit.tasks.dense.checkpoint import load_weights, read_facts, rebuild_backbone
from frugalvit.tasks.dense.drawing import colours_of, draw_classes, save_picture, side_by_side, with_legend
from frugalvit.tasks.dense.experiment import DenseExperiment, limit_warmup, readable
from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.dense.predict_io import (
    check_empty_folder,
    out_folder,
    save_on_interrupt,
    single_device_fabric,
    unique_names,
)
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation.dataset import Scene, SceneData, SegmentationDataset, open_scenes
from frugalvit.tasks.segmentation.label_map import LabelMap
from frugalvit.tasks.segmentation.metrics import Confusion
from frugalvit.tasks.segmentation.task import COLUMNS, SegmentationTask
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, write_text
from frugalvit.utils.tables import CommandResult, Table, to_json
from frugalvit.utils.text import pluralize

_SHOWN = 6
"""Number of the best and of the worst images in a report."""
_PANEL = 320
"""Longer side of small images in a report, in pixels: three fill the page's width."""


def train(config: SegmentConfig) -> CommandResult:
    """Train a segmenter."""
    if not config.resume:
        config.test.check_typed()
    return SegmentExperiment(config).run()


class SegmentExperiment(DenseExperiment[SegmentConfig, ResolvedSegmentConfig]):
    command, kind = "segment train", "segment"
    columns = COLUMNS
    data: SceneData
    task: SegmentationTask

    def open_annotations(self) -> SceneData:
        return open_annotations(self.options)

    def resolve_input(self, options: SegmentConfig, facts: Facts) -> SegmentConfig:
        self.auto_values.choose("drop_path", options.drop_path, 0.2, "the paper's")
        return super().resolve_input(options, facts)

    def resolve_values(self, options: SegmentConfig, facts: Facts) -> ResolvedSegmentConfig:
        return resolve_segmentation(options, facts, self.auto_values)

    def build_task(self) -> SegmentationTask:
        return make_task(self.config, len(self.data.classes), self.backbone)

    def make_dataset(self, items: list[Scene], pictures: ImageReader) -> SegmentationDataset:
        return SegmentationDataset(items, self.data, pictures)

    def make_schedule(self, steps: int) -> Schedule:
        return make_schedule(self.config, steps)

    def score_task(self, dataset: SegmentationDataset, folder: Path | None) -> dict[str, Any]:
        return score_segmenter(self.task, dataset, folder)

    def model_facts(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.task.net.spec),
            "side": self.task.side,
            "classes": list(self.data.classes),
            "ignored": self.data.ignored,
            "labels": np.flatnonzero(self.data.table != 255).tolist(),
        }

    def result(self, summary: dict[str, Any]) -> CommandResult:
        commands = [f"frugalvit segment predict {console.shell_quote(summary['run'])} IMAGE…"]
        return run_result(summary, _table(summary), commands)


def open_annotations(config: SegmentConfig) -> SceneData:
    """Open images with masks."""
    return open_scenes(
        str(config.data),
        ignore=config.ignore_index,
        count=config.label_count,
        split=config.split,
        val_fraction=config.val_fraction,
        max_bad=config.cache.max_bad,
    )


def make_task(config: ResolvedSegmentConfig, classes: int, backbone: Backbone) -> SegmentationTask:
    """Build the segmenter."""
    decoder = config.decoder
    spec = SegmenterSpec(classes, decoder.channels, decoder.dropout, decoder.auxiliary)
    return SegmentationTask(
        Segmenter(Pyramid(backbone), spec),
        config.img_size,
        scales=config.scales,
        photometric=config.photometric,
        largest_share=config.largest_share,
        test=config.test,
        weight_decay=config.optimizer.weight_decay,
        layer_decay=config.optimizer.layer_decay,
        steady=bool(config.init or config.pretrained),
    )


def make_schedule(config: ResolvedSegmentConfig, steps: int) -> Schedule:
    """Return the learning rate: a warm-up, then a polynomial decay."""
    lr, optimizer = config.lr, config.optimizer
    warmup = limit_warmup(optimizer.warmup, steps)
    return Polynomial(lr, steps, optimizer.power, lr * optimizer.min_lr, warmup, warmup_from=lr * 1e-3)


def score_segmenter(task: SegmentationTask, dataset: SegmentationDataset, folder: Path | None) -> dict[str, Any]:
    """Return mIoU and mean accuracy; write the table of classes and the best and worst images into the folder.

    With multi-scale testing ``miou`` is the multi-scale score and ``single_scale_miou`` the other one.
    """
    confusion, shares = task.cached_scores(dataset, task.test)
    scores = confusion.summary()
    if task.test.multi_scale:
        scores["single_scale_miou"] = task.cached_scores(dataset, TestConfig())[0].summary()["miou"]
    if folder is not None:
        make_folder(folder / layout.PICTURES)
        material = {
            "per_class": _per_class(confusion, dataset),
            "colours": colours_of(dataset.data.classes),
            **_pictures(task, dataset, shares, folder),
        }
        write_text(folder / layout.DENSE_REPORT, to_json(material, indent=1))
    return scores


def evaluate(config: SegmentEvalConfig) -> CommandResult:
    """Score a trained segmenter with mIoU."""
    config.test.check_typed()
    start = time.monotonic()
    folder = out_folder(config.out)
    facts = read_facts(config.model, "segment")
    known = LabelMap(config.model, tuple(facts["classes"]), tuple(facts["labels"]), facts["ignored"])
    data = open_scenes(
        config.data, ignore=config.ignore_index, split="given", only=config.split, known=known, max_bad=1.0
    )
    for note in data.notes:
        console.info(note)
    if data.classes != known.classes and np.flatnonzero(data.table != 255).tolist() != facts["labels"]:
        raise UserError(
            f"{config.data} has {len(data.classes)} classes, but {config.model} has {len(facts['classes'])}. Both must "
            "ignore the same labels (see --ignore-index)."
        )
    scenes, pictures = readable(data.splits[config.split])
    task = load_task(config.model, facts, config.device, config.batch, config.test)
    dataset = SegmentationDataset(scenes, data, pictures)
    scores = score_segmenter(task, dataset, folder)
    task.refuse_nonfinite(config.model)
    seconds = round(time.monotonic() - start, 2)
    summary = {
        "run": config.model,
        **scores,
        "scored_on": config.split,
        "scored_images": len(dataset),
        "seconds": seconds,
    }
    return CommandResult(summary, [_table(summary)], [f"pictures  {folder}/{layout.PICTURES}"] if folder else [])


def predict(config: SegmentPredictConfig) -> CommandResult:
    """Segment images. Write a PNG with the dataset's own labels, and a picture of the classes over the image."""
    config.test.check_typed()
    start = time.monotonic()
    folder = check_empty_folder(Path(config.out))
    facts = read_facts(config.model, "segment")
    inputs = InputImages(config.images)
    names = unique_names(inputs.paths)
    make_folder(folder)
    task = load_task(config.model, facts, config.device, config.batch, config.test)
    labels = np.array(facts["labels"], np.uint8)
    rows: list[list[Any]] = []
    predictions: list[dict[str, Any]] = []
    parts = inputs.batches(config.batch, "segmenting")
    # A batch is one tensor: only consecutive images of one size share it.
    groups = (list(same) for part in parts for _, same in itertools.groupby(part, key=lambda one: one.pixels.shape))
    with save_on_interrupt(folder, rows, len(inputs.paths)):
        for group in groups:
            predicted = task.predict([torch.from_numpy(one.pixels).permute(2, 0, 1) for one in group], task.test)
            task.refuse_nonfinite(config.model)
            for (index, path, pixels), classes in zip(group, predicted.cpu().numpy(), strict=True):
                mask, picture = (folder / f"{names[index]}{kind}" for kind in (".png", ".jpg"))
                save_picture(Image.fromarray(labels[classes]), mask)
                save_picture(with_legend(draw_classes(pixels, classes), np.unique(classes), facts["classes"]), picture)
                shares = np.bincount(classes.ravel(), minlength=len(labels)) / classes.size
                most = [f"{facts['classes'][k]} {shares[k]:.0%}" for k in np.argsort(-shares)[:3] if shares[k] >= 0.005]
                rows.append([str(path), ", ".join(most)])
                by_name = {facts["classes"][k]: round(float(shares[k]), 4) for k in np.flatnonzero(shares)}
                files = {"image": str(path), "mask": str(mask), "picture": str(picture)}
                predictions.append({**files, "shares": by_name})
    seconds = round(time.monotonic() - start, 2)
    data = {"out": str(folder), "images": len(rows), "classes": facts["classes"], "seconds": seconds}
    data |= {"colours": colours_of(facts["classes"]), "predictions": predictions, "unreadable": inputs.unreadable}
    return CommandResult(data, [Table(["image", "most of it"], rows)], [f"masks (PNG) and pictures (JPEG) in {folder}"])


def load_task(
    where: str, facts: dict[str, Any], device: str, batch: int, test: TestConfig | None = None
) -> SegmentationTask:
    """Load a trained segmenter for evaluation."""
    net = Segmenter(Pyramid(rebuild_backbone(facts)), SegmenterSpec(**facts["spec"]))
    task = SegmentationTask(net, facts["side"], test=test)
    load_weights(task, where)
    task.fabric, task.eval_batch = single_device_fabric(device), batch
    return task.to(task.fabric.device).eval()


def _per_class(confusion: Confusion, dataset: SegmentationDataset) -> dict[str, Any]:
    """Return a row for every class that counts in mIoU; a class without true pixels has no accuracy."""
    pixels = confusion.counts.sum(1).tolist()
    parts = zip(dataset.data.classes, pixels, confusion.ious().tolist(), confusion.accuracies().tolist(), strict=True)
    total = max(1, sum(pixels))
    rows = [
        [name, f"{100 * count / total:.1f} %", iou, accuracy if count else None]
        for name, count, iou, accuracy in parts
        if not math.isnan(iou)
    ]
    return {"columns": ["class", "of the pixels", "IoU", "accuracy"], "rows": sorted(rows, key=lambda row: -row[2])}


def _pictures(
    task: SegmentationTask, dataset: SegmentationDataset, shares: list[tuple[int, float]], folder: Path
) -> dict[str, list[dict[str, str]]]:
    """Draw the images with the most and the fewest correct pixels: image, ground truth, prediction."""
    ranked = sorted(shares, key=lambda pair: pair[1])
    shown: dict[str, list[dict[str, str]]] = {}
    for kind, chosen in (("best", ranked[::-1][:_SHOWN]), ("worst", ranked[:_SHOWN])):
        shown[kind] = []
        for number, (index, correct) in enumerate(chosen, 1):
            picture = dataset.pictures.read(index)
            predicted = task.predict([picture], task.test)[0].cpu().numpy()
            pixels = picture.cpu().permute(1, 2, 0).numpy()
            truth = dataset.labels(index).numpy()
            panels = side_by_side([draw_classes(pixels, part, enlarge=_PANEL) for part in (None, truth, predicted)])
            name = f"{layout.PICTURES}/{kind}_{number}.jpg"
            present = np.union1d(np.unique(truth), np.unique(predicted))
            save_picture(with_legend(panels, present, dataset.data.classes), folder / name)
            caption = f"{dataset.scenes[index].path.name}: {_percent(correct)} correct"
            shown[kind].append({"image": name, "caption": caption})
    return shown


def _percent(share: float) -> str:
    """Format a share; only a share of 1 becomes 100 %."""
    return f"{100 if share == 1 else min(99.9, round(100 * share, 1)):.1f} %"


def _table(summary: dict[str, Any]) -> Table:
    names = ["miou", "mean_accuracy", "pixel_accuracy", "single_scale_miou", "seconds"]
    names = [name for name in names if name in summary]
    title = f"{summary['scored_on']}: {pluralize(summary['scored_images'], 'image')}"
    return Table(names, [[summary[name] for name in names]], title)
