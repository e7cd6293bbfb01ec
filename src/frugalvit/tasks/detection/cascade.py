"""Cascade Mask R-CNN (Cai & Vasconcelos 2018), with the heads that Swin and EsViT publish (86 M with Swin-T).

Three box heads in a row. Head t counts a region as an object if their IoU is at least u_t = 0.5, 0.6, 0.7, and trains
on the boxes that head t-1 refined. Each has four convolutions with batch norm, one hidden layer ("4conv1fc"), one box
for every class, and a GIoU loss of weight 10. Each has its own mask head. At test the boxes are those of the last head;
class scores and masks are means of all three.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder, Matcher
from torchvision.models.detection.roi_heads import maskrcnn_inference
from torchvision.ops import (
    Conv2dNormActivation,
    batched_nms,
    clip_boxes_to_image,
    generalized_box_iou_loss,
    remove_small_boxes,
)

from frugalvit.tasks.dense.pyramid import FeaturePyramid
from frugalvit.tasks.detection.heads import DetectorHead
from frugalvit.tasks.detection.layers import MIN_SCORE, DetectorSpec, Maps, Sizes, Target, mask_layers, roi_align
from frugalvit.tasks.detection.masks import mask_loss
from frugalvit.tasks.detection.matching import add_objects, gather_boxes, match_regions, select_positives, take

OVERLAPS = (0.5, 0.6, 0.7)
# Offsets of refined boxes are smaller: these weights keep their deviation near 1.
OFFSET_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
BOX_WEIGHT = 10.0


class BoxStage(nn.Module):
    """Cropped features (N, C, 7, 7) -> class logits (N, classes + 1) and offsets (N, classes, 4), both float32."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        convolutions = [Conv2dNormActivation(channels, channels, 3) for _ in range(4)]
        self.body = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(channels * 49, hidden), nn.ReLU(inplace=True))
        self.scores = nn.Linear(hidden, classes + 1)
        self.offsets = nn.Linear(hidden, 4 * classes)

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(crops)
        return self.scores(hidden).float(), self.offsets(hidden).float().unflatten(1, (-1, 4))


