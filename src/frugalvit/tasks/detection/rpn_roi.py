"""torchvision's region proposals and heads for all images of a batch at once.

torchvision goes from image to image, with some sixty small operations and a dozen looks at the device for each; at 16
images the host takes longer to ask for them than the device to do them. Here the images lie side by side, padded. The
results are torchvision's, bit for bit on a CPU, and so are the random numbers that are drawn (the tests compare both);
but for the masks that are learnt, which lie half a pixel off there (masks.py).
"""

from __future__ import annotations

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

from frugalvit.tasks.detection.masks import mask_loss, on_masks

_MOST_OVERLAPS = {"cuda": 2**24}
"""Overlaps of objects with anchors held at once. A CPU gains nothing from images side by side: one at a time."""

_MOST_APART = {"cpu": 4_000}
"""Up to so many numbers (100,000 on a GPU) torchvision moves the levels apart and suppresses all of them at once."""


class Proposals(RegionProposalNetwork):
    """torchvision's region proposals."""

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """1 for anchors on an object, 0 for those on none, -1 between; and the object's box. All images' anchors are
        the same."""
        most = max(1, *(len(target["labels"]) for target in targets))
        limit = _MOST_OVERLAPS.get(anchors[0].device.type, 1)
        group = max(1, limit // (most * len(anchors[0]) or 1))
        labels, goals = [], []
        for start in range(0, len(targets), group):
            boxes, classes = pad_objects(targets[start : start + group])
            owners = match(boxes, classes > 0, anchors[0][None], self.proposal_matcher)
            between = owners == Matcher.BETWEEN_THRESHOLDS
            labels += torch.where(between, -1.0, (owners >= 0).float())
            goals += take(boxes, owners.clamp(min=0))
        return labels, goals

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best of every level, inside the image, without those that overlap a better one."""
        objectness = objectness.detach().reshape(len(proposals), -1)
        levels = torch.cat(
            [
                torch.full((count,), level, dtype=torch.int64, device=proposals.device)
                for level, count in enumerate(num_anchors_per_level)
            ]
        )
        best = self._get_top_n_idx(objectness, num_anchors_per_level)
        scores = torch.sigmoid(objectness.gather(1, best))
        boxes = clip(take(proposals, best), image_shapes)
        keep = not_small(boxes, self.min_size) & (scores >= self.score_thresh)
        counts = keep.sum(1).tolist()
        place = torch.where(keep.flatten())[0]
        level = levels[best]
        values = (boxes, apart(boxes, level, keep), scores[..., None], level[..., None])
        parts = [value.flatten(0, 1)[place].split(counts) for value in values]
        limit = _MOST_APART.get(proposals.device.type, 100_000)
        kept_boxes, kept_scores = [], []
        for box, spread, score, group in zip(*parts, strict=True):
            if box.numel() > limit:
                chosen = batched_nms(box, score[:, 0], group[:, 0], self.nms_thresh)
            else:
                chosen = nms(spread, score[:, 0], self.nms_thresh)
            chosen = chosen[: self.post_nms_top_n()]
            kept_boxes.append(box[chosen])
            kept_scores.append(score[chosen, 0])
        return kept_boxes, kept_scores

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


class Heads(RoIHeads):
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
        proposals = with_objects(proposals, targets)
        objects = pad_objects(targets)
        owners, labels = own(proposals, objects, self.proposal_matcher)
        proposals, owners, labels, positives = choose(proposals, owners, labels, self.fg_bg_sampler)
        logits, offsets = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, image_shapes)))
        wanted = self.box_coder.encode(goals_of(owners, objects), proposals)
        class_loss, box_loss = fastrcnn_loss(logits, offsets, labels, wanted)
        losses = {"loss_classifier": class_loss, "loss_box_reg": box_loss}
        if self.has_mask():
            regions, shown = on_masks(*on_objects(proposals, owners, labels, positives), targets)
            crops = self.mask_roi_pool(features, regions, image_shapes)  # type: ignore[misc]
            masks = self.mask_predictor(self.mask_head(crops))  # type: ignore[misc]
            losses["loss_mask"] = mask_loss(masks, regions, shown, targets)
        return [], losses


# -- the parts, which the cascade uses too


def pad_objects(targets: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Boxes (B, n, 4) and labels (B, n) of all objects, zeros where an image has fewer; at least one place."""
    boxes = pad_sequence([target["boxes"].float() for target in targets], batch_first=True)
    labels = pad_sequence([target["labels"] for target in targets], batch_first=True)
    if not boxes.shape[1]:
        return boxes.new_zeros((len(boxes), 1, 4)), labels.new_zeros((len(boxes), 1))
    return boxes, labels


def overlaps(boxes: Tensor, regions: Tensor) -> Tensor:
    """Intersection over union of (B, n, 4) with (B, R, 4) or (1, R, 4): (B, n, R)."""
    areas = [(part[..., 2] - part[..., 0]) * (part[..., 3] - part[..., 1]) for part in (boxes, regions)]
    ours, theirs = boxes[:, :, None], regions[:, None]
    width, height = (
        (torch.minimum(ours[..., axis + 2], theirs[..., axis + 2]) - torch.maximum(ours[..., axis], theirs[..., axis]))
        for axis in (0, 1)
    )
    shared = width.clamp(min=0) * height.clamp(min=0)
    return shared / (areas[0][:, :, None] + areas[1][:, None] - shared)


def match(boxes: Tensor, known: Tensor, regions: Tensor, matcher: Matcher) -> Tensor:
    """For every region the object it overlaps most, or the matcher's word for too little: (B, R).

    boxes (B, n, 4), of which the ``known`` (B, n) are objects and the others padding.
    """
    shared = overlaps(boxes, regions).masked_fill(~known[:, :, None], -1.0)
    most, nearest = shared.max(1)
    found = torch.where(most < matcher.high_threshold, Matcher.BETWEEN_THRESHOLDS, nearest)
    found = torch.where(most < matcher.low_threshold, Matcher.BELOW_LOW_THRESHOLD, found)
    if matcher.allow_low_quality_matches:  # the regions an object overlaps most are its own, however little that is
        closest = (shared == shared.amax(2, keepdim=True)) & known[:, :, None]
        found = torch.where(closest.any(1), nearest, found)
    return found


def sample(labels: Tensor, sampler: BalancedPositiveNegativeSampler) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """A fixed number of regions an image, of which a share at most is positive; -1 is left out.

    labels (B, R) -> the places in ``labels.flatten()`` of the chosen positive and negative ones, in ascending order,
    and how many of both each image has.
    """
    sides = (labels >= 1, labels == 0)
    there = torch.stack([side.sum(1) for side in sides], 1).tolist()
    most = int(sampler.batch_size_per_image * sampler.positive_fraction)
    picked: tuple[list[Tensor], list[Tensor]] = ([], [])
    begin, counts = [0, 0], []
    for positive, negative in there:
        wanted = min(positive, most)
        counts.append((wanted, min(negative, sampler.batch_size_per_image - wanted)))
        for side in (0, 1):
            order = torch.randperm((positive, negative)[side], device=labels.device)
            picked[side].append(order[: counts[-1][side]] + begin[side])
            begin[side] += (positive, negative)[side]
    places = [torch.where(side.flatten())[0][torch.cat(part)] for side, part in zip(sides, picked, strict=True)]
    return places[0].sort().values, places[1].sort().values, counts


def own(
    regions: Sequence[Tensor], objects: tuple[Tensor, Tensor], matcher: Matcher
) -> tuple[list[Tensor], list[Tensor]]:
    """For every region the object it overlaps most, and that object's class, 0 where it overlaps too little."""
    boxes, classes = objects
    owners = match(boxes, classes > 0, pad_sequence(list(regions), batch_first=True), matcher)
    nearest = owners.clamp(min=0)
    labels = torch.where(owners >= 0, classes.gather(1, nearest), 0)
    labels = torch.where(owners == Matcher.BETWEEN_THRESHOLDS, -1, labels)
    counts = [len(part) for part in regions]
    return cut(nearest, counts), cut(labels, counts)


def choose(
    regions: Sequence[Tensor], owners: Sequence[Tensor], labels: Sequence[Tensor], sampler: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """The sampled regions of every image in their order, and how many of them are on an object."""
    padded = pad_sequence(list(labels), batch_first=True, padding_value=-1)
    positive, negative, counts = sample(padded, sampler)
    places = torch.cat([positive, negative]).sort().values
    sizes = [sum(pair) for pair in counts]
    parts = (pad_sequence(list(regions), batch_first=True), pad_sequence(list(owners), batch_first=True), padded)
    chosen = [list(part.flatten(0, 1)[places].split(sizes)) for part in parts]
    return chosen[0], chosen[1], chosen[2], [pair[0] for pair in counts]


def on_objects(
    regions: Sequence[Tensor], owners: Sequence[Tensor], labels: Sequence[Tensor], positives: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Those of the sampled regions that are on an object, and which it is."""
    places = torch.where(torch.cat(list(labels)) > 0)[0]
    return tuple(list(torch.cat(list(part))[places].split(positives)) for part in (regions, owners))  # type: ignore[return-value]


def goals_of(owners: Sequence[Tensor], objects: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The boxes of the regions' objects; zeros in images without."""
    goals = take(objects[0], pad_sequence(list(owners), batch_first=True))
    return cut(goals, [len(part) for part in owners])


def with_objects(regions: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """The objects themselves are among the regions, so that the heads have something to learn from at the start."""
    return [torch.cat([found, target["boxes"].to(found)]) for found, target in zip(regions, targets, strict=True)]


def clip(boxes: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Boxes (B, R, 4) inside their images."""
    limits = torch.tensor([(width, height, width, height) for height, width in sizes], dtype=boxes.dtype)
    if boxes.device.type == "cuda":
        limits = limits.pin_memory()
    return torch.minimum(boxes.clamp(min=0), limits.to(boxes.device, non_blocking=True)[:, None])


def not_small(boxes: Tensor, least: float) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0] >= least) & (boxes[..., 3] - boxes[..., 1] >= least)


def apart(boxes: Tensor, levels: Tensor, keep: Tensor) -> Tensor:
    """Boxes (B, R, 4) moved so far that different levels do not meet, as ``batched_nms`` moves the kept ones."""
    largest = boxes.masked_fill(~keep[..., None], -torch.inf).amax((1, 2))
    return boxes + (levels.to(boxes) * (largest + 1)[:, None])[..., None]


def not_empty(boxes: Sequence[Tensor], least: float = 1e-2) -> list[Tensor]:
    """Every image's boxes without those that are a line or a point."""
    whole = torch.cat(list(boxes))
    keep = not_small(whole, least)
    counts = torch.stack([part.sum() for part in keep.split([len(part) for part in boxes])]).tolist()
    return list(whole[keep].split(counts))


def take(values: Tensor, places: Tensor) -> Tensor:
    """values (B, n, 4), places (B, R) -> (B, R, 4)."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[2]))


def cut(padded: Tensor, counts: Sequence[int]) -> list[Tensor]:
    return [part[:count] for part, count in zip(padded, counts, strict=True)]
