"""``frugalvit detect train | eval | predict``."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from faster_coco_eval.core import mask as run_length

from frugalvit.backbones import Backbone
from frugalvit.config.dense import DetectConfig, DetectEvalConfig, DetectPredictConfig
from frugalvit.config.resolved import ResolvedDetectConfig
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.schedules import Schedule, Steps
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import Facts
from frugalvit.experiment.dense_auto_values import resolve_detection
from frugalvit.experiment.summary import run_result
from frugalvit.runs import layout
from frugalvit.tasks.dense.checkpoint import load_weights, read_facts, rebuild_backbone
from frugalvit.tasks.dense.drawing import draw_objects, save_picture, side_by_side
from frugalvit.tasks.dense.experiment import DenseExperiment, limit_warmup, readable
from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.dense.predict_io import (
    check_empty_folder,
    out_folder,
    save_on_interrupt,
    single_device_fabric,
    unique_names,
)
from frugalvit.tasks.dense.pyramid import Pyramid, pyramid_strides, with_top
from frugalvit.tasks.detection.coco import CocoData, CocoImage, open_coco, rle
from frugalvit.tasks.detection.dataset import DetectionDataset, View
from frugalvit.tasks.detection.layers import DetectorSpec
from frugalvit.tasks.detection.metrics import agreement
from frugalvit.tasks.detection.model import Detector
from frugalvit.tasks.detection.task import DetectionTask, summary_of
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, write_text
from frugalvit.utils.tables import CommandResult, Table, to_json
from frugalvit.utils.text import pluralize, truncate_list

_SHOWN = 6
"""Number of the best and of the worst images in a report."""
_MIN_SCORE = 0.5
"""Detections with at least this score are drawn in a report and count for best and worst."""


def train(config: DetectConfig) -> CommandResult:
    """Train a detector."""
    return DetectExperiment(config).run()


class DetectExperiment(DenseExperiment[DetectConfig, ResolvedDetectConfig]):
    command, kind = "detect train", "detect"
    columns = 2
    data: CocoData
    task: DetectionTask

    def open_annotations(self) -> CocoData:
        return open_annotations(self.options)

    def resolve_values(self, options: DetectConfig, facts: Facts) -> ResolvedDetectConfig:
        data, strides = self.data, with_top(pyramid_strides(self.backbone))
        masks = data.has_masks(), data.about_masks()
        config = resolve_detection(options, facts, strides, masks, self.auto_values)
        if config.masks and (maskless := data.maskless()):
            names = truncate_list([data.classes[label - 1] for label in maskless])
            data.notes.append(f"no masks will be predicted for {names}: none of their training objects has one")
        return config

    def build_task(self) -> DetectionTask:
        maskless = self.data.maskless() if self.config.masks else ()
        return make_task(self.config, len(self.data.classes), maskless, self.backbone)

    def make_dataset(self, items: list[CocoImage], pictures: ImageReader) -> DetectionDataset:
        return DetectionDataset(items, self.data, pictures, self.task.net.spec.masks)

    def make_schedule(self, steps: int) -> Schedule:
        return make_schedule(self.config, steps)

    def score_task(self, dataset: DetectionDataset, folder: Path | None) -> dict[str, Any]:
        return score_detector(self.task, dataset, folder)

    def model_facts(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.task.net.spec),
            "view": asdict(self.task.view),
            "classes": list(self.data.classes),
            "category_ids": list(self.data.category_ids),
            "categories": self.config.categories,
        }

    def result(self, summary: dict[str, Any]) -> CommandResult:
        tables = _tables(summary)
        commands = [f"frugalvit detect predict {console.shell_quote(summary['run'])} IMAGE…"]
        return replace(run_result(summary, tables[0], commands), tables=tables)


def open_annotations(config: DetectConfig) -> CocoData:
    """Open COCO-format data; raise if it has nothing to train on."""
    data = open_coco(
        str(config.data),
        config.split,
        config.val_fraction,
        config.categories,
        masks=config.masks is not False,
        max_bad=config.cache.max_bad,
    )
    with_mask, count = data.masks()
    if not count:
        raise UserError(f"{config.data} has no objects in its training images.")
    if config.masks is True and not with_mask:
        raise UserError(
            f"{config.data} has no usable mask in its training images. Drop --masks to train on boxes only."
        )
    return data


def make_task(
    config: ResolvedDetectConfig, classes: int, maskless: tuple[int, ...], backbone: Backbone
) -> DetectionTask:
    """Build the detector. ``maskless`` are the labels of classes without masks."""
    sizes = config.detector
    spec = DetectorSpec(
        classes,
        config.head,
        config.masks,
        sizes.channels,
        sizes.hidden,
        sizes.anchors,
        sizes.proposals,
        sizes.samples,
        sizes.detections,
        sizes.octaves,
        maskless,
    )
    return DetectionTask(
        Detector(Pyramid(backbone), spec),
        View(config.img_size, config.scales, config.longest),
        weight_decay=config.optimizer.weight_decay,
        layer_decay=config.optimizer.layer_decay,
        steady=bool(config.init or config.pretrained),
    )


def make_schedule(config: ResolvedDetectConfig, steps: int) -> Schedule:
    """Return the learning rate: a warm-up, then drops at the milestones."""
    lr, optimizer = config.lr, config.optimizer
    milestones = tuple(round(share * steps) for share in optimizer.milestones)
    return Steps(lr, milestones, optimizer.factor, limit_warmup(optimizer.warmup, steps), warmup_from=lr * 1e-3)


def score_detector(task: DetectionTask, dataset: DetectionDataset, folder: Path | None) -> dict[str, Any]:
    """Return COCO's scores; write curves, the table of classes, and the best and worst images into the folder."""
    detections = task.cached_detections(dataset)
    scores = task.scores(dataset, detections)
    if folder is not None:
        make_folder(folder / layout.PICTURES)
        names = {"bbox": "box", "segm": "mask"}
        counts = _objects_per_class(dataset)
        rows = [
            [name, counts[number], *(ap.classes[number - 1] for ap in scores.values())]
            for number, name in enumerate(dataset.data.classes, 1)
            if counts[number]
        ]
        columns = ["class", "objects", *(f"{names[kind]} AP" for kind in scores)]
        material = {
            "curves": {names[kind]: ap.curves for kind, ap in scores.items()},
            "per_class": {"columns": columns, "rows": sorted(rows, key=lambda row: -(row[2] or 0))},
            **_pictures(dataset, detections, folder),
        }
        write_text(folder / layout.DENSE_REPORT, to_json(material, indent=1))
    return summary_of(scores)


