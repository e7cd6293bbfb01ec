"""Batched RPN and RoI heads equal torchvision's bit for bit, random numbers included."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import roi_heads
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, concat_box_prediction_layers
from torchvision.ops import box_iou, clip_boxes_to_image, remove_small_boxes, roi_align

from frugalvit.tasks.detection import rpn_roi
from frugalvit.tasks.detection.model import Detector
from helpers.dense_models import detector

OBJECTS = [(3, 0, 7), (0, 0, 0), (1,), (0, 2), (12, 1, 1, 4)]
SIZES = [(64, 64), (48, 64), (64, 40), (33, 64), (64, 64)]


def some_targets(counts: tuple[int, ...], seed: int = 0) -> list[dict[str, Tensor]]:
    """Images with ``counts`` objects: boxes of all sizes, one very small, two equal."""
    random = torch.Generator().manual_seed(seed)
    targets = []
    for number, count in enumerate(counts):
        height, width = SIZES[number]
        low = torch.rand(count, 2, generator=random) * torch.tensor([width, height]) * 0.7
        side = 0.5 + torch.rand(count, 2, generator=random) ** 2 * torch.tensor([width, height]) * 0.5
        boxes = torch.cat([low, torch.minimum(low + side, torch.tensor([width, height]))], 1)
        if count > 2:
            boxes[1] = boxes[0]
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
            mask[top : bottom + 1, left : right + 1] = 1
        labels = torch.randint(1, 4, (count,), generator=random)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})
    return targets


def some_regions(counts: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    """Regions near the objects and elsewhere, a different number per image."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for number, target in enumerate(some_targets(counts)):
        near = target["boxes"].repeat(6, 1)
        near = near + 4 * torch.randn(near.shape, generator=random) * torch.rand(len(near), 1, generator=random)
        corners = torch.rand(20 + 3 * number, 4, generator=random) * 60
        far = torch.cat([torch.minimum(corners[:, :2], corners[:, 2:]), corners.view(-1, 2, 2).amax(1) + 1], 1)
        boxes = clip_boxes_to_image(torch.cat([near, far]), SIZES[number])
        found.append(boxes[remove_small_boxes(boxes, 1e-2)])
    return found


