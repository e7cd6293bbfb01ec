"""A detector in the one loop: pictures and objects of a step, its losses, and its COCO scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as run_length
from torch import Tensor, nn

from frugalvit.tasks.dense.loader import StepLoader, share
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.tasks.detection.cascade import BoxStage
from frugalvit.tasks.detection.dataset import ObjectPictures, Objects, View, frame_of, lay_out, make_targets
from frugalvit.tasks.detection.layers import FloatPredictor, FloatProposals, Target
from frugalvit.tasks.detection.metrics import AveragePrecision, average_precision
from frugalvit.tasks.detection.model import Detector
from frugalvit.utils import console


@dataclass
class DetectionBatch:
    """images (B, 3, H, W) padded to the largest; ``sizes`` what of each is image."""

    images: Tensor
    sizes: list[tuple[int, int]]
    targets: list[Target]


class DetectionTask(DenseTask):
    """A detector and its losses."""

    best_metric = "box_ap"
    feeding: StepLoader[tuple[Tensor, Objects]] | None
    evaluated: ObjectPictures | None

    def __init__(self, net: Detector, view: View, **settings: Any) -> None:
        super().__init__(net.features.pyramid.backbone, **settings)
        self.net, self.view = net, view
        for module in net.modules():  # boxes and scores that are no numbers are left out later on: here they are met
            if isinstance(module, BoxStage | FloatPredictor | FloatProposals):
                module.register_forward_hook(self._look_at)

    @property
    def pyramid(self) -> Pyramid:
        return self.net.features.pyramid

    def _look_at(self, module: nn.Module, inputs: Any, outputs: tuple[Any, Any]) -> None:
        if not self.training:
            parts = [part for output in outputs for part in (output if isinstance(output, list) else [output])]
            self.check_finite(torch.stack([part.sum() for part in parts]))

    # -- a step

    def batch_at(self, step: int) -> DetectionBatch:
        assert self.feeding is not None
        self.seen = None
        items, numbers = self.feeding.at(step)
        pictures, objects = zip(*items, strict=True)
        before = [(pixels.shape[1], pixels.shape[2]) for pixels in pictures]
        drawn = numbers.tolist()
        sizes = [self.view.fit(*size, self.view.side_for(row[0])) for size, row in zip(before, drawn, strict=True)]
        flips = [row[1] < 0.5 for row in drawn]
        images = lay_out(pictures, sizes, flips, self.mean, self.std)
        return DetectionBatch(images, sizes, make_targets(objects, before, sizes, flips, self.device))

    def losses(self, batch: DetectionBatch) -> dict[str, Tensor]:
        return self.net(batch.images, batch.sizes, batch.targets)

    # -- scores

    def evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluated is not None
        self.seen = (self.evaluated, self.find(self.evaluated))
        found = summary_of(self.scores(*self.seen))
        whole = {name: value for name, value in found.items() if name.endswith(("ap", "ap50", "ap75"))}
        return {name: value for name, value in whole.items() if value is not None}

    def cached_detections(self, dataset: ObjectPictures) -> list[dict[str, Any]]:
        """As ``find``, which is not asked twice of the same weights."""
        return self.seen[1] if self.seen is not None and self.seen[0] is dataset else self.find(dataset)

    def find(self, dataset: ObjectPictures) -> list[dict[str, Any]]:
        """The detections of all images in their order, gathered over the processes; masks as run lengths."""
        assert self.fabric is not None
        sizes = dataset.pictures.sizes
        # Pictures of one frame side by side, so that batches stay full.
        places = sorted(share(len(dataset), self.fabric), key=lambda place: frame_of(self._fit(sizes[place])))
        found: list[dict[str, Any]] = []
        was_training, self.nonfinite_outputs = self.training, False
        self.eval()
        starts = range(0, len(places), self.eval_batch)
        for start in console.progress(starts, label="evaluating"):
            part = places[start : start + self.eval_batch]
            for place, objects in zip(part, self.detect([dataset.pictures.read(i) for i in part]), strict=True):
                found += [{"image": place, **entry} for entry in objects]
        self.train(was_training)
        self.agree_on_broken()
        return sorted(self.gather(found), key=lambda entry: entry["image"])

    def detect(self, pictures: list[Tensor], least: float = 0.0) -> list[list[dict[str, Any]]]:
        """The objects of pictures (3, H, W) that score at least so much, as dicts; the same together and one by one.

        label, score, bbox (left, top, width, height), and mask as run lengths, but of classes without one to learn from
        """
        original = [(pixels.shape[1], pixels.shape[2]) for pixels in pictures]
        sizes = [self._fit(size) for size in original]
        frames: dict[tuple[int, int], list[int]] = {}
        for place, size in enumerate(sizes):
            frames.setdefault(frame_of(size), []).append(place)
        found: list[list[dict[str, Any]]] = [[] for _ in pictures]
        with torch.inference_mode(), self.autocast():
            for frame, places in frames.items():
                fitted = [sizes[place] for place in places]
                seen = [pictures[place] for place in places]
                images = lay_out(seen, fitted, [False] * len(places), self.mean, self.std, frame)
                part = self.net.detect(images, fitted, [original[place] for place in places], least)
                for place, objects in zip(places, part, strict=True):
                    found[place] = _entries(objects, self.net.spec.maskless)
        return found

    def _fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size in which a picture of this size is looked at."""
        return self.view.fit(*size, self.view.side)

    def scores(self, dataset: ObjectPictures, found: list[dict[str, Any]]) -> dict[str, AveragePrecision]:
        """COCO's scores of boxes, and of masks where both the detector and the data have some."""
        drawn = any(image.drawn() for image in dataset.images)
        kinds = ("bbox", "segm") if self.net.spec.masks and drawn else ("bbox",)
        return {kind: average_precision(dataset.images, dataset.data, found, kind) for kind in kinds}


def summary_of(scores: dict[str, AveragePrecision]) -> dict[str, float | None]:
    """box_ap, box_ap50, box_ap75, mask_ap, …; None where there was no such object to find."""
    words = {"bbox": "box", "segm": "mask"}
    parts = (("ap", "ap"), ("ap50", "ap50"), ("ap75", "ap75"), ("small", "ap_small"), ("medium", "ap_medium"))
    parts = (*parts, ("large", "ap_large"))
    return {f"{words[kind]}_{key}": getattr(ap, part) for kind, ap in scores.items() for part, key in parts}


def _entries(objects: Target, maskless: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    boxes = objects["boxes"].float().cpu()
    sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    entries = [
        {"label": label, "score": score, "bbox": box}
        for label, score, box in zip(objects["labels"].tolist(), objects["scores"].tolist(), sides, strict=True)
    ]
    if "masks" in objects:
        for entry, inside in zip(entries, objects["masks"], strict=True):
            if entry["label"] in maskless:
                continue
            encoded = run_length.encode(np.asfortranarray(inside.cpu().numpy().astype(np.uint8)))
            counts = encoded["counts"]
            text = counts.decode() if isinstance(counts, bytes) else counts
            entry["segmentation"] = {"size": [int(side) for side in encoded["size"]], "counts": text}
    return entries
