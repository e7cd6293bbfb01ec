"""The second stage of Mask R-CNN (He et al. 2017): one box head and one mask head."""

from torch import nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead

from frugalvit.tasks.dense.pyramid import FeaturePyramid
from frugalvit.tasks.detection.heads import DetectorHead
from frugalvit.tasks.detection.layers import MIN_SCORE, DetectorSpec, FloatPredictor, mask_layers, roi_align
from frugalvit.tasks.detection.rpn_roi import BatchedRoIHeads


class MaskRCNNHead(BatchedRoIHeads, DetectorHead):
    """torchvision's box and mask heads with the paper's settings."""

    def __init__(self, spec: DetectorSpec, features: FeaturePyramid) -> None:
        super().__init__(
            roi_align(spec, features, 7),
            TwoMLPHead(spec.channels * 49, spec.hidden),
            FloatPredictor(spec.hidden, spec.classes + 1),
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