def both(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any]:
    """Call both with the same random state, and check that the states agree afterwards."""
    found = []
    for call in (ours, theirs):
        torch.manual_seed(7)
        result = call()
        found.append((result, torch.rand(())))
    assert torch.equal(found[0][1], found[1][1])
    return found[0][0], found[1][0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def proposals_of(net: Detector, images: int) -> tuple[Any, ...]:
    """The inputs of region proposals: anchors, scores, offsets, boxes."""
    torch.manual_seed(3)
    listed = ImageList(torch.rand(images, 3, 64, 64), SIZES[:images])
    features = list(net.features(listed.tensors).values())
    scores, offsets = net.rpn.head([8 * grid for grid in features])
    anchors = net.rpn.anchor_generator(listed, features)
    levels = [score[0].numel() for score in scores]
    scores, offsets = concat_box_prediction_layers(scores, offsets)
    boxes = net.rpn.box_coder.decode(offsets.detach(), anchors).view(images, -1, 4)
    return anchors, scores, offsets, boxes, levels


def gradients(net: Detector, losses: Any) -> list[Tensor]:
    found = torch.autograd.grad(sum(losses), [p for p in net.parameters() if p.requires_grad], allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("counts", OBJECTS)
@pytest.mark.parametrize("most", [2**24, 25_000, 1])
def test_anchor_targets_and_losses_equal_torchvision(
    counts: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only two images or one fit at a time."""
    monkeypatch.setitem(rpn_roi._MAX_OVERLAPS, "cpu", most)
    net, targets = detector(), some_targets(counts)
    anchors, scores, offsets, _, _ = proposals_of(net, len(counts))
    ours = net.rpn.assign_targets_to_anchors(anchors, targets)
    theirs = RegionProposalNetwork.assign_targets_to_anchors(net.rpn, anchors, targets)
    assert same(ours, theirs)
    labels, boxes = theirs
    wanted = net.rpn.box_coder.encode(boxes, anchors)
    losses = both(
        lambda: net.rpn.compute_loss(scores, offsets, labels, wanted),
        lambda: RegionProposalNetwork.compute_loss(net.rpn, scores, offsets, labels, wanted),
    )
    assert same(*losses)
    scores, offsets = (part.detach().requires_grad_() for part in (scores, offsets))
    found = [
        torch.autograd.grad(sum(part), [scores, offsets])
        for part in both(
            lambda: net.rpn.compute_loss(scores, offsets, labels, wanted),
            lambda: RegionProposalNetwork.compute_loss(net.rpn, scores, offsets, labels, wanted),
        )
    ]
    assert same(*found)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("few", [True, False])
def test_proposals_equal_torchvision(training: bool, broken: bool, few: bool) -> None:
    """Also with empty boxes and NaN; torchvision handles few and many boxes differently."""
    net = detector().train(training)
    net.rpn._pre_nms_top_n = dict.fromkeys(net.rpn._pre_nms_top_n, 100 if few else 1000)
    _, scores, _, boxes, levels = proposals_of(net, 5)
    scores = scores.detach().clone().view(5, -1)
    boxes[:, levels[0] :][:, :40] = boxes[:, :40]  # the same boxes on two levels do not push each other out
    scores[:, levels[0] :][:, :40] = scores[:, :40] = 3 + torch.rand(5, 40)
    if broken:
        boxes[0, :40, 2:] = boxes[0, :40, :2]
        boxes[1, ::3] = torch.nan
        scores[2, ::4] = torch.nan
        boxes[3] = 0.0  # nothing is left of this image
    ours = net.rpn.filter_proposals(boxes, scores, SIZES, levels)
    assert same(ours, RegionProposalNetwork.filter_proposals(net.rpn, boxes, scores, SIZES, levels))
    assert [0 < len(part) <= 50 for part in ours[0]] == [not (broken and position == 3) for position in range(5)]


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("counts", OBJECTS)
def test_losses_and_gradients_equal_torchvision(
    counts: tuple[int, ...], masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torchvision's mask targets corrected by half a pixel."""
    monkeypatch.setattr(roi_heads, "roi_align", partial(roi_align, aligned=True))
    net, targets, boxes = detector(masks=masks), some_targets(counts), some_regions(counts)
    torch.manual_seed(0)
    images, sizes = torch.rand(len(counts), 3, 64, 64), SIZES[: len(counts)]
    heads: Any = net.heads

    def losses(forward: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        found = forward(net.features(images), [part.clone() for part in boxes], sizes, targets)[1]
        values = [found[name] for name in sorted(found)]
        assert len(values) == (3 if masks else 2)
        return values, gradients(net, values)

    ours, theirs = both(lambda: losses(heads.forward), lambda: losses(lambda *given: RoIHeads.forward(heads, *given)))
    assert same(ours, theirs)


@pytest.mark.parametrize("counts", OBJECTS)
@pytest.mark.parametrize(("high", "low", "always"), [(0.5, 0.5, False), (0.7, 0.3, True), (0.6, 0.2, False)])
def test_matching_equals_torchvision(counts: tuple[int, ...], high: float, low: float, always: bool) -> None:
    matcher, targets, boxes = Matcher(high, low, always), some_targets(counts), some_regions(counts)
    owners, labels = rpn_roi.match_regions(boxes, rpn_roi.pad_objects(targets), matcher)
    for part, target, owner, label in zip(boxes, targets, owners, labels, strict=True):
        if not len(target["boxes"]):
            assert not owner.any() and not label.any() and len(owner) == len(part)
            continue
        wanted = matcher(box_iou(target["boxes"], part))
        assert torch.equal(owner, wanted.clamp(min=0))
        named = torch.where(wanted >= 0, target["labels"][wanted.clamp(min=0)], 0)
        assert torch.equal(label, torch.where(wanted == -2, -1, named))
    goals = rpn_roi.gather_boxes(owners, rpn_roi.pad_objects(targets))
    for goal, target, owner in zip(goals, targets, owners, strict=True):
        known = target["boxes"] if len(target["boxes"]) else torch.zeros(1, 4)
        assert torch.equal(goal, known[owner])


@pytest.mark.parametrize("size", [4, 16, 500])
def test_sampling_equals_torchvision(size: int) -> None:
    sampler = BalancedPositiveNegativeSampler(size, 0.25)
    random = torch.Generator().manual_seed(2)
    labels = [torch.randint(-1, 3, (count,), generator=random) for count in (30, 7, 90)]
    labels += [torch.zeros(5).long(), torch.ones(40).long(), torch.full((3,), -1), torch.zeros(0).long()]
    boxes = [torch.rand(len(part), 4, generator=random) for part in labels]
    owners = [torch.randint(0, 9, (len(part),), generator=random) for part in labels]

    def image_by_image() -> list[list[Tensor]]:
        chosen = [torch.where(yes | no)[0] for yes, no in zip(*sampler(labels), strict=True)]
        return [[part[keep] for part, keep in zip(parts, chosen, strict=True)] for parts in (boxes, owners, labels)]

    ours, theirs = both(lambda: rpn_roi.sample_regions(boxes, owners, labels, sampler), image_by_image)
    assert same(ours[:3], theirs)
    assert ours[3] == [int((part > 0).sum()) for part in theirs[2]]
    positives = rpn_roi.select_positives(*ours)
    assert same(positives[0], [part[label > 0] for part, label in zip(theirs[0], theirs[2], strict=True)])
    assert same(positives[1], [part[label > 0] for part, label in zip(theirs[1], theirs[2], strict=True)])


def test_lines_and_points_are_dropped() -> None:
    boxes = [*some_regions((3, 0)), torch.zeros(2, 4), torch.zeros(0, 4)]
    boxes[0][1, 2:] = boxes[0][1, :2]
    assert same(rpn_roi.drop_empty(boxes), [part[remove_small_boxes(part, 1e-2)] for part in boxes])
