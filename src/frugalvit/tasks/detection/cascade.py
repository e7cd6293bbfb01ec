"""Cascade Mask R-CNN (Cai & Vasconcelos 2018, "Cascade R-CNN: delving into high quality object detection").

Three box heads in a row. Head t calls a region an object when it overlaps one by u_t = 0.5, 0.6, 0.7, is trained on the
boxes head t-1 refined, and hands its own on: the boxes get better, and so does what "object" means. A box is refined
regardless of its class. At test the boxes are those of the last head, the class scores the mean of all three.
One mask head learns from the first head's objects and looks at the final boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder, Matcher
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.roi_heads import maskrcnn_inference
from torchvision.ops import batched_nms, clip_boxes_to_image, remove_small_boxes

from frugalvit.tasks.dense.pyramid import FeaturePyramid
from frugalvit.tasks.detection.layers import LEAST_SCORE, DetectorSpec, mask_parts, roi_align
from frugalvit.tasks.detection.masks import mask_loss, on_masks
from frugalvit.tasks.detection.rpn_roi import choose, goals_of, not_empty, on_objects, own, pad_objects, with_objects

OVERLAPS = (0.5, 0.6, 0.7)
# Refined boxes lie closer to their objects: their offsets shrink, and are stretched to keep about unit deviation.
OFFSET_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)


class BoxStage(nn.Module):
    """Cut-out features (N, C, 7, 7) -> class logits (N, classes + 1) and one box offset (N, 4), both float32."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.body = TwoMLPHead(channels * 49, hidden)
        self.scores = nn.Linear(hidden, classes + 1)
        self.offsets = nn.Linear(hidden, 4)

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(crops)
        return self.scores(hidden).float(), self.offsets(hidden).float()


class CascadeHeads(nn.Module):
    """Takes the place of torchvision's RoIHeads: (features, proposals, sizes, targets) -> detections, losses."""

    def __init__(self, spec: DetectorSpec, features: FeaturePyramid) -> None:
        super().__init__()
        self.spec, self.score_thresh = spec, LEAST_SCORE
        self.crop = roi_align(spec, features, 7)
        self.stages = nn.ModuleList(BoxStage(spec.channels, spec.hidden, spec.classes) for _ in OVERLAPS)
        self.coders = [BoxCoder(weights) for weights in OFFSET_WEIGHTS]
        self.matchers = [Matcher(overlap, overlap) for overlap in OVERLAPS]
        self.sampler = BalancedPositiveNegativeSampler(spec.samples, 0.25)
        self.mask_parts = nn.ModuleDict(mask_parts(spec, features))

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, sizes, targets)
        return self._detect(features, proposals, sizes), {}

    # -- training

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        boxes, objects = with_objects(proposals, targets), pad_objects(targets)
        losses: dict[str, Tensor] = {}
        for number, (stage, coder) in enumerate(zip(self.stages, self.coders, strict=True)):
            owners, labels = own(boxes, objects, self.matchers[number])
            if number == 0:  # a fixed number of regions an image, a quarter of them objects; later heads keep them all
                boxes, owners, labels, positives = choose(boxes, owners, labels, self.sampler)
                if self.mask_parts:
                    regions, shown = on_masks(*on_objects(boxes, owners, labels, positives), targets)
                    losses["loss_mask"] = mask_loss(self._masks(features, regions, sizes), regions, shown, targets)
            logits, offsets = stage(self.crop(features, boxes, sizes))
            goals = goals_of(owners, objects)
            wanted, label = torch.cat(coder.encode(goals, boxes)), torch.cat(labels)  # type: ignore[arg-type]
            found = torch.where(label > 0)[0]
            weight = LOSS_WEIGHTS[number] / max(1, len(label))
            losses[f"loss_classifier_{number + 1}"] = weight * F.cross_entropy(logits, label, reduction="sum")
            box_loss = F.smooth_l1_loss(offsets[found], wanted[found], beta=1 / 9, reduction="sum")
            losses[f"loss_box_reg_{number + 1}"] = weight * box_loss
            boxes = not_empty(self._refine(number, offsets.detach(), boxes, sizes))
        return losses

    def _masks(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> Tensor:
        crops = self.mask_parts["mask_roi_pool"](features, boxes, sizes)
        return self.mask_parts["mask_predictor"](self.mask_parts["mask_head"](crops))

    # -- both

    def _refine(self, number: int, offsets: Tensor, boxes: list[Tensor], sizes: list[tuple[int, int]]) -> list[Tensor]:
        """The regions moved by their offsets, inside their images."""
        moved = self.coders[number].decode(offsets, boxes).reshape(-1, 4).split([len(part) for part in boxes])
        return [clip_boxes_to_image(part, size) for part, size in zip(moved, sizes, strict=True)]

    # -- test

    def _detect(
        self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        total: Tensor | float = 0.0
        for number, stage in enumerate(self.stages):
            logits, offsets = stage(self.crop(features, boxes, sizes))
            total = total + logits.softmax(1)
            boxes = self._refine(number, offsets, boxes, sizes)
        scores = (total / len(self.stages)).split([len(part) for part in boxes])  # type: ignore[union-attr]
        found = [self._choose(part, score) for part, score in zip(boxes, scores, strict=True)]
        if self.mask_parts:
            logits = self._masks(features, [objects["boxes"] for objects in found], sizes)
            for objects, masks in zip(found, maskrcnn_inference(logits, [o["labels"] for o in found]), strict=True):
                objects["masks"] = masks
        return found

    def _choose(self, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
        """Every class of every box that is likely enough, without near-duplicates of the same class."""
        region, label = torch.where(scores[:, 1:] > self.score_thresh)
        label = label + 1
        boxes, scores = boxes[region], scores[region, label]
        keep = remove_small_boxes(boxes, 1e-2)
        boxes, scores, label = boxes[keep], scores[keep], label[keep]
        keep = batched_nms(boxes, scores, label, 0.5)[: self.spec.detections]
        return {"boxes": boxes[keep], "labels": label[keep], "scores": scores[keep]}
