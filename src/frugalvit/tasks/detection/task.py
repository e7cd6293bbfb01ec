"""DetectionTask: batches, losses and COCO scores of a detector."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as run_length
from torch import Tensor, nn

from frugalvit.data.formats.coco import CocoData, CocoImage
from frugalvit.tasks.dense.loader import ImageReader, StepLoader, share
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.tasks.detection.dataset import DetectionDataset, Objects, View, make_targets, padded_size, stack_images
from frugalvit.tasks.detection.layers import Target
from frugalvit.tasks.detection.metrics import AP_KEYS, AveragePrecision, average_precision, leave_parts_out
from frugalvit.tasks.detection.model import Detector
from frugalvit.utils import console
from frugalvit.utils.intervals import jackknife_facts


@dataclass
class DetectionBatch:
    """images (B, 3, H, W), padded to the largest; ``sizes`` (height, width) of each image in it."""

    images: Tensor
    sizes: list[tuple[int, int]]
    targets: list[Target]


class DetectionTask(DenseTask):
    """A detector and its losses."""

    best_metric = "box_ap"
    loader: StepLoader[tuple[Tensor, Objects]]
    evaluated: DetectionDataset

    def __init__(self, net: Detector, view: View, **settings: Any) -> None:
        super().__init__(net, **settings)
        self.view = view
        for module in net.output_modules():  # what follows drops non-finite boxes and scores silently
            module.register_forward_hook(self._check_outputs)

    def make_dataset(self, items: list[CocoImage], data: CocoData, pictures: ImageReader) -> DetectionDataset:
        return DetectionDataset(items, data, pictures, self.net.spec.masks)

    def _check_outputs(self, module: nn.Module, inputs: Any, outputs: tuple[Any, Any]) -> None:
        if not self.training:
            parts = [part for output in outputs for part in (output if isinstance(output, list) else [output])]
            self.check_finite(torch.stack([part.sum() for part in parts]))

    # -- training

    def batch_at(self, step: int) -> DetectionBatch:
        self.last_evaluation = None
        items, numbers = self.loader.at(step)
        pictures, objects = zip(*items, strict=True)
        before = [(pixels.shape[1], pixels.shape[2]) for pixels in pictures]
        rows = numbers.tolist()
        sizes = [self.view.fit(*size, self.view.side_for(row[0])) for size, row in zip(before, rows, strict=True)]
        flips = [row[1] < 0.5 for row in rows]
        images = stack_images(pictures, sizes, flips, self.mean, self.std)
        return DetectionBatch(images, sizes, make_targets(objects, before, sizes, flips, self.device))

    def losses(self, batch: DetectionBatch) -> dict[str, Tensor]:
        return self.net(batch.images, batch.sizes, batch.targets)

    # -- evaluation

    def evaluate(self, step: int) -> dict[str, float]:
        self.last_evaluation = (self.evaluated, self.find(self.evaluated))
        scores = summary_of(self.scores(*self.last_evaluation))
        overall = {name: value for name, value in scores.items() if name.endswith(("ap", "ap50", "ap75"))}
        return {name: value for name, value in overall.items() if value is not None}

    def score_facts(self) -> dict[str, Any]:
        dataset, detections = self.last_evaluation
        facts = self.jackknife(dataset, detections, self.scores(dataset, detections))
        return {"scored_on": self.eval_split, "scored_images": len(dataset), **facts}

    def cached_detections(self, dataset: DetectionDataset) -> list[dict[str, Any]]:
        """Return the detections of a dataset; those of the last evaluation if no step followed it."""
        if self.last_evaluation is not None and self.last_evaluation[0] is dataset:
            return self.last_evaluation[1]
        return self.find(dataset)

    def find(self, dataset: DetectionDataset) -> list[dict[str, Any]]:
        """Detect objects in all images, on all ranks. Detections are in the order of the images."""
        assert self.fabric is not None
        sizes = dataset.pictures.sizes
        # Images of one padded size together, so that batches stay full.
        indices = sorted(share(len(dataset), self.fabric), key=lambda index: padded_size(self._fit(sizes[index])))
        detections: list[dict[str, Any]] = []
        starts = range(0, len(indices), self.eval_batch)
        with self.evaluating():
            for start in console.progress(starts, label="evaluating"):
                part = indices[start : start + self.eval_batch]
                for index, objects in zip(part, self.detect([dataset.pictures.read(i) for i in part]), strict=True):
                    detections += [{"image": index, **entry} for entry in objects]
        return sorted(self.gather(detections), key=lambda entry: entry["image"])

    def detect(self, pictures: list[Tensor], min_score: float = 0.0) -> list[list[dict[str, Any]]]:
        """Return the objects of images (3, H, W); the result of an image does not depend on the others.

        An object is a dict of label, score, bbox (left, top, width, height) and segmentation (run lengths).
        """
        original = [(pixels.shape[1], pixels.shape[2]) for pixels in pictures]
        sizes = [self._fit(size) for size in original]
        groups: dict[tuple[int, int], list[int]] = {}
        for index, size in enumerate(sizes):
            groups.setdefault(padded_size(size), []).append(index)
        results: list[list[dict[str, Any]]] = [[] for _ in pictures]
        with torch.inference_mode(), self.autocast():
            for input_size, indices in groups.items():
                fitted, group = [sizes[index] for index in indices], [pictures[index] for index in indices]
                images = stack_images(group, fitted, [False] * len(indices), self.mean, self.std, input_size)
                part = self.net.detect(images, fitted, [original[index] for index in indices], min_score)
                for index, objects in zip(indices, part, strict=True):
                    results[index] = _entries(objects)
        return results

    def _fit(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.view.fit(*size, self.view.side)

    def scores(self, dataset: DetectionDataset, detections: list[dict[str, Any]]) -> dict[str, AveragePrecision]:
        """Return COCO's scores of boxes ("bbox"), and of masks ("segm") if model and data have masks."""
        has_masks = self.net.spec.masks and any(
            "segmentation" in o for image in dataset.images for o in image.trainable()
        )
        kinds = ("bbox", "segm") if has_masks else ("bbox",)
        return {kind: average_precision(dataset.images, dataset.data, detections, kind) for kind in kinds}

    def jackknife(
        self, dataset: DetectionDataset, detections: list[dict[str, Any]], scores: dict[str, AveragePrecision]
    ) -> dict[str, Any]:
        """Return intervals and pseudo-values of the scores; a detector has no chance level to speak of."""
        without = [
            summary_of({kind: average_precision(images, dataset.data, found, kind) for kind in scores})
            for images, found in leave_parts_out(dataset.images, detections)
        ]
        return jackknife_facts(summary_of(scores), without, highest=1.0, digits=8)


def summary_of(scores: dict[str, AveragePrecision]) -> dict[str, float | None]:
    """Return box_ap, box_ap50, box_ap75, mask_ap, …; None if there is no such object."""
    names = {"bbox": "box", "segm": "mask"}
    return {f"{names[kind]}_{key}": getattr(ap, key) for kind, ap in scores.items() for key in AP_KEYS}


def _entries(objects: Target) -> list[dict[str, Any]]:
    """Convert the detections of an image to dicts; masks become run lengths."""
    boxes = objects["boxes"].float().cpu()
    sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    entries = [
        {"label": label, "score": score, "bbox": box}
        for label, score, box in zip(objects["labels"].tolist(), objects["scores"].tolist(), sides, strict=True)
    ]
    if "masks" in objects:
        for entry, inside in zip(entries, objects["masks"], strict=True):
            encoded = run_length.encode(np.asfortranarray(inside.cpu().numpy().astype(np.uint8)))
            counts = encoded["counts"]
            text = counts.decode() if isinstance(counts, bytes) else counts
            entry["segmentation"] = {"size": [int(side) for side in encoded["size"]], "counts": text}
    return entries
