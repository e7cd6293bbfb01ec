"""Mask R-CNN (He et al. 2017) on any of our pyramids, from torchvision's parts.

Images arrive resized and normalised (see detect_data.py), so what is left of torchvision's model is the pyramid, the
region proposals and the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.image_list import ImageList

from frugalvit.tasks.dense.pyramid import FeaturePyramid, Pyramid
from frugalvit.tasks.detection.cascade import CascadeHeads
from frugalvit.tasks.detection.layers import (
    LEAST_SCORE,
    DetectorSpec,
    FloatAnchors,
    FloatPredictor,
    FloatProposals,
    Target,
    mask_parts,
    roi_align,
)
from frugalvit.tasks.detection.masks import paste_masks
from frugalvit.tasks.detection.rpn_roi import Heads, Proposals


class Detector(nn.Module):
    """Losses while training, objects otherwise.

    forward(images, sizes, targets) -> losses by name (training), or detections in the coordinates of ``images``.
    """

    def __init__(self, pyramid: Pyramid, spec: DetectorSpec) -> None:
        super().__init__()
        self.spec = spec
        self.features = FeaturePyramid(pyramid, spec.channels)
        sizes = tuple(spec.anchor_sizes(stride) for stride in self.features.strides)
        anchors = FloatAnchors(sizes, self.features.strides)
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
            self.heads: CascadeHeads | Heads = CascadeHeads(spec, self.features)
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
                score_thresh=LEAST_SCORE,
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

    def set_score_threshold(self, score: float) -> None:
        """Let objects through that are as uncertain as this, where that is less than what scores count from."""
        self.heads.score_thresh = min(score, LEAST_SCORE)

    @torch.inference_mode()
    def detect(
        self,
        images: Tensor,
        sizes: Sequence[tuple[int, int]],
        original: Sequence[tuple[int, int]],
        least: float = 0.0,
    ) -> Iterator[Target]:
        """Objects of every image in its original size: boxes, labels, scores, and masks (n, H, W) as bool.

        least: the score that an object must have. A mask is drawn only for those, and image after image: at full size a
            hundred of them take 1.2 GB of a photograph of 12 megapixels.
        """
        found = self.forward(images, sizes)
        for objects, size, (height, width) in zip(found, sizes, original, strict=True):
            # As Python compares: in float32 0.7 is less than 0.7, and not every device has doubles.
            sure = torch.tensor([score >= least for score in objects["scores"].tolist()], dtype=torch.bool)
            kept = {name: values[sure.to(values.device)] for name, values in objects.items()}
            scale = torch.tensor([width / size[1], height / size[0]] * 2, device=kept["boxes"].device)
            kept["boxes"] = kept["boxes"] * scale
            if "masks" in kept:
                kept["masks"] = paste_masks(kept["masks"], kept["boxes"], (height, width))
            yield kept
