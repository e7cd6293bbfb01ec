"""Detector heads by name (``--head``): the interface of the second stage, and how one is built.

A new head is one file with a subclass of :class:`DetectorHead` and one line in ``DETECTOR_HEADS`` of config/dense.py.
"""

import pkgutil
from abc import ABC, abstractmethod

from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss

from frugalvit.config.dense import DETECTOR_HEADS
from frugalvit.tasks.dense.pyramid import FeaturePyramid
from frugalvit.tasks.detection.layers import (
    MIN_SCORE,
    DetectorSpec,
    Maps,
    Sizes,
    Target,
    float_outputs,
    mask_layers,
    roi_align,
)
from frugalvit.tasks.detection.masks import mask_loss
from frugalvit.tasks.detection.matching import select_positives


class DetectorHead(nn.Module, ABC):
    """Second stage: regions -> objects with at least ``score_thresh``. ``Detector`` builds ``cls(spec, features)``."""

    score_thresh: float

    @abstractmethod
    def forward(
        self, features: Maps, proposals: list[Tensor], sizes: Sizes, targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """Return (detections, losses): losses by name while training, else one dict of detections per image.

        proposals:  regions (r, 4) of each image in pixels of the input
        detections: boxes (n, 4), labels (n,), scores (n,), and masks (n, 1, m, m) if the head predicts masks
        """

    @abstractmethod
    def output_modules(self) -> list[nn.Module]:
        """Return the modules whose outputs are scores and boxes; the task checks these for non-finite values."""


class MaskRCNNHead(RoIHeads, DetectorHead):
    """The second stage of Mask R-CNN (He et al. 2017): torchvision's heads, with our mask targets (masks.py)."""

    def __init__(self, spec: DetectorSpec, features: FeaturePyramid) -> None:
        super().__init__(
            roi_align(spec, features, 7),
            TwoMLPHead(spec.channels * 49, spec.hidden),
            float_outputs(FastRCNNPredictor(spec.hidden, spec.classes + 1)),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=spec.samples,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=MIN_SCORE,
            nms_thresh=0.5,
            detections_per_img=spec.detections,
            **mask_layers(spec, features),
        )

    def output_modules(self) -> list[nn.Module]:
        return [self.box_predictor]

    def forward(
        self, features: Maps, proposals: list[Tensor], image_shapes: Sizes, targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        assert targets is not None
        proposals, owners, labels, wanted = self.select_training_samples(proposals, targets)
        logits, offsets = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, image_shapes)))
        class_loss, box_loss = fastrcnn_loss(logits, offsets, labels, wanted)
        losses = {"loss_classifier": class_loss, "loss_box_reg": box_loss}
        if self.has_mask():
            regions, matched = select_positives(proposals, owners, labels)
            crops = self.mask_roi_pool(features, regions, image_shapes)  # type: ignore[misc]
            masks = self.mask_predictor(self.mask_head(crops))  # type: ignore[misc]
            losses["loss_mask"] = mask_loss(masks, regions, matched, targets)
        return [], losses


def build_head(spec: DetectorSpec, features: FeaturePyramid) -> DetectorHead:
    head = DETECTOR_HEADS[spec.head]
    return (pkgutil.resolve_name(head) if isinstance(head, str) else head)(spec, features)
