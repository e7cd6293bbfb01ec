"""torchvision's region proposals and RoI heads, for all images of a batch at once.

torchvision works image by image, with about sixty small operations and a dozen synchronizations each: at 16 images the
host takes longer to launch them than the GPU to run them. Here images are padded and stacked. Results and random
numbers equal torchvision's bit for bit on a CPU (the tests compare both), except for the mask targets: torchvision's
are off by half a pixel (masks.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import batched_nms, nms

from frugalvit.tasks.detection.masks import mask_loss, select_masked

_MAX_OVERLAPS = {"cuda": 2**24}
"""Overlaps of objects with anchors in memory at once. A CPU gains nothing from stacked images: one at a time."""

_MAX_JOINT_NMS = {"cpu": 4_000}
"""Up to this many coordinates (100,000 on a GPU) torchvision offsets the levels and runs one NMS over all of them."""


class BatchedRPN(RegionProposalNetwork):
    """torchvision's region proposal network."""

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return labels (1 object, 0 background, -1 between) and target boxes. All images have the same anchors."""
        most = max(1, *(len(target["labels"]) for target in targets))
        limit = _MAX_OVERLAPS.get(anchors[0].device.type, 1)
        group = max(1, limit // (most * len(anchors[0]) or 1))
        labels, target_boxes = [], []
        for start in range(0, len(targets), group):
            boxes, classes = pad_objects(targets[start : start + group])
            owners = match(boxes, classes > 0, anchors[0][None], self.proposal_matcher)
            between = owners == Matcher.BETWEEN_THRESHOLDS
            labels += torch.where(between, -1.0, (owners >= 0).float())
            target_boxes += gather_rows(boxes, owners.clamp(min=0))
        return labels, target_boxes

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keep the best proposals of every level, clipped to the image, after NMS."""
        objectness = objectness.detach().reshape(len(proposals), -1)
        levels = torch.cat(
            [
                torch.full((count,), level, dtype=torch.int64, device=proposals.device)
                for level, count in enumerate(num_anchors_per_level)
            ]
        )
        best = self._get_top_n_idx(objectness, num_anchors_per_level)
        scores = torch.sigmoid(objectness.gather(1, best))
        boxes = clip(gather_rows(proposals, best), image_shapes)
        keep = has_min_side(boxes, self.min_size) & (scores >= self.score_thresh)
        counts = keep.sum(1).tolist()
        index = torch.where(keep.flatten())[0]
        level = levels[best]
        values = (boxes, offset_by_level(boxes, level, keep), scores[..., None], level[..., None])
        parts = [value.flatten(0, 1)[index].split(counts) for value in values]
        limit = _MAX_JOINT_NMS.get(proposals.device.type, 100_000)
        all_boxes, all_scores = [], []
        for box, spread, score, group in zip(*parts, strict=True):
            if box.numel() > limit:
                chosen = batched_nms(box, score[:, 0], group[:, 0], self.nms_thresh)
            else:
                chosen = nms(spread, score[:, 0], self.nms_thresh)
            chosen = chosen[: self.post_nms_top_n()]
            all_boxes.append(box[chosen])
            all_scores.append(score[chosen, 0])
        return all_boxes, all_scores

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        label = torch.stack(labels)
        positive, negative, _ = sample(label, self.fg_bg_sampler)
        chosen = torch.cat([positive, negative])
        wanted = torch.cat(list(regression_targets))[positive]
        box_loss = F.smooth_l1_loss(pred_bbox_deltas[positive], wanted, beta=1 / 9, reduction="sum") / len(chosen)
        score_loss = F.binary_cross_entropy_with_logits(objectness.flatten()[chosen], label.flatten()[chosen])
        return score_loss, box_loss


