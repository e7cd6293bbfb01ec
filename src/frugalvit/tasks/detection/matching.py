"""Match proposed regions with true boxes, image by image, to train a detector head."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

Targets = Sequence[dict[str, Tensor]]


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
