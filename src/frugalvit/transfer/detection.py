"""Mask R-CNN (He et al. 2017) on any of our pyramids, from torchvision's parts.

Images arrive resized and normalised (see detect_data.py), so what is left of torchvision's model is the pyramid, the
region proposals and the heads. Whatever a matrix product gives in half precision is turned into float32 before boxes
are made of it: bfloat16 knows a place in a large image to four pixels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign

from frugalvit.transfer.pyramid import FeaturePyramid, Pyramid
from frugalvit.transfer.regions import Heads, Proposals

Target = dict[str, Tensor]
"""boxes (n, 4) as left, top, right, bottom; labels (n,), 1 is the first class; masks (n, H, W) where there are any."""


@dataclass(frozen=True)
class DetectorSpec:
    """All sizes of a detector, the resolved "auto" ones included: what it takes to build the same one again."""

    classes: int  # without the background
    head: str = "mask-rcnn"
    masks: bool = True
    channels: int = 256
    hidden: int = 1024
    anchors: float = 8.0  # anchor size in strides
    proposals: int = 1000
    samples: int = 512
    detections: int = 100


class Detector(nn.Module):
    """Losses while training, objects otherwise.

    forward(images, sizes, targets) -> losses by name (training), or detections in the coordinates of ``images``.
    """

    def __init__(self, pyramid: Pyramid, spec: DetectorSpec) -> None:
        super().__init__()
        self.spec = spec
        self.features = FeaturePyramid(pyramid, spec.channels)
        sizes = tuple((spec.anchors * stride,) for stride in self.features.strides)
        anchors = FloatAnchors(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
        per_place = anchors.num_anchors_per_location()[0]
        kept = {"training": spec.proposals, "testing": spec.proposals}
        self.rpn = Proposals(
            anchors,
            FloatProposals(spec.channels, per_place),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * spec.proposals, "testing": spec.proposals},
            post_nms_top_n=kept,
            nms_thresh=0.7,
        )
        if spec.head == "cascade":
            from frugalvit.transfer.cascade import CascadeHeads

            self.heads: nn.Module = CascadeHeads(spec, self.features)
        else:
            self.heads = Heads(
                roi_align(spec, self.features, 7),
                TwoMLPHead(spec.channels * 49, spec.hidden),
                FloatPredictor(spec.hidden, spec.classes + 1),
                fg_iou_thresh=0.5,
                bg_iou_thresh=0.5,
                batch_size_per_image=spec.samples,
                positive_fraction=0.25,
                bbox_reg_weights=None,
                score_thresh=0.05,
                nms_thresh=0.5,
                detections_per_img=spec.detections,
                **mask_parts(spec, self.features),
            )

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]], targets: list[Target] | None = None) -> Any:
        features = self.features(images)
        listed = ImageList(images, list(sizes))
        proposals, proposal_losses = self.rpn(listed, features, targets)
        found, losses = self.heads(features, proposals, list(sizes), targets)
        return losses | proposal_losses if self.training else found

    @torch.inference_mode()
    def detect(
        self, images: Tensor, sizes: Sequence[tuple[int, int]], original: Sequence[tuple[int, int]]
    ) -> list[Target]:
        """Objects of every image in its original size: boxes, labels, scores, and masks (n, H, W) as bool."""
        found = self.forward(images, sizes)
        for objects, size, (height, width) in zip(found, sizes, original, strict=True):
            scale = torch.tensor([width / size[1], height / size[0]] * 2, device=objects["boxes"].device)
            objects["boxes"] = objects["boxes"] * scale
            if "masks" in objects:
                pasted = paste_masks_in_image(objects["masks"].float(), objects["boxes"], (height, width))
                objects["masks"] = pasted[:, 0] > 0.5
        return found


class FloatAnchors(AnchorGenerator):
    """torchvision's anchors, in float32 whatever the maps are: they are places too. All images share one tensor."""

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        first = ImageList(image_list.tensors, image_list.image_sizes[:1])
        return super().forward(first, [grid[:, :1].float() for grid in feature_maps]) * len(image_list.image_sizes)


class FloatProposals(RPNHead):
    """torchvision's head of region proposals, with float32 results."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, boxes = super().forward(x)
        return [part.float() for part in scores], [part.float() for part in boxes]


class FloatPredictor(FastRCNNPredictor):
    """torchvision's class and box predictor, with float32 results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = super().forward(x)
        return scores.float(), boxes.float()


class FloatMasks(MaskRCNNPredictor):
    """torchvision's mask predictor, with float32 results."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


def roi_align(spec: DetectorSpec, features: FeaturePyramid, side: int) -> MultiScaleRoIAlign:
    """Crops of ``side`` cells from the level that fits a region: 224 px on stride 16 with anchors of 8 strides."""
    return MultiScaleRoIAlign(features.names, side, sampling_ratio=2, canonical_scale=round(28 * spec.anchors))


def mask_parts(spec: DetectorSpec, features: FeaturePyramid) -> dict[str, nn.Module]:
    """He et al.'s mask head: four convolutions on 14 × 14 cells, doubled to 28 × 28; nothing without masks."""
    if not spec.masks:
        return {}
    return {
        "mask_roi_pool": roi_align(spec, features, 14),
        "mask_head": MaskRCNNHeads(spec.channels, (spec.channels,) * 4, 1),
        "mask_predictor": FloatMasks(spec.channels, spec.channels, spec.classes + 1),
    }
