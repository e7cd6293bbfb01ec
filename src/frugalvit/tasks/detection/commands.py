"""``frugalvit detect train | eval | predict``."""

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from faster_coco_eval.core import mask as run_length
from PIL import Image

from frugalvit.backbones import Backbone
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import DetectConfig, DetectEvalConfig, DetectPredictConfig
from frugalvit.config.resolved import ResolvedDetectConfig
from frugalvit.data.formats.coco import CocoData, open_coco, rle
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.schedules import Schedule, Steps
from frugalvit.errors import UserError
from frugalvit.experiment.resolve_dense import resolve_detection
from frugalvit.tasks.dense import commands as dense
from frugalvit.tasks.dense.checkpoint import load_trained
from frugalvit.tasks.dense.drawing import draw_best_and_worst, draw_objects, save_picture, side_by_side
from frugalvit.tasks.dense.pyramid import Pyramid, pyramid_strides, with_top
from frugalvit.tasks.detection.dataset import DetectionDataset, View
from frugalvit.tasks.detection.layers import DetectorSpec
from frugalvit.tasks.detection.metrics import agreement
from frugalvit.tasks.detection.model import Detector
from frugalvit.tasks.detection.task import DetectionTask, summary_of
from frugalvit.utils.files import make_folder, write_text
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize, truncate_list

_MIN_SCORE = 0.5  # detections with at least this score are drawn in a report and count for best and worst


def train(config: DetectConfig) -> CommandResult:
    return DetectExperiment(config).run()


def open_annotations(config: DetectConfig) -> CocoData:
    """Open COCO-format data; raise if it has nothing to train on."""
    data = open_coco(
        str(config.data), config.split, config.val_fraction, config.categories, max_bad=config.cache.max_bad
    )
    with_mask, count = data.masks()
    if not count:
        raise UserError(f"{config.data} has no objects in its training images.")
    if config.masks is True and with_mask < count:
        found = f"{with_mask:,} of {count:,} training objects of {config.data} have a mask"
        raise UserError(f"{found}, and --masks needs all. Drop --masks to train on boxes only.")
    return data


def make_task(config: ResolvedDetectConfig, data: CocoData, backbone: Backbone) -> DetectionTask:
    spec = DetectorSpec(len(data.classes), config.head, config.masks, **config.detector.model_dump())
    return DetectionTask(
        Detector(Pyramid(backbone), spec),
        View(config.img_size, config.scales, config.longest),
        weight_decay=config.optimizer.weight_decay,
        freeze_norms=bool(config.init or config.pretrained),
    )


