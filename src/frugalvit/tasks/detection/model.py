"""Two-stage detectors on any backbone: feature pyramid, region proposals, and a head by name.

Images arrive resized and normalized (dataset.py).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

from frugalvit.tasks.dense.pyramid import FeaturePyramid, Pyramid
from frugalvit.tasks.detection.heads import build_head
from frugalvit.tasks.detection.layers import MIN_SCORE, DetectorSpec, FloatAnchors, Target, float_outputs
from frugalvit.tasks.detection.masks import paste_masks


class Detector(nn.Module):
    """Faster R-CNN with the head that ``spec.head`` names: Mask R-CNN or Cascade Mask R-CNN.

    forward(images, sizes, targets) -> losses by name (training), or detections in the coordinates of ``images``.
    """

    def __init__(self, pyramid: Pyramid, spec: DetectorSpec) -> None:
        super().__init__()
        self.spec = spec
        self.features = FeaturePyramid(pyramid, spec.channels)
        sizes = tuple(spec.anchor_sizes(stride) for stride in self.features.strides)
        anchors = FloatAnchors(sizes, self.features.strides)
        self.rpn = RegionProposalNetwork(
            anchors,
            float_outputs(RPNHead(spec.channels, anchors.num_anchors_per_location()[0])),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * spec.proposals, "testing": spec.proposals},
            post_nms_top_n={"training": spec.proposals, "testing": spec.proposals},
            nms_thresh=0.7,
        )
        self.heads = build_head(spec, self.features)

    @property
    def pyramid(self) -> Pyramid:
        return self.features.pyramid

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]], targets: list[Target] | None = None) -> Any:
        features = self.features(images)
        listed = ImageList(images, list(sizes))
        proposals, proposal_losses = self.rpn(listed, features, targets)
        detections, losses = self.heads(features, proposals, list(sizes), targets)
        return losses | proposal_losses if self.training else detections

    def set_score_threshold(self, score: float) -> None:
        """Lower the score threshold of predictions; it is never above ``MIN_SCORE``."""
        self.heads.score_thresh = min(score, MIN_SCORE)

    def output_modules(self) -> list[nn.Module]:
        return [self.rpn.head, *self.heads.output_modules()]

    @torch.inference_mode()
    def detect(
        self,
        images: Tensor,
        sizes: Sequence[tuple[int, int]],
        original: Sequence[tuple[int, int]],
        min_score: float = 0.0,
    ) -> Iterator[Target]:
        """Yield the objects of every image in its original size: boxes, labels, scores, bool masks (n, H, W).

        min_score: drop objects with a lower score before their masks are pasted, image by image: at full size 100 masks
            of a 12-megapixel photograph take 1.2 GB.
        """
        detections = self.forward(images, sizes)
        for objects, size, (height, width) in zip(detections, sizes, original, strict=True):
            # Compared as Python floats: 0.7 in float32 is below Python's 0.7, and not every device has doubles.
            keep = torch.tensor([score >= min_score for score in objects["scores"].tolist()], dtype=torch.bool)
            result = {name: values[keep.to(values.device)] for name, values in objects.items()}
            scale = torch.tensor([width / size[1], height / size[0]] * 2, device=result["boxes"].device)
            result["boxes"] = result["boxes"] * scale
            if "masks" in result:
                result["masks"] = paste_masks(result["masks"], result["boxes"], (height, width))
            yield result