class BatchedRoIHeads(RoIHeads):
    """torchvision's box and mask heads."""

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
        proposals = add_objects(proposals, targets)
        objects = pad_objects(targets)
        owners, labels = match_regions(proposals, objects, self.proposal_matcher)
        proposals, owners, labels, positives = sample_regions(proposals, owners, labels, self.fg_bg_sampler)
        logits, offsets = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, image_shapes)))
        wanted = self.box_coder.encode(gather_boxes(owners, objects), proposals)
        class_loss, box_loss = fastrcnn_loss(logits, offsets, labels, wanted)
        losses = {"loss_classifier": class_loss, "loss_box_reg": box_loss}
        if self.has_mask():
            regions, masked_owners = select_masked(*select_positives(proposals, owners, labels, positives), targets)
            crops = self.mask_roi_pool(features, regions, image_shapes)  # type: ignore[misc]
            masks = self.mask_predictor(self.mask_head(crops))  # type: ignore[misc]
            losses["loss_mask"] = mask_loss(masks, regions, masked_owners, targets)
        return [], losses


# -- shared with the cascade


def pad_objects(targets: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack all objects: boxes (B, n, 4) and labels (B, n), padded with zeros; n is at least 1."""
    boxes = pad_sequence([target["boxes"].float() for target in targets], batch_first=True)
    labels = pad_sequence([target["labels"] for target in targets], batch_first=True)
    if not boxes.shape[1]:
        return boxes.new_zeros((len(boxes), 1, 4)), labels.new_zeros((len(boxes), 1))
    return boxes, labels


def overlaps(boxes: Tensor, regions: Tensor) -> Tensor:
    """Return the IoU (B, n, R) of boxes (B, n, 4) with regions (B, R, 4) or (1, R, 4)."""
    areas = [(part[..., 2] - part[..., 0]) * (part[..., 3] - part[..., 1]) for part in (boxes, regions)]
    first, second = boxes[:, :, None], regions[:, None]
    width, height = (
        (
            torch.minimum(first[..., axis + 2], second[..., axis + 2])
            - torch.maximum(first[..., axis], second[..., axis])
        )
        for axis in (0, 1)
    )
    shared = width.clamp(min=0) * height.clamp(min=0)
    return shared / (areas[0][:, :, None] + areas[1][:, None] - shared)


def match(boxes: Tensor, known: Tensor, regions: Tensor, matcher: Matcher) -> Tensor:
    """Return the index of the object each region overlaps most, or the matcher's negative code: (B, R).

    boxes (B, n, 4) with ``known`` (B, n): True for objects, False for padding.
    """
    shared = overlaps(boxes, regions).masked_fill(~known[:, :, None], -1.0)
    most, nearest = shared.max(1)
    matched = torch.where(most < matcher.high_threshold, Matcher.BETWEEN_THRESHOLDS, nearest)
    matched = torch.where(most < matcher.low_threshold, Matcher.BELOW_LOW_THRESHOLD, matched)
    if matcher.allow_low_quality_matches:  # an object also gets the regions that overlap it most
        closest = (shared == shared.amax(2, keepdim=True)) & known[:, :, None]
        matched = torch.where(closest.any(1), nearest, matched)
    return matched


def sample(labels: Tensor, sampler: BalancedPositiveNegativeSampler) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Sample a fixed number of regions per image with a limited share of positives, without label -1.

    labels (B, R) -> sorted indices into ``labels.flatten()`` of the sampled positives and negatives, and the number of
    both per image.
    """
    sides = (labels >= 1, labels == 0)
    per_image = torch.stack([side.sum(1) for side in sides], 1).tolist()
    most = int(sampler.batch_size_per_image * sampler.positive_fraction)
    sampled: tuple[list[Tensor], list[Tensor]] = ([], [])
    start, counts = [0, 0], []
    for positive, negative in per_image:
        wanted = min(positive, most)
        counts.append((wanted, min(negative, sampler.batch_size_per_image - wanted)))
        for side in (0, 1):
            order = torch.randperm((positive, negative)[side], device=labels.device)
            sampled[side].append(order[: counts[-1][side]] + start[side])
            start[side] += (positive, negative)[side]
    indices = [torch.where(side.flatten())[0][torch.cat(part)] for side, part in zip(sides, sampled, strict=True)]
    return indices[0].sort().values, indices[1].sort().values, counts


def match_regions(
    regions: Sequence[Tensor], objects: tuple[Tensor, Tensor], matcher: Matcher
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each region the index of the object it overlaps most, and its class (0: background)."""
    boxes, classes = objects
    owners = match(boxes, classes > 0, pad_sequence(list(regions), batch_first=True), matcher)
    nearest = owners.clamp(min=0)
    labels = torch.where(owners >= 0, classes.gather(1, nearest), 0)
    labels = torch.where(owners == Matcher.BETWEEN_THRESHOLDS, -1, labels)
    counts = [len(part) for part in regions]
    return unpad(nearest, counts), unpad(labels, counts)


def sample_regions(
    regions: Sequence[Tensor], owners: Sequence[Tensor], labels: Sequence[Tensor], sampler: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """Sample regions of every image, in their order; also return the number of positives per image."""
    padded = pad_sequence(list(labels), batch_first=True, padding_value=-1)
    positive, negative, counts = sample(padded, sampler)
    indices = torch.cat([positive, negative]).sort().values
    sizes = [sum(pair) for pair in counts]
    parts = (pad_sequence(list(regions), batch_first=True), pad_sequence(list(owners), batch_first=True), padded)
    chosen = [list(part.flatten(0, 1)[indices].split(sizes)) for part in parts]
    return chosen[0], chosen[1], chosen[2], [pair[0] for pair in counts]


def select_positives(
    regions: Sequence[Tensor], owners: Sequence[Tensor], labels: Sequence[Tensor], positives: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sampled regions that match an object, and the index of that object."""
    indices = torch.where(torch.cat(list(labels)) > 0)[0]
    return tuple(list(torch.cat(list(part))[indices].split(positives)) for part in (regions, owners))  # type: ignore[return-value]


def gather_boxes(owners: Sequence[Tensor], objects: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the boxes of the regions' objects; zeros in images without objects."""
    target_boxes = gather_rows(objects[0], pad_sequence(list(owners), batch_first=True))
    return unpad(target_boxes, [len(part) for part in owners])


def add_objects(regions: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Add the true boxes to the regions, so that the heads see objects from the first step."""
    return [torch.cat([part, target["boxes"].to(part)]) for part, target in zip(regions, targets, strict=True)]


def clip(boxes: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Clip boxes (B, R, 4) to their images."""
    limits = torch.tensor([(width, height, width, height) for height, width in sizes], dtype=boxes.dtype)
    if boxes.device.type == "cuda":
        limits = limits.pin_memory()
    return torch.minimum(boxes.clamp(min=0), limits.to(boxes.device, non_blocking=True)[:, None])


def has_min_side(boxes: Tensor, least: float) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0] >= least) & (boxes[..., 3] - boxes[..., 1] >= least)


def offset_by_level(boxes: Tensor, levels: Tensor, keep: Tensor) -> Tensor:
    """Offset boxes (B, R, 4) so that different levels never overlap, as ``batched_nms`` does."""
    largest = boxes.masked_fill(~keep[..., None], -torch.inf).amax((1, 2))
    return boxes + (levels.to(boxes) * (largest + 1)[:, None])[..., None]


def drop_empty(boxes: Sequence[Tensor], least: float = 1e-2) -> list[Tensor]:
    """Drop the boxes of every image that are a line or a point."""
    joined = torch.cat(list(boxes))
    keep = has_min_side(joined, least)
    counts = torch.stack([part.sum() for part in keep.split([len(part) for part in boxes])]).tolist()
    return list(joined[keep].split(counts))


def gather_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Gather rows: values (B, n, 4), indices (B, R) -> (B, R, 4)."""
    return values.gather(1, indices[..., None].expand(-1, -1, values.shape[2]))


def unpad(padded: Tensor, counts: Sequence[int]) -> list[Tensor]:
    return [part[:count] for part, count in zip(padded, counts, strict=True)]
