"""Layers that all detector heads share: sizes, anchors, and predictors with float32 results.

Scores and offsets become float32 before boxes are computed: bfloat16 resolves a position in a large image to four
pixels only.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from frugalvit.tasks.dense.pyramid import FeaturePyramid

M = TypeVar("M", bound=nn.Module)

Target = dict[str, Tensor]
"""boxes (n, 4) as left, top, right, bottom; labels (n,), 1 is the first class; masks (n, H, W) if they are learned."""

Maps = dict[str, Tensor]  # maps of the pyramid by level, (B, C, h, w)
Sizes = list[tuple[int, int]]  # (height, width) of each image in the padded input
MIN_SCORE = 0.05  # detections with a lower score are dropped; COCO's scores are usually computed with this number


@dataclass(frozen=True)
class DetectorSpec:
    """All sizes of a detector: enough to build it again."""

    classes: int  # without the background
    head: str = "mask-rcnn"
    masks: bool = True
    channels: int = 256
    hidden: int = 1024
    anchors: float = 8.0  # smallest anchor of a level, in its strides
    proposals: int = 1000
    samples: int = 512
    detections: int = 100
    octaves: int = 1  # anchor sizes per level, each twice the one before

    def anchor_sizes(self, stride: float) -> tuple[float, ...]:
        """Return the sides of the square anchors of a level, in pixels."""
        return tuple(self.anchors * stride * 2**octave for octave in range(self.octaves))


class FloatAnchors(AnchorGenerator):
    """torchvision's anchors in float32, for maps of any precision. All images share one tensor.

    Anchors are a stride apart. torchvision divides the image by the number of cells instead, which is wrong if the last
    cell extends past the edge, as with patches of 12 or 14 pixels.
    """

    def __init__(self, sizes: tuple[tuple[float, ...], ...], strides: list[float]) -> None:
        super().__init__(sizes, ((0.5, 1.0, 2.0),) * len(sizes))  # pyright: ignore[reportArgumentType]
        self.strides = strides

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        steps = [[torch.full((), stride, device=device)] * 2 for stride in self.strides]  # no copy to the device
        anchors = self.grid_anchors([list(grid.shape[-2:]) for grid in feature_maps], steps)
        return [torch.cat(anchors)] * len(image_list.image_sizes)


def float_outputs(module: M) -> M:
    """Make a module return float32; its outputs are tensors or lists of them."""

    def convert(outputs: Any) -> Any:
        return outputs.float() if isinstance(outputs, Tensor) else [convert(part) for part in outputs]

    module.register_forward_hook(lambda module, inputs, outputs: convert(outputs))
    return module


def roi_align(spec: DetectorSpec, features: FeaturePyramid, side: int) -> MultiScaleRoIAlign:
    """Crop ``side`` × ``side`` cells of each region from the level that fits it.

    Regions of 224 px are on stride 16 with anchors of 8 strides. The finest level takes regions of up to 3.5 times its
    anchors, and always those of up to seven cells: with several anchor sizes per level the smallest may be only a cell
    or two. torchvision would measure the scales at the first batch and round them to powers of two.
    """
    size = round(28 * (spec.anchors if spec.octaves == 1 else max(2.0, spec.anchors)))
    crops = MultiScaleRoIAlign(features.names, side, sampling_ratio=2, canonical_scale=size)
    strides = features.strides[: len(features.names)]
    crops.scales = [1 / stride for stride in strides]
    finest, coarsest = (round(math.log2(stride)) for stride in (strides[0], strides[-1]))
    crops.map_levels = initLevelMapper(finest, coarsest, canonical_scale=size, canonical_level=4)
    return crops


def mask_layers(spec: DetectorSpec, features: FeaturePyramid) -> dict[str, nn.Module]:
    """Return He et al.'s mask head: four convolutions on 14 × 14 cells, upsampled to 28 × 28."""
    if not spec.masks:
        return {}
    return {
        "mask_roi_pool": roi_align(spec, features, 14),
        "mask_head": MaskRCNNHeads(spec.channels, (spec.channels,) * 4, 1),
        "mask_predictor": float_outputs(MaskRCNNPredictor(spec.channels, spec.channels, spec.classes + 1)),
    }
