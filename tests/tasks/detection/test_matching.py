"""RoI heads and the matching of regions equal torchvision's bit for bit, random numbers included."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import roi_heads
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import box_iou, clip_boxes_to_image, remove_small_boxes, roi_align

from frugalvit.tasks.detection.matching import gather_boxes, match_regions
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


def gradients(net: Detector, losses: Any) -> list[Tensor]:
    found = torch.autograd.grad(sum(losses), [p for p in net.parameters() if p.requires_grad], allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


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
    owners, labels = match_regions(boxes, targets, matcher)
    for part, target, owner, label in zip(boxes, targets, owners, labels, strict=True):
        if not len(target["boxes"]):
            assert not owner.any() and not label.any() and len(owner) == len(part)
            continue
        wanted = matcher(box_iou(target["boxes"], part))
        assert torch.equal(owner, wanted.clamp(min=0))
        named = torch.where(wanted >= 0, target["labels"][wanted.clamp(min=0)], 0)
        assert torch.equal(label, torch.where(wanted == -2, -1, named))
    goals = gather_boxes(owners, targets)
    for goal, target, owner in zip(goals, targets, owners, strict=True):
        known = target["boxes"] if len(target["boxes"]) else torch.zeros(1, 4)
        assert torch.equal(goal, known[owner])
