"""Cascade Mask R-CNN (Cai & Vasconcelos 2018, "Cascade R-CNN: delving into high quality object detection").

Three box heads in a row. Head t counts a region as an object if their IoU is at least u_t = 0.5, 0.6, 0.7, and trains
on the boxes that head t-1 refined. Refinement does not depend on the class. At test the boxes are those of the last
head, and the class scores are the mean of all three. One mask head trains on the first head's objects and predicts
for the final boxes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder, Matcher
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.roi_heads import maskrcnn_inference
from torchvision.ops import batched_nms, clip_boxes_to_image, remove_small_boxes

from frugalvit.tasks.dense.pyramid import FeaturePyramid
from frugalvit.tasks.detection.heads import DetectorHead
from frugalvit.tasks.detection.layers import MIN_SCORE, DetectorSpec, Target, mask_layers, roi_align
from frugalvit.tasks.detection.masks import mask_loss, select_masked
from frugalvit.tasks.detection.regions import (
    add_objects,
    drop_empty,
    gather_boxes,
    match_regions,
    sample_regions,
    select_positives,
)

OVERLAPS = (0.5, 0.6, 0.7)
# Offsets of refined boxes are smaller: these weights keep their deviation near 1.
OFFSET_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)


class BoxStage(nn.Module):
    """Cropped features (N, C, 7, 7) -> class logits (N, classes + 1) and one box offset (N, 4), both float32."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.body = TwoMLPHead(channels * 49, hidden)
        self.scores = nn.Linear(hidden, classes + 1)
        self.offsets = nn.Linear(hidden, 4)

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(crops)
        return self.scores(hidden).float(), self.offsets(hidden).float()


class CascadeHead(DetectorHead):
    """Three box heads that refine each other's boxes, and one mask head."""

    def __init__(self, spec: DetectorSpec, features: FeaturePyramid) -> None:
        super().__init__()
        self.spec, self.score_thresh = spec, MIN_SCORE
        self.crop = roi_align(spec, features, 7)
        self.stages = nn.ModuleList(BoxStage(spec.channels, spec.hidden, spec.classes) for _ in OVERLAPS)
        self.coders = [BoxCoder(weights) for weights in OFFSET_WEIGHTS]
        self.matchers = [Matcher(overlap, overlap) for overlap in OVERLAPS]
        self.sampler = BalancedPositiveNegativeSampler(spec.samples, 0.25)
        self.mask_parts = nn.ModuleDict(mask_layers(spec, features))

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[Target], dict[str, Tensor]]:
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, sizes, targets)
        return self._detect(features, proposals, sizes), {}

    def output_modules(self) -> list[nn.Module]:
        return list(self.stages)

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[Target],
    ) -> dict[str, Tensor]:
        boxes = add_objects(proposals, targets)
        losses: dict[str, Tensor] = {}
        for number, (stage, coder) in enumerate(zip(self.stages, self.coders, strict=True)):
            owners, labels = match_regions(boxes, targets, self.matchers[number])
            # The first head samples a fixed number of regions per image, a quarter of them objects; later ones use all.
            if number == 0:
                boxes, owners, labels = sample_regions(boxes, owners, labels, self.sampler)
                if self.mask_parts:
                    regions, masked = select_masked(*select_positives(boxes, owners, labels), targets)
                    losses["loss_mask"] = mask_loss(self._masks(features, regions, sizes), regions, masked, targets)
            logits, offsets = stage(self.crop(features, boxes, sizes))
            target_boxes = gather_boxes(owners, targets)
            wanted, label = torch.cat(coder.encode(target_boxes, boxes)), torch.cat(labels)  # type: ignore[arg-type]
            positive = torch.where(label > 0)[0]
            weight = LOSS_WEIGHTS[number] / max(1, len(label))
            losses[f"loss_classifier_{number + 1}"] = weight * F.cross_entropy(logits, label, reduction="sum")
            box_loss = F.smooth_l1_loss(offsets[positive], wanted[positive], beta=1 / 9, reduction="sum")
            losses[f"loss_box_reg_{number + 1}"] = weight * box_loss
            boxes = drop_empty(self._refine(number, offsets.detach(), boxes, sizes))
        return losses

    def _masks(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> Tensor:
        crops = self.mask_parts["mask_roi_pool"](features, boxes, sizes)
        return self.mask_parts["mask_predictor"](self.mask_parts["mask_head"](crops))

    def _refine(self, number: int, offsets: Tensor, boxes: list[Tensor], sizes: list[tuple[int, int]]) -> list[Tensor]:
        """Apply the offsets to the regions and clip them to their images."""
        moved = self.coders[number].decode(offsets, boxes).reshape(-1, 4).split([len(part) for part in boxes])
        return [clip_boxes_to_image(part, size) for part, size in zip(moved, sizes, strict=True)]

    def _detect(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> list[Target]:
        total: Tensor | float = 0.0
        for number, stage in enumerate(self.stages):
            logits, offsets = stage(self.crop(features, boxes, sizes))
            total = total + logits.softmax(1)
            boxes = self._refine(number, offsets, boxes, sizes)
        scores = (total / len(self.stages)).split([len(part) for part in boxes])  # type: ignore[union-attr]
        detections = [self._select(part, score) for part, score in zip(boxes, scores, strict=True)]
        if self.mask_parts:
            logits = self._masks(features, [objects["boxes"] for objects in detections], sizes)
            labels = [objects["labels"] for objects in detections]
            for objects, masks in zip(detections, maskrcnn_inference(logits, labels), strict=True):
                objects["masks"] = masks
        return detections

    def _select(self, boxes: Tensor, scores: Tensor) -> Target:
        """Return every class of every box above the score threshold, after NMS per class."""
        region, label = torch.where(scores[:, 1:] > self.score_thresh)
        label = label + 1
        boxes, scores = boxes[region], scores[region, label]
        keep = remove_small_boxes(boxes, 1e-2)
        boxes, scores, label = boxes[keep], scores[keep], label[keep]
        keep = batched_nms(boxes, scores, label, 0.5)[: self.spec.detections]
        return {"boxes": boxes[keep], "labels": label[keep], "scores": scores[keep]}
