"""``frugalvit segment train | eval | predict``."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from frugalvit.backbones import Backbone
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import SegmentConfig, SegmentEvalConfig, SegmentPredictConfig, TestConfig
from frugalvit.config.resolved import ResolvedSegmentConfig
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.schedules import Polynomial, Schedule
from frugalvit.errors import UserError
from frugalvit.experiment.resolve_dense import resolve_segmentation
from frugalvit.tasks.dense import commands as dense
from frugalvit.tasks.dense import drawing
from frugalvit.tasks.dense.checkpoint import load_trained
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation.dataset import SceneData, SegmentationDataset, open_scenes
from frugalvit.tasks.segmentation.metrics import IGNORED, Confusion
from frugalvit.tasks.segmentation.task import COLUMNS, SegmentationTask
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec
from frugalvit.utils.files import make_folder
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import truncate_list

_PANEL = 320  # longer side of small images in a report, in pixels: three fill the page's width


def train(config: SegmentConfig) -> CommandResult:
    return SegmentExperiment(config).run()


def open_annotations(config: SegmentConfig) -> SceneData:
    return open_scenes(
        str(config.data),
        ignore=config.ignore_index,
        count=config.label_count,
        instances=config.instances,
        split=config.split,
        val_fraction=config.val_fraction,
        max_bad=config.cache.max_bad,
    )


def make_task(config: ResolvedSegmentConfig, data: SceneData, backbone: Backbone) -> SegmentationTask:
    spec = SegmenterSpec(len(data.classes), **config.decoder.model_dump())
    return SegmentationTask(
        Segmenter(Pyramid(backbone), spec),
        config.img_size,
        scales=config.scales,
        photometric=config.photometric,
        largest_share=config.largest_share,
        test=config.test,
        weight_decay=config.optimizer.weight_decay,
        freeze_norms=bool(config.init or config.pretrained),
    )


def make_schedule(config: ResolvedSegmentConfig, steps: int) -> Schedule:
    """Return the learning rate: a warm-up, then a polynomial decay."""
    lr, optimizer = config.lr, config.optimizer
    warmup = min(optimizer.warmup, steps // 5)  # at most a fifth of the run
    return Polynomial(lr, steps, optimizer.power, lr * optimizer.min_lr, warmup, warmup_from=lr * 1e-3)


def score_segmenter(task: SegmentationTask, dataset: SegmentationDataset, folder: Path | None) -> dict[str, Any]:
    """Return mIoU (also at a single scale) and accuracy; write the table of classes, the best and worst images."""
    confusion, shares = task.cached_scores(dataset, task.test)
    scores: dict[str, Any] = confusion.summary() | confusion.facts()
    if task.test.multi_scale:
        single = task.cached_scores(dataset, TestConfig())[0]
        scores |= {"single_scale_miou": single.summary()["miou"]}
        scores |= {"single_scale_miou_interval": single.facts()["miou_interval"]}
    per_class = _per_class(confusion, dataset)
    scores |= {"per_class": per_class, "alarms": find_alarms(confusion, dataset.data.classes)}
    if folder is not None:
        colours = drawing.colours_of(dataset.data.classes)
        dense.save_material(folder, per_class=per_class, colours=colours, **_draw_images(task, dataset, shares, folder))
    return scores


def find_alarms(confusion: Confusion, classes: Sequence[str]) -> list[str]:
    """Return an alarm if the segmenter gives every pixel one class, never predicts some classes, or is at chance."""
    truth, predicted = confusion.counts.sum(1).tolist(), confusion.counts.sum(0).tolist()
    missed = [name for name, pixels, found in zip(classes, truth, predicted, strict=True) if pixels and not found]
    if not missed:
        miou, chance = 100 * confusion.summary()["miou"], 100 * confusion.facts()["chance"]["miou"]
        same = f"mIoU {miou:.1f} % is not above {chance:.1f} %, which calling every pixel the most frequent class has"
        return [f"{same}. {dense.LEARN_MORE}"] if miou <= chance < 100 else []
    used = [name for name, found in zip(classes, predicted, strict=True) if found]
    what = f"it calls every pixel '{used[0]}'" if len(used) == 1 else "it never predicts some classes"
    return [f"{what}: the IoU of {truncate_list(missed)} is 0. {dense.LEARN_MORE}"]


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
    return {"columns": ["class", "of the pixels", "IoU", "accuracy"], "rows": sorted(rows, key=lambda row: row[2])}


def _draw_images(
    task: SegmentationTask, dataset: SegmentationDataset, shares: list[tuple[int, float]], folder: Path
) -> dict[str, list[dict[str, str]]]:
    """Draw the images with the most and the fewest correct pixels: image, ground truth, prediction."""

    def draw(correct: float, index: int) -> tuple[Image.Image, str]:
        picture = dataset.pictures.read(index)
        predicted = task.predict([picture], task.test)[0].cpu().numpy()
        pixels = picture.cpu().permute(1, 2, 0).numpy()
        truth = dataset.labels(index).numpy()
        panels = drawing.side_by_side(
            [drawing.draw_classes(pixels, part, enlarge=_PANEL) for part in (None, truth, predicted)]
        )
        present = np.union1d(np.unique(truth), np.unique(predicted))
        caption = f"{dataset.scenes[index].path.name}: {100 * correct:.1f} % correct"
        return drawing.with_legend(panels, present, dataset.data.classes), caption

    return drawing.draw_best_and_worst([(share, index) for index, share in shares], draw, folder)


class SegmentExperiment(dense.DenseExperiment[SegmentConfig, ResolvedSegmentConfig]):
    command, kind, columns = "segment train", "segment", COLUMNS
    data: SceneData
    task: SegmentationTask
    open_annotations = staticmethod(open_annotations)
    make_task = staticmethod(make_task)
    make_schedule = staticmethod(make_schedule)
    score_task = staticmethod(score_segmenter)

    def resolve_input(self, options: SegmentConfig, facts: Facts) -> SegmentConfig:
        self.auto_values.choose("drop_path", options.drop_path, 0.2, "the paper's")
        return super().resolve_input(options, facts)

    def resolve_values(self, options: SegmentConfig, facts: Facts) -> ResolvedSegmentConfig:
        return resolve_segmentation(options, facts, self.auto_values)

    def model_facts(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.task.net.spec),
            "side": self.task.side,
            "classes": list(self.data.classes),
            "ignored": self.data.ignored,
            "instances": self.data.instances,
            "labels": np.flatnonzero(self.data.table != IGNORED).tolist(),
        }


def load_task(
    where: str, device: str, batch: int = 1, test: TestConfig | None = None
) -> tuple[SegmentationTask, dict[str, Any]]:
    """Load a trained segmenter for evaluation; return it and the facts about it."""

    def build(backbone: Backbone, facts: dict[str, Any]) -> SegmentationTask:
        return SegmentationTask(Segmenter(Pyramid(backbone), SegmenterSpec(**facts["spec"])), facts["side"], test=test)

    return load_trained(where, "segment", build, device, batch)


def evaluate(config: SegmentEvalConfig) -> CommandResult:
    return dense.evaluate_model(config, _open_model, score_segmenter)


def _open_model(config: SegmentEvalConfig) -> tuple[SegmentationTask, SceneData, str]:
    task, facts = load_task(config.model, config.device, config.batch, config.test)
    ignore = facts["ignored"] if config.ignore_index == "auto" else config.ignore_index
    count = max(facts["labels"]) + 1
    parts: dict[str, Any] = {"only": config.split, **dense.splitting_of(config.model, config.data)}
    parts |= {"instances": facts.get("instances", False)}
    data = open_scenes(config.data, ignore=ignore, count=count, max_bad=1.0, **parts)
    names = [classes for classes in (list(data.classes), facts["classes"]) if not all(map(str.isdecimal, classes))]
    if np.flatnonzero(data.table != IGNORED).tolist() != facts["labels"] or (len(names) == 2 and names[0] != names[1]):
        raise UserError(
            f"The classes of {config.data} are not those of {config.model}. Both must have the same labels and names, "
            "and ignore the same labels (see --ignore-index)."
        )
    return task, data, config.split


def predict(config: SegmentPredictConfig) -> CommandResult:
    """Segment images. Write a PNG with the dataset's own labels, and a picture of the classes over the image."""
    start = time.monotonic()
    folder = dense.check_empty_folder(config.out)
    inputs = InputImages(config.images)
    names = dense.unique_names(inputs.paths)
    task, facts = load_task(config.model, config.device, config.batch, config.test)
    make_folder(folder)
    labels, class_names = np.array(facts["labels"], np.uint8), facts["classes"]
    rows: list[list[Any]] = []
    predictions: list[dict[str, Any]] = []
    parts = inputs.batches(config.batch, "segmenting")
    # A batch is one tensor: only consecutive images of one size share it.
    groups = (list(same) for part in parts for _, same in itertools.groupby(part, key=lambda im: im.pixels.shape))
    for group in groups:
        predicted = task.predict([torch.from_numpy(im.pixels).permute(2, 0, 1) for im in group], task.test)
        task.refuse_nonfinite(config.model)
        for (index, path, pixels), classes in zip(group, predicted.cpu().numpy(), strict=True):
            mask, picture = (folder / f"{names[index]}{kind}" for kind in (".png", ".jpg"))
            drawing.save_picture(Image.fromarray(labels[classes]), mask)
            drawing.save_picture(
                drawing.with_legend(drawing.draw_classes(pixels, classes), np.unique(classes), class_names), picture
            )
            shares = np.bincount(classes.ravel(), minlength=len(labels)) / classes.size
            most = [f"{class_names[k]} {shares[k]:.0%}" for k in np.argsort(-shares)[:3] if shares[k] >= 0.005]
            rows.append([str(path), ", ".join(most)])
            by_name = {class_names[k]: round(float(shares[k]), 4) for k in np.flatnonzero(shares)}
            files = {"image": str(path), "mask": str(mask), "picture": str(picture)}
            predictions.append({**files, "shares": by_name})
    seconds = round(time.monotonic() - start, 2)
    data = {"out": str(folder), "images": len(rows), "classes": class_names, "seconds": seconds}
    data |= {"colours": drawing.colours_of(class_names), "predictions": predictions, "unreadable": inputs.unreadable}
    return CommandResult(data, [Table(["image", "most of it"], rows)], [f"masks (PNG) and pictures (JPEG) in {folder}"])
