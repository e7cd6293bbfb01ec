"""Detectors: shapes, gradients, the cascade, anchors and crops."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign

from frugalvit import create_backbone
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.cascade import OVERLAPS, CascadeHead
from frugalvit.tasks.detection.dataset import View
from frugalvit.tasks.detection.layers import DetectorSpec, FloatAnchors, roi_align
from frugalvit.tasks.detection.masks import paste_masks
from frugalvit.tasks.detection.matching import match_regions
from frugalvit.tasks.detection.model import Detector
from helpers.dense_models import SIZES, detector, targets


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("head", ["mask-rcnn", "cascade"])
def test_every_parameter_has_a_gradient_and_shapes_fit(head: str, masks: bool) -> None:
    net = detector(head, masks)
    images = torch.rand(2, 3, 64, 64)
    losses = net(images, SIZES, targets(masks))
    assert ("loss_mask" in losses) == masks
    assert all(torch.isfinite(value) for value in losses.values())
    sum(losses.values()).backward()
    assert [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
    net.eval()
    with torch.no_grad():  # detect objects everywhere
        for name, parameter in net.named_parameters():
            if name.endswith(("cls_score.bias", "scores.bias")):
                parameter.copy_(torch.tensor([-3.0, 2, 1, 0]))
    found = net.detect(images, SIZES, [(128, 128), (96, 128)])
    for objects, (height, width) in zip(found, [(128, 128), (96, 128)], strict=True):
        count = len(objects["boxes"])
        assert 0 < count <= 100 and len(objects["labels"]) == len(objects["scores"]) == count
        assert objects["labels"].min() >= 1 and objects["labels"].max() <= 3
        assert objects["boxes"].min() >= 0
        assert objects["boxes"][:, 2].max() <= width and objects["boxes"][:, 3].max() <= height
        assert objects["scores"].tolist() == sorted(objects["scores"].tolist(), reverse=True)
        if masks:
            assert objects["masks"].shape == (count, height, width) and objects["masks"].dtype == torch.bool


@pytest.mark.parametrize("head", ["mask-rcnn", "cascade"])
def test_the_score_threshold_can_be_lowered(head: str) -> None:
    net = detector(head, masks=False).eval()
    with torch.no_grad():  # almost only background
        for name, parameter in net.named_parameters():
            if name.endswith(("cls_score.bias", "scores.bias")):
                parameter.copy_(torch.tensor([5.0, 0, 0, 0]))
    images = torch.rand(2, 3, 64, 64)
    counts = []
    for least in (1.0, 0.05, 0.0):
        net.set_score_threshold(least)
        found = net.detect(images, SIZES, SIZES)
        counts.append(sum(len(objects["boxes"]) for objects in found))
    assert counts[0] == counts[1] == 0 < counts[2], "it is never raised"


def test_only_masks_above_the_threshold_are_pasted() -> None:
    net = detector().eval()
    net.set_score_threshold(0.0)
    images, original = torch.rand(2, 3, 64, 64), [(128, 100), (96, 128)]
    everything = list(net.detect(images, SIZES, original))
    with torch.inference_mode():
        raw = net(images, SIZES)
    for objects, seen, size, shape in zip(everything, raw, original, SIZES, strict=True):
        scale = torch.tensor([size[1] / shape[1], size[0] / shape[0]] * 2)
        torch.testing.assert_close(objects["boxes"], seen["boxes"] * scale)
        assert torch.equal(objects["masks"], paste_masks(seen["masks"], objects["boxes"], size))
    least = torch.cat([objects["scores"] for objects in everything]).median().item()
    for objects, every in zip(net.detect(images, SIZES, original, least), everything, strict=True):
        keep = [score >= least for score in every["scores"].tolist()]
        assert all(torch.equal(objects[name], every[name][keep]) for name in every)
    assert [len(objects["masks"]) for objects in net.detect(images, SIZES, original, 2.0)] == [0, 0]


def heads() -> CascadeHead:
    found = detector("cascade").heads
    assert isinstance(found, CascadeHead)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_stage_needs_more_overlap(stage: int) -> None:
    """A box of 30 × 30 shrunk from one side: its IoU is its share."""
    shares = [0.45, 0.55, 0.65, 0.75]
    boxes = [torch.tensor([[0.0, 0, 30 * share, 30] for share in shares])]
    truth = [{"boxes": torch.tensor([[0.0, 0, 30, 30]]), "labels": torch.tensor([2])}]
    owners, labels = match_regions(boxes, truth, heads().matchers[stage])
    assert labels[0].tolist() == [2 if share >= OVERLAPS[stage] else 0 for share in shares]
    assert owners[0].tolist() == [0] * 4


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_target_offsets_refine_boxes_to_objects(stage: int) -> None:
    cascade = heads()
    boxes = [torch.tensor([[3.0, 5, 25, 30], [10.0, 10, 20, 40]]), torch.tensor([[0.0, 0, 9, 9]])]
    goals = [torch.tensor([[4.0, 4, 30, 34], [12.0, 8, 19, 50]]), torch.tensor([[1.0, 2, 7, 9]])]
    offsets = torch.cat(cascade.coders[stage].encode(goals, boxes))
    refined = cascade._refine(stage, offsets, boxes, [(64, 64), (64, 64)])
    for found, goal in zip(refined, goals, strict=True):
        assert torch.allclose(found, goal, atol=1e-3)


def test_each_stage_trains_on_boxes_of_the_one_before() -> None:
    """Without a gradient through them, with weights of 1, 1/2 and 1/4: equal logits cost ln 4."""
    cascade = heads()
    offset = torch.tensor([0.5, -0.5, 0.2, 0.1], requires_grad=True)
    seen: list[list[torch.Tensor]] = []

    def crop(features: Any, boxes: list[torch.Tensor], sizes: Any) -> torch.Tensor:
        seen.append(boxes)
        return torch.zeros(sum(map(len, boxes)), 1)

    cascade.crop.forward = crop  # type: ignore[method-assign]
    for stage in cascade.stages:
        stage.forward = lambda crops: (torch.zeros(len(crops), 4), offset.expand(len(crops), 3, 4))  # type: ignore[method-assign]
    cascade.mask_stages = torch.nn.ModuleList()
    proposals = [torch.tensor([[3.0, 5, 25, 30], [8.0, 8, 40, 40]]), torch.tensor([[2.0, 2, 9, 9]])]
    _, losses = cascade({}, proposals, SIZES, targets(masks=False))
    costs = [losses[f"loss_classifier_{number}"].item() for number in (1, 2, 3)]
    assert costs == pytest.approx([torch.log(torch.tensor(4.0)).item() * weight for weight in (1, 0.5, 0.25)])
    for number, (before, after) in enumerate(pairwise(seen)):
        refined = cascade._refine(number, offset.detach().expand(sum(map(len, before)), 4), before, SIZES)
        assert all(torch.equal(found, wanted) for found, wanted in zip(after, refined, strict=True))
        assert not any(torch.equal(found, old) for found, old in zip(after, before, strict=True))
        assert not any(found.requires_grad for found in after)


def test_the_box_loss_is_giou_on_the_box_of_the_class() -> None:
    """By hand: 10 · weight · (1 - GIoU) of the true class's box, over all regions. Other classes' boxes add nothing."""
    cascade = heads()
    offsets = torch.zeros(2, 3, 4, requires_grad=True)
    goal = torch.tensor([[4.0, 4, 24, 24]])
    cascade.crop.forward = lambda features, boxes, sizes: torch.zeros(2, 1)  # type: ignore[method-assign]
    for stage in cascade.stages:
        stage.forward = lambda crops: (torch.zeros(2, 4), offsets)  # type: ignore[method-assign]
    cascade.mask_stages = torch.nn.ModuleList()
    region = torch.tensor([[4.0, 4, 24, 20]])  # 20 × 16 inside 20 × 20: IoU = GIoU = 0.8
    truth = [{"boxes": goal, "labels": torch.tensor([2])}]
    _, losses = cascade({}, [region], [(64, 64)], truth)  # and the true box itself, which costs nothing
    for number, weight in enumerate((1, 0.5, 0.25), 1):
        assert losses[f"loss_box_reg_{number}"].item() == pytest.approx(10 * weight * 0.2 / 2, rel=1e-4)
    losses["loss_box_reg_1"].backward()
    assert offsets.grad is not None
    assert offsets.grad[:, [0, 2]].abs().sum() == 0 < offsets.grad[:, 1].abs().sum()


def test_detectors_have_the_published_size() -> None:
    """With Swin-T and COCO's 80 classes Swin's Table 2 counts 48 M and 86 M parameters."""
    pyramid = Pyramid(create_backbone("swin_tiny_w7", img_size=224))
    for head, millions in (("mask-rcnn", 48), ("cascade", 86)):
        with torch.device("meta"):
            net = Detector(pyramid, DetectorSpec(80, head))
        assert sum(parameter.numel() for parameter in net.parameters()) / 1e6 == pytest.approx(millions, abs=1)


def test_the_cascade_averages_scores_over_stages() -> None:
    """With zero offsets the score is the mean of three softmaxes, and the box is the proposal."""
    cascade = heads().eval()
    logits = [torch.tensor([[0.0, 3, 0, 0]]), torch.tensor([[0.0, 1, 2, 0]]), torch.tensor([[1.0, 2, 0, 0]])]
    for stage, values in zip(cascade.stages, logits, strict=True):
        stage.forward = lambda crops, values=values: (values, torch.zeros(1, 3, 4))  # type: ignore[method-assign]
    features = {name: torch.rand(1, 16, side, side) for name, side in zip("012", (16, 8, 4), strict=True)}
    (found,), _ = cascade(features, [torch.tensor([[8.0, 8, 40, 40]])], [(64, 64)])
    wanted = torch.stack([value.softmax(1) for value in logits]).mean(0)[0, 1:]
    assert torch.allclose(found["scores"], wanted[found["labels"] - 1], atol=1e-6)
    assert found["labels"][0] == 1 and torch.allclose(found["boxes"][0], torch.tensor([8.0, 8, 40, 40]), atol=1e-3)


@pytest.mark.parametrize(("shared", "kept"), [(0.4, 2), (0.6, 1)])
def test_nms_drops_duplicates_of_a_class(shared: float, kept: int) -> None:
    """Boxes that overlap by more than a half; one of two boxes of 30 × 30 is narrower."""
    boxes = torch.tensor([[0.0, 0, 30, 30], [0.0, 0, 30 * shared, 30]])[:, None].expand(2, 3, 4)
    found = heads()._select(boxes, torch.tensor([[0.0, 0, 0.9, 0], [0.0, 0, 0.8, 0]]))
    assert found["labels"].tolist() == [2] * kept
    assert len(heads()._select(boxes, torch.tensor([[0.0, 0, 0.9, 0], [0.0, 0.8, 0, 0]]))["labels"]) == 2


@given(
    height=st.integers(20, 900), width=st.integers(20, 900), number=st.floats(0, 1, exclude_max=True)
)  # fmt: skip
def test_images_are_resized_by_their_short_or_long_side(height: int, width: int, number: float) -> None:
    view = View(800)
    short = view.side_for(number)
    assert 480 <= short <= 800 and (short - 480) % 32 == 0
    tall, wide = view.fit(height, width, short)
    assert abs(min(tall, wide) - short) <= 1 or abs(max(tall, wide) - 1333) <= 1
    assert max(tall, wide) <= 1334
    assert tall / wide == pytest.approx(height / width, rel=0.1)


def test_boxes_are_exact_in_half_precision() -> None:
    """bfloat16 would round positions to four pixels; anchors, boxes and scores are float32."""
    net = detector("cascade")
    maps = [torch.rand(1, 16, 8, 8, dtype=torch.bfloat16), torch.rand(1, 16, 4, 4, dtype=torch.bfloat16)]
    anchors = FloatAnchors(((16,), (32,)), [100.0, 200.0])
    generated = anchors(ImageList(torch.rand(1, 3, 800, 800), [(800, 800)]), maps)[0][1::3]  # the squares
    assert generated.dtype == torch.float32 and generated[7].tolist() == [692.0, -8.0, 708.0, 8.0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = net(torch.rand(2, 3, 64, 64), SIZES, targets())
        assert all(value.dtype == torch.float32 for value in losses.values())
        net.eval()
        found = net(torch.rand(2, 3, 64, 64), SIZES)
    assert all(objects["boxes"].dtype == torch.float32 for objects in found)


def over_the_edge(patch: int) -> Detector:
    """A plain ViT whose patches do not divide inputs of multiples of 32."""
    size = {"patch_size": patch, "embed_dim": 32, "depth": 1, "num_heads": 2}
    backbone = create_backbone("vit_tiny_patch16_224", img_size=8 * patch, **size)
    return Detector(Pyramid(backbone), DetectorSpec(2, masks=False, channels=16, hidden=32, anchors=2)).eval()


@pytest.mark.parametrize("size", [(96, 96), (96, 128), (160, 96)])
@pytest.mark.parametrize("patch", [12, 14, 16])
def test_anchors_are_centred_on_their_cells(patch: int, size: tuple[int, int]) -> None:
    net = over_the_edge(patch)
    images = torch.zeros(2, 3, *size)
    with torch.no_grad():
        maps = list(net.features(images).values())
    generated = net.rpn.anchor_generator(ImageList(images, [size] * 2), maps)
    assert len(generated) == 2 and torch.equal(generated[0], generated[1])
    counts = [3 * grid.shape[2] * grid.shape[3] for grid in maps]
    strides = [patch / 4, patch / 2, patch, 2 * patch, 4 * patch]
    for boxes, grid, stride in zip(generated[0].split(counts), maps, strides, strict=True):
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        assert centres[0].tolist() == [0, 0]
        assert centres[-1].tolist() == [(grid.shape[3] - 1) * stride, (grid.shape[2] - 1) * stride]


@pytest.mark.parametrize("size", [(96, 96), (96, 128)])
@pytest.mark.parametrize("patch", [12, 14, 16])
def test_crops_are_taken_at_the_box(patch: int, size: tuple[int, int]) -> None:
    """With maps of pixel positions, as torchvision counts them, the mean of a crop is the centre of its box."""
    net = over_the_edge(patch)
    with torch.no_grad():
        maps = net.features(torch.zeros(1, 3, *size))
    ramps = {}
    for (name, grid), stride in zip(maps.items(), net.features.strides, strict=True):
        rows, columns = (torch.arange(count) * stride for count in grid.shape[2:])
        ramps[name] = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))[None]
    for side in (20, 40, 60):  # pixels: of several levels
        y, x = size[0] / 2 - 4, size[1] / 2 + 2
        box = torch.tensor([[x - side / 2, y - side / 2, x + side / 2, y + side / 2]])
        read = net.heads.box_roi_pool(ramps, [box], [size])[0].mean((1, 2))
        assert torch.allclose(read, torch.tensor([y, x]), atol=1e-3), side


def four_levels(anchors: float) -> Detector:
    """A detector with strides of 4, 8, 16 and 32."""
    torch.manual_seed(0)
    tiny = {"embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 2, 4, 8], "patch_size": 4}
    backbone = create_backbone("swin_tiny_w7", img_size=128, **tiny)
    spec = DetectorSpec(2, masks=False, channels=16, hidden=32, anchors=anchors)
    return Detector(Pyramid(backbone), spec).eval()


def test_strides_of_powers_of_two_equal_torchvision() -> None:
    net = four_levels(8)
    spec = net.spec
    assert net.features.strides == [4, 8, 16, 32, 64]
    images = torch.rand(2, 3, 128, 192)
    shapes = [(128, 192), (100, 150)]
    with torch.no_grad():
        maps = net.features(images)
    batch = ImageList(images, shapes)
    theirs = AnchorGenerator(tuple((8 * stride,) for stride in (4, 8, 16, 32, 64)), ((0.5, 1.0, 2.0),) * 5)
    generated = zip(
        net.rpn.anchor_generator(batch, list(maps.values())), theirs(batch, list(maps.values())), strict=True
    )
    assert all(torch.equal(ours, other) for ours, other in generated)
    corners = torch.rand(2, 40, 2) * 60
    boxes = list(torch.cat([corners, corners + torch.rand(2, 40, 2) ** 3 * 120 + 2], 2))
    for side in (7, 14):
        crops = MultiScaleRoIAlign(["0", "1", "2", "3"], side, sampling_ratio=2)
        assert torch.equal(roi_align(spec, net.features, side)(maps, boxes, shapes), crops(maps, boxes, shapes))