def evaluate(config: DetectEvalConfig) -> CommandResult:
    """Score a trained detector with COCO AP."""
    start = time.monotonic()
    folder = out_folder(config.out)
    facts = read_facts(config.model, "detect")
    known = (config.model, dict(pairs_of(facts)))
    masks = bool(facts["spec"]["masks"])
    data = open_coco(
        config.data, "given", categories=facts["categories"], masks=masks, known=known, only=config.split, max_bad=1.0
    )
    for note in data.notes:
        console.info(note)
    is_file = not Path(config.data).is_dir()  # a file has one split
    items, pictures = readable(data.splits["train" if is_file else config.split])
    task = load_task(config.model, facts, config.device, config.batch)
    dataset = DetectionDataset(items, data, pictures, task.net.spec.masks)
    scores = score_detector(task, dataset, folder)
    task.refuse_nonfinite(config.model)
    seconds = round(time.monotonic() - start, 2)
    summary = {
        "run": config.model,
        **scores,
        "scored_on": Path(config.data).name if is_file else config.split,
        "scored_images": len(dataset),
        "seconds": seconds,
    }
    return CommandResult(summary, _tables(summary), [f"pictures  {folder}/{layout.PICTURES}"] if folder else [])


def predict(config: DetectPredictConfig) -> CommandResult:
    """Detect objects in images; write pictures with boxes and masks, and one COCO-format JSON."""
    start = time.monotonic()
    folder = check_empty_folder(Path(config.out))
    facts = read_facts(config.model, "detect")
    inputs = InputImages(config.images)
    names = unique_names(inputs.paths)
    make_folder(folder)
    task = load_task(config.model, facts, config.device, config.batch)
    task.net.set_score_threshold(config.threshold)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    predictions: list[dict[str, Any]] = []
    categories = [{"id": identity, "name": name} for identity, name in pairs_of(facts)]

    def save() -> None:
        content = {"images": images, "annotations": annotations, "categories": categories}
        write_text(folder / "detections.json", json.dumps(content))

    with save_on_interrupt(folder, images, len(inputs.paths), save):
        for part in inputs.batches(config.batch, "detecting"):
            tensors = [torch.from_numpy(pixels).permute(2, 0, 1) for _, _, pixels in part]
            detections = task.detect(tensors, config.threshold)
            task.refuse_nonfinite(config.model)
            for (index, path, image), objects in zip(part, detections, strict=True):
                number, picture = len(images) + 1, f"{names[index]}.jpg"
                save_picture(draw_objects(image, objects, facts["classes"]), folder / picture)
                size = {"height": image.shape[0], "width": image.shape[1]}
                images.append({"id": number, "file_name": str(path), **size, "picture": picture})
                predictions.append({"image": str(path), "picture": str(folder / picture), "objects": len(objects)})
                for entry in objects:
                    ids = {"id": len(annotations) + 1, "image_id": number}
                    annotations.append(ids | annotation_of(entry, facts["category_ids"]))
    save()
    seconds = round(time.monotonic() - start, 2)
    data = {"out": str(folder), "images": len(images), "objects": len(annotations), "seconds": seconds}
    data |= {"predictions": predictions, "unreadable": inputs.unreadable}
    rows = [[image["file_name"], _count_objects(image["id"], annotations, dict(pairs_of(facts)))] for image in images]
    return CommandResult(data, [Table(["image", "objects"], rows)], [f"pictures and detections.json in {folder}"])


