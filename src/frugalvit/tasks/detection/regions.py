"""torchvision's RoI heads with our mask targets, and what training heads do with regions, image by image."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.ops import box_iou

from frugalvit.tasks.detection.masks import mask_loss, select_masked

Targets = Sequence[dict[str, Tensor]]


class MaskedRoIHeads(RoIHeads):
    """torchvision's box and mask heads; torchvision's own mask targets are off by half a pixel (masks.py)."""

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        assert targets is not None
        proposals, owners, labels, wanted = self.select_training_samples(proposals, targets)
        logits, offsets = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, image_shapes)))
        class_loss, box_loss = fastrcnn_loss(logits, offsets, labels, wanted)
        losses = {"loss_classifier": class_loss, "loss_box_reg": box_loss}
        if self.has_mask():
            regions, masked_owners = select_masked(*select_positives(proposals, owners, labels), targets)
            crops = self.mask_roi_pool(features, regions, image_shapes)  # type: ignore[misc]
            masks = self.mask_predictor(self.mask_head(crops))  # type: ignore[misc]
            losses["loss_mask"] = mask_loss(masks, regions, masked_owners, targets)
        return [], losses


def add_objects(regions: Sequence[Tensor], targets: Targets) -> list[Tensor]:
    """Add the true boxes to the regions, so that the heads see objects from the first step."""
    return [torch.cat([part, target["boxes"].to(part)]) for part, target in zip(regions, targets, strict=True)]


def match_regions(regions: Sequence[Tensor], targets: Targets, matcher: Matcher) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each region the index of the object it overlaps most, and its class (0: background, -1: neither)."""
    owners, labels = [], []
    for part, target in zip(regions, targets, strict=True):
        if not len(target["labels"]) or not len(part):
            background = torch.zeros(len(part), dtype=torch.int64, device=part.device)
            owners.append(background)
            labels.append(background)
            continue
        matched = matcher(box_iou(target["boxes"].float(), part))
        owners.append(matched.clamp(min=0))
        label = torch.where(matched >= 0, target["labels"][owners[-1]], 0)
        labels.append(torch.where(matched == Matcher.BETWEEN_THRESHOLDS, -1, label))
    return owners, labels


def select_positives(
    regions: Sequence[Tensor], owners: Sequence[Tensor], labels: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sampled regions that match an object, and the index of that object."""
    positives = [torch.where(part > 0)[0] for part in labels]
    return take(regions, positives), take(owners, positives)


def gather_boxes(owners: Sequence[Tensor], targets: Targets) -> list[Tensor]:
    """Return the boxes of the regions' objects; zeros in images without objects."""
    boxes = [target["boxes"].float() for target in targets]
    return [
        part[owner] if len(part) else part.new_zeros(len(owner), 4) for part, owner in zip(boxes, owners, strict=True)
    ]


def take(parts: Sequence[Tensor], indices: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of each image's part with these indices."""
    return [part[index] for part, index in zip(parts, indices, strict=True)]