class CascadeHead(DetectorHead):
    """Three box heads that refine each other's boxes, each with a mask head."""

    def __init__(self, spec: DetectorSpec, features: FeaturePyramid) -> None:
        super().__init__()
        self.spec, self.score_thresh = spec, MIN_SCORE
        self.crop = roi_align(spec, features, 7)
        self.stages = nn.ModuleList(BoxStage(spec.channels, spec.hidden, spec.classes) for _ in OVERLAPS)
        self.coders = [BoxCoder(weights) for weights in OFFSET_WEIGHTS]
        self.matchers = [Matcher(overlap, overlap) for overlap in OVERLAPS]
        self.sampler = BalancedPositiveNegativeSampler(spec.samples, 0.25)
        self.mask_stages = nn.ModuleList(nn.ModuleDict(mask_layers(spec, features)) for _ in OVERLAPS if spec.masks)

    def forward(
        self, features: Maps, proposals: list[Tensor], sizes: Sizes, targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, sizes, targets)
        return self._detect(features, proposals, sizes), {}

    def output_modules(self) -> list[nn.Module]:
        return list(self.stages)

    def _losses(
        self, features: Maps, proposals: list[Tensor], sizes: Sizes, targets: list[Target]
    ) -> dict[str, Tensor]:
        boxes = add_objects(proposals, targets)
        losses: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            owners, labels = match_regions(boxes, targets, self.matchers[number])
            # The first head samples a fixed number of regions per image, a quarter of them objects; later ones use all.
            if number == 0:
                sampled = zip(*self.sampler(labels), strict=True)
                chosen = [torch.where(positive | negative)[0] for positive, negative in sampled]
                boxes, owners, labels = take(boxes, chosen), take(owners, chosen), take(labels, chosen)
            if self.mask_stages:
                regions, matched = select_positives(boxes, owners, labels)
                loss = mask_loss(self._masks(number, features, regions, sizes), regions, matched, targets)
                losses["loss_mask"] = losses.get("loss_mask", 0.0) + LOSS_WEIGHTS[number] * loss
            logits, offsets = stage(self.crop(features, boxes, sizes))
            label = torch.cat(labels)
            weight = LOSS_WEIGHTS[number] / max(1, len(label))
            losses[f"loss_classifier_{number + 1}"] = weight * F.cross_entropy(logits, label, reduction="sum")
            offsets = _class_offsets(offsets, torch.where(label > 0, label, logits[:, 1:].argmax(1) + 1))
            positive, wanted = torch.where(label > 0)[0], torch.cat(gather_boxes(owners, targets))
            moved = self.coders[number].decode(offsets, boxes).reshape(-1, 4)
            box_loss = generalized_box_iou_loss(moved[positive], wanted[positive], reduction="sum")
            losses[f"loss_box_reg_{number + 1}"] = BOX_WEIGHT * weight * box_loss
            boxes = self._refine(number, offsets.detach(), boxes, sizes)
            boxes = [part[remove_small_boxes(part, 1e-2)] for part in boxes]  # no lines and points
        return losses

    def _masks(self, number: int, features: Maps, boxes: list[Tensor], sizes: Sizes) -> Tensor:
        parts: Any = self.mask_stages[number]
        return parts["mask_predictor"](parts["mask_head"](parts["mask_roi_pool"](features, boxes, sizes)))

    def _refine(self, number: int, offsets: Tensor, boxes: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """Apply offsets (N, 4) or (N, classes, 4) to the regions and clip the boxes to their images."""
        moved = self.coders[number].decode(offsets.flatten(1), boxes).reshape(offsets.shape)
        parts = moved.split([len(part) for part in boxes])
        return [clip_boxes_to_image(part, size) for part, size in zip(parts, sizes, strict=True)]

    def _detect(self, features: Maps, boxes: list[Tensor], sizes: Sizes) -> list[Target]:
        total = torch.zeros(())
        for number, stage in enumerate(self.stages):
            logits, offsets = stage(self.crop(features, boxes, sizes))
            total = total.to(logits) + logits.softmax(1) / len(self.stages)
            if number + 1 < len(self.stages):
                offsets = _class_offsets(offsets, logits[:, 1:].argmax(1) + 1)
            boxes = self._refine(number, offsets, boxes, sizes)
        scores = total.split([len(part) for part in boxes])
        detections = [self._select(part, score) for part, score in zip(boxes, scores, strict=True)]
        if self.mask_stages:
            regions = [objects["boxes"] for objects in detections]
            labels = [objects["labels"] for objects in detections]
            stages = [
                maskrcnn_inference(self._masks(number, features, regions, sizes), labels)
                for number in range(len(OVERLAPS))
            ]
            for objects, *masks in zip(detections, *stages, strict=True):
                objects["masks"] = torch.stack(masks).mean(0)
        return detections

    def _select(self, boxes: Tensor, scores: Tensor) -> Target:
        """Return every class of every region above the score threshold, after NMS; boxes (N, classes, 4)."""
        region, label = torch.where(scores[:, 1:] > self.score_thresh)
        boxes, label = boxes[region, label], label + 1
        scores = scores[region, label]
        keep = remove_small_boxes(boxes, 1e-2)
        boxes, scores, label = boxes[keep], scores[keep], label[keep]
        keep = batched_nms(boxes, scores, label, 0.5)[: self.spec.detections]
        return {"boxes": boxes[keep], "labels": label[keep], "scores": scores[keep]}


def _class_offsets(offsets: Tensor, labels: Tensor) -> Tensor:
    """Return the offsets (N, 4) of each region's class, 1 to classes, out of (N, classes, 4)."""
    return offsets[torch.arange(len(labels), device=labels.device), labels - 1]