def annotation_of(entry: dict[str, Any], category_ids: list[int]) -> dict[str, Any]:
    """Convert a detection to a COCO annotation. Its area is the mask's if it has one, as in COCO's own files."""
    others = {key: value for key, value in entry.items() if key != "label"}
    mask = entry.get("segmentation")
    area = entry["bbox"][2] * entry["bbox"][3] if mask is None else float(run_length.area(mask))
    return {"category_id": category_ids[entry["label"] - 1], "iscrowd": 0, **others, "area": area}


def load_task(where: str, facts: dict[str, Any], device: str, batch: int) -> DetectionTask:
    """Load a trained detector for evaluation."""
    pyramid = Pyramid(rebuild_backbone(facts))
    view = facts["view"]
    task = DetectionTask(
        Detector(pyramid, DetectorSpec(**facts["spec"])),
        View(view["side"], (view["scales"][0], view["scales"][1]), view["longest"]),
    )
    load_weights(task, where)
    task.fabric, task.eval_batch = single_device_fabric(device), batch
    return task.to(task.fabric.device).eval()


def pairs_of(facts: dict[str, Any]) -> list[tuple[int, str]]:
    """Return (category id, name) of every class."""
    return list(zip(facts["category_ids"], facts["classes"], strict=True))


def _count_objects(identity: int, annotations: list[dict[str, Any]], names: dict[int, str]) -> str:
    """Return the objects of an image in words: "3 person, 1 dog"."""
    counts: dict[str, int] = {}
    for entry in annotations:
        if entry["image_id"] == identity:
            name = names[entry["category_id"]]
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _objects_per_class(dataset: DetectionDataset) -> dict[int, int]:
    counts = dict.fromkeys(range(1, len(dataset.data.classes) + 1), 0)
    classes = dataset.data.class_of()
    for image in dataset.images:
        for entry in image.learnable():
            counts[classes[entry["category_id"]]] += 1
    return counts


def _pictures(
    dataset: DetectionDataset, detections: list[dict[str, Any]], folder: Path
) -> dict[str, list[dict[str, str]]]:
    """Draw the images with the highest and the lowest F1 at IoU 0.5: ground truth left, detections right."""
    by_image: dict[int, list[dict[str, Any]]] = {}
    for entry in detections:
        if entry["score"] >= _MIN_SCORE:
            by_image.setdefault(entry["image"], []).append(entry)
    classes = dataset.data.class_of()
    truths = [
        [{**entry, "label": classes[entry["category_id"]]} for entry in image.learnable()] for image in dataset.images
    ]
    ranked = sorted((agreement(truth, by_image.get(index, [])), index) for index, truth in enumerate(truths) if truth)
    shown: dict[str, list[dict[str, str]]] = {}
    for kind, chosen in (("best", ranked[::-1][:_SHOWN]), ("worst", ranked[:_SHOWN])):
        shown[kind] = []
        for number, (score, index) in enumerate(chosen, 1):
            image = dataset.images[index]
            pixels = dataset.pictures.read(index).cpu().permute(1, 2, 0).numpy()
            truth = [_with_rle(entry, image) for entry in truths[index]]
            pair = [draw_objects(pixels, part, dataset.data.classes) for part in (truth, by_image.get(index, []))]
            name = f"{layout.PICTURES}/{kind}_{number}.jpg"
            save_picture(side_by_side(pair), folder / name)
            shown[kind].append({"image": name, "caption": f"{image.path.name}: F1 {score:.2f}"})
    return shown


def _with_rle(entry: dict[str, Any], image: CocoImage) -> dict[str, Any]:
    if "segmentation" not in entry:
        return entry
    return {**entry, "segmentation": rle(entry, image.height, image.width)}


def _tables(summary: dict[str, Any]) -> list[Table]:
    """Return the scores, and the scores by object size."""
    names = ["box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75", "seconds"]
    names = [name for name in names if name in summary]
    title = f"{summary['scored_on']}: {pluralize(summary['scored_images'], 'image')}"
    overall = Table(names, [[summary[name] for name in names]], title)
    sizes = ("small", "medium", "large")
    rows = [
        [f"{kind} AP", *(summary[f"{kind}_ap_{size}"] for size in sizes)]
        for kind in ("box", "mask")
        if all(f"{kind}_ap_{size}" in summary for size in sizes)
    ]
    return [overall, Table(["objects", *sizes], rows)] if rows else [overall]