def make_schedule(config: ResolvedDetectConfig, steps: int) -> Schedule:
    """Return the learning rate: a warm-up, then drops at the milestones."""
    lr, optimizer = config.lr, config.optimizer
    milestones = tuple(round(share * steps) for share in optimizer.milestones)
    return Steps(lr, milestones, optimizer.factor, min(optimizer.warmup, steps // 5), warmup_from=lr * 1e-3)


def score_detector(task: DetectionTask, dataset: DetectionDataset, folder: Path | None) -> dict[str, Any]:
    """Return COCO's scores; write curves, the table of classes, and the best and worst images."""
    detections = task.cached_detections(dataset)
    scores = task.scores(dataset, detections)
    names = {"bbox": "box", "segm": "mask"}
    classes = dataset.data.class_of()
    counts = Counter(classes[entry["category_id"]] for image in dataset.images for entry in image.trainable())
    rows: list[list[Any]] = [
        [name, counts[number], *(ap.classes[number - 1] for ap in scores.values())]
        for number, name in enumerate(dataset.data.classes, 1)
        if counts[number]
    ]
    columns = ["class", "objects", *(f"{names[kind]} AP" for kind in scores)]
    per_class = {"columns": columns, "rows": sorted(rows, key=lambda row: row[2] or 0)}
    if folder is not None:
        curves = {names[kind]: ap.curves for kind, ap in scores.items()}
        dense.save_material(folder, curves=curves, per_class=per_class, **_draw_images(dataset, detections, folder))
    facts = {"per_class": per_class, "alarms": find_alarms(scores["bbox"].ap50, rows, detections)}
    return summary_of(scores) | task.jackknife(dataset, detections, scores) | facts


def find_alarms(ap50: float | None, per_class: list[list[Any]], detections: list[dict[str, Any]]) -> list[str]:
    """Return an alarm if the detector finds nothing, or nothing of some classes; per_class: [name, objects, AP, …]."""
    if ap50 is None:
        return []
    sure = sum(entry["score"] >= _MIN_SCORE for entry in detections)
    missed = [str(name) for name, _, ap, *_ in per_class if not ap]
    if len(missed) < len(per_class):
        return [f"it finds none of {truncate_list(missed)}: their AP is 0. {dense.LEARN_MORE}"] if missed else []
    found = f"{pluralize(sure, 'wrong detection') if sure else 'no detection'} with a score of {_MIN_SCORE} or more"
    return [f"the detector finds nothing ({found}): the box AP of all classes is 0. {dense.LEARN_MORE}"]


def _draw_images(
    dataset: DetectionDataset, detections: list[dict[str, Any]], folder: Path
) -> dict[str, list[dict[str, str]]]:
    """Draw the images with the highest and the lowest F1 at IoU 0.5: ground truth left, detections right."""
    detected: list[list[dict[str, Any]]] = [[] for _ in dataset.images]
    for entry in detections:
        if entry["score"] >= _MIN_SCORE:
            detected[entry["image"]].append(entry)
    classes = dataset.data.class_of()
    truths = [
        [{**entry, "label": classes[entry["category_id"]]} for entry in image.trainable()] for image in dataset.images
    ]

    def draw(score: float, index: int) -> tuple[Image.Image, str]:
        image = dataset.images[index]
        pixels = dataset.pictures.read(index).cpu().permute(1, 2, 0).numpy()
        truth = [
            {**entry, "segmentation": rle(entry, image.height, image.width)} if "segmentation" in entry else entry
            for entry in truths[index]
        ]
        pair = [draw_objects(pixels, part, dataset.data.classes) for part in (truth, detected[index])]
        return side_by_side(pair), f"{image.path.name}: F1 {score:.2f}"

    scores = [(agreement(truth, detected[index]), index) for index, truth in enumerate(truths) if truth]
    return draw_best_and_worst(scores, draw, folder)


class DetectExperiment(dense.DenseExperiment[DetectConfig, ResolvedDetectConfig]):
    command, kind, columns = "detect train", "detect", 2
    data: CocoData
    task: DetectionTask
    open_annotations = staticmethod(open_annotations)
    make_task = staticmethod(make_task)
    make_schedule = staticmethod(make_schedule)
    score_task = staticmethod(score_detector)

    def resolve_values(self, options: DetectConfig, facts: Facts) -> ResolvedDetectConfig:
        strides = with_top(pyramid_strides(self.backbone))
        return resolve_detection(options, facts, strides, self.data.masks(), self.auto_values)

    def model_facts(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.task.net.spec),
            "view": asdict(self.task.view),
            "classes": list(self.data.classes),
            "category_ids": list(self.data.category_ids),
            "categories": self.config.categories,
        }


def load_task(where: str, device: str, batch: int = 1) -> tuple[DetectionTask, dict[str, Any]]:
    """Load a trained detector for evaluation; return it and the facts about it."""

    def build(backbone: Backbone, facts: dict[str, Any]) -> DetectionTask:
        view, spec = facts["view"], facts["spec"]  # from JSON: lists, not tuples
        net = Detector(Pyramid(backbone), DetectorSpec(**spec))
        return DetectionTask(net, View(view["side"], tuple(view["scales"]), view["longest"]))

    return load_trained(where, "detect", build, device, batch)


def evaluate(config: DetectEvalConfig) -> CommandResult:
    return dense.evaluate_model(config, _open_model, score_detector)


def _open_model(config: DetectEvalConfig) -> tuple[DetectionTask, CocoData, str]:
    task, facts = load_task(config.model, config.device, config.batch)
    known = dict(zip(facts["category_ids"], facts["classes"], strict=True))
    parts: dict[str, Any] = {"only": config.split, **dense.splitting_of(config.model, config.data)}
    data = open_coco(config.data, categories=facts["categories"], known=known, max_bad=1.0, **parts)
    return task, data, config.split if Path(config.data).is_dir() else Path(config.data).name


def predict(config: DetectPredictConfig) -> CommandResult:
    """Detect objects in images; write pictures with boxes and masks, and one COCO-format JSON."""
    start = time.monotonic()
    folder = dense.check_empty_folder(config.out)
    inputs = InputImages(config.images)
    names = dense.unique_names(inputs.paths)
    task, facts = load_task(config.model, config.device, config.batch)
    task.net.set_score_threshold(config.threshold)
    make_folder(folder)
    classes, category_ids = facts["classes"], facts["category_ids"]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    predictions: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    for part in inputs.batches(config.batch, "detecting"):
        tensors = [torch.from_numpy(pixels).permute(2, 0, 1) for _, _, pixels in part]
        detections = task.detect(tensors, config.threshold)
        task.refuse_nonfinite(config.model)
        for (index, path, image), objects in zip(part, detections, strict=True):
            number, picture = len(images) + 1, f"{names[index]}.jpg"
            save_picture(draw_objects(image, objects, classes), folder / picture)
            size = {"height": image.shape[0], "width": image.shape[1]}
            images.append({"id": number, "file_name": str(path), **size, "picture": picture})
            predictions.append({"image": str(path), "picture": str(folder / picture), "objects": len(objects)})
            counts = Counter(classes[entry["label"] - 1] for entry in objects)
            rows.append([str(path), ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"])
            for entry in objects:
                ids = {"id": len(annotations) + 1, "image_id": number}
                annotations.append(ids | annotation_of(entry, category_ids))
    categories = [{"id": identity, "name": name} for identity, name in zip(category_ids, classes, strict=True)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_text(folder / "detections.json", json.dumps(content))
    seconds = round(time.monotonic() - start, 2)
    data = {"out": str(folder), "images": len(images), "objects": len(annotations), "seconds": seconds}
    data |= {"predictions": predictions, "unreadable": inputs.unreadable}
    return CommandResult(data, [Table(["image", "objects"], rows)], [f"pictures and detections.json in {folder}"])


def annotation_of(entry: dict[str, Any], category_ids: list[int]) -> dict[str, Any]:
    """Convert a detection to a COCO annotation. Its area is the mask's if it has one, as in COCO's own files."""
    others = {key: value for key, value in entry.items() if key != "label"}
    mask = entry.get("segmentation")
    area = entry["bbox"][2] * entry["bbox"][3] if mask is None else float(run_length.area(mask))
    return {"category_id": category_ids[entry["label"] - 1], "iscrowd": 0, **others, "area": area}
