"""UperNet and its loss, training crops, sliding windows, multi-scale testing."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torchvision.transforms.functional import adjust_contrast

from frugalvit import create_backbone
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import SegmentConfig, TestConfig
from frugalvit.data.rng import generator_for, uniform
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import AutoValues
from frugalvit.experiment.resolve_dense import resolve_segmentation
from frugalvit.tasks.dense.commands import open_pictures
from frugalvit.tasks.dense.loader import ImageReader, StepLoader
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation import task as segment_task
from frugalvit.tasks.segmentation import upernet as model
from frugalvit.tasks.segmentation.dataset import open_scenes
from frugalvit.tasks.segmentation.metrics import IGNORED
from frugalvit.tasks.segmentation.task import (
    COLUMNS,
    SegmentationDataset,
    SegmentationTask,
    choose_crop,
    distort,
    size_at_test,
)
from frugalvit.tasks.segmentation.upernet import (
    Segmenter,
    SegmenterSpec,
    most_probable,
    pixel_loss,
    probabilities,
    window_starts,
)
from helpers.dense_samples import make_scenes


def segmenter(classes: int = 3, auxiliary: float = 0.4) -> Segmenter:
    torch.manual_seed(0)
    backbone = create_backbone("swin_nano", img_size=32, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    return Segmenter(Pyramid(backbone), SegmenterSpec(classes, 16, 0.0, auxiliary))


def test_every_parameter_has_a_gradient() -> None:
    net = segmenter()
    images, labels = torch.rand(2, 3, 32, 32), torch.randint(0, 3, (2, 32, 32))
    losses = net.losses(images, labels)
    assert set(losses) == {"loss_main", "loss_auxiliary"}
    sum(losses.values()).backward()
    assert [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
    assert set(segmenter(auxiliary=0).losses(images, labels)) == {"loss_main"}


def test_upernet_is_as_published() -> None:
    """Swin's Table 3: 60 M parameters with Swin-T and 150 classes. Batch statistics; several scales without flips."""
    net = Segmenter(Pyramid(create_backbone("swin_tiny_w7", img_size=224)), SegmenterSpec(150, norm="batch"))
    assert sum(parameter.numel() for parameter in net.parameters()) / 1e6 == pytest.approx(60, abs=1)
    assert not any(isinstance(module, torch.nn.GroupNorm) for module in net.modules())
    config = SegmentConfig.parse({"data": "x", "recipe": "segment-ade20k"})
    assert config.test.multi_scale and not config.test.flip and config.decoder.norm == "batch"


@pytest.mark.parametrize(("batch", "accumulate", "norm"), [(16, 1, "batch"), (8, 1, "batch"), (16, 4, "group")])
def test_norms_use_the_batch_if_it_is_large(batch: int, accumulate: int, norm: str) -> None:
    facts = Facts(100, 3, 64, "cuda")
    config = SegmentConfig.parse({"data": "x", "img_size": 64, "batch": batch, "accumulate": accumulate})
    assert resolve_segmentation(config, facts, AutoValues()).decoder.norm == norm
    single = SegmentConfig.parse({"data": "x", "img_size": 64, "batch": 1, "decoder": {"norm": "batch"}})
    with pytest.raises(UserError, match=r"--decoder\.norm batch"):
        resolve_segmentation(single, facts, AutoValues())


@pytest.mark.parametrize("auxiliary", [0.4, 0.1])
def test_the_auxiliary_logits_are_aligned_with_the_image(auxiliary: float) -> None:
    """On the second coarsest map; confident wrong logits cost 40 per pixel."""
    net: Any = segmenter(2, auxiliary)
    widths: list[int] = []

    def halves(grid: torch.Tensor) -> torch.Tensor:
        """Return class 0 in the left half of the map, class 1 in the right half."""
        widths.append(grid.shape[3])
        right = torch.arange(grid.shape[3]) >= grid.shape[3] // 2
        return 40.0 * torch.stack([~right, right]).float()[None, :, None].expand(len(grid), 2, grid.shape[2], -1)

    net.helper.forward = halves
    labels = (torch.arange(64) >= 32).long().expand(1, 64, 64)
    correct, wrong = (net.losses(torch.rand(1, 3, 64, 64), part)["loss_auxiliary"] for part in (labels, 1 - labels))
    assert widths == [round(64 / net.pyramid.strides[-2])] * 2
    assert correct < auxiliary * 1.0 and wrong == pytest.approx(auxiliary * 40.0, rel=0.1)


class PixelPositions(torch.nn.Module):
    """A pyramid whose cells hold the column of their centre in pixels; ``ends`` rounds the number of cells."""

    channels, strides = [1, 1, 1], [4.0, 8.0, 32.0]

    def __init__(self, ends: Callable[[float], int]) -> None:
        super().__init__()
        self.ends = ends

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        sides = [(self.ends(images.shape[3] / stride), stride) for stride in self.strides]
        return [(stride * (torch.arange(cells) + 0.5)).expand(1, 1, cells, cells) for cells, stride in sides]


@pytest.mark.parametrize("ends", [math.ceil, math.floor])  # the last cell is cut, or missing
@pytest.mark.parametrize("side", [72, 90, 96, 100, 171])
def test_levels_are_fused_without_a_shift(side: int, ends: Callable[[float], int]) -> None:
    net = Segmenter(PixelPositions(ends), SegmenterSpec(1, 1, 0.0, 0.0))  # type: ignore[arg-type]
    same = torch.nn.Identity()
    net.pooling = net.fuse = net.classify = same  # type: ignore[assignment]
    net.lateral = net.smooth = torch.nn.ModuleList([same, same])
    maps = net.pyramid(torch.zeros(1, 3, side, side))
    fused = net(torch.zeros(1, 3, side, side))[0, :, 0] / torch.tensor([[1.0], [2.0], [3.0]])  # sums of 1 to 3 levels
    finest = maps[0][0, 0, 0]
    # Between the centres of the first and the last cell of each level, and one middle cell further in.
    inside = (finest >= 16 + 8) & (finest <= min(maps[1].max(), maps[2].max() - 8))
    assert fused.shape == (3, len(finest)) and inside.sum() >= 4
    for level in fused:
        torch.testing.assert_close(level[inside], finest[inside])


@pytest.mark.parametrize("cells", [26, 25, 24])
def test_logits_are_resized_without_a_shift(cells: int) -> None:
    """Cells of four pixels in an image of 102: the last is cut, missing, or the borders are lost."""
    columns = 4 * (torch.arange(float(cells)) + 0.5) - 0.5
    found = model._to_scale(columns.expand(1, 1, 2, cells), 4, (8, 102))[0, 0, 0]
    assert found.shape == (102,)
    truth = torch.arange(102.0)
    if cells < 25:  # from edge to edge
        truth = (truth + 0.5) * cells * 4 / 102 - 0.5
    torch.testing.assert_close(found[2:98], truth.clamp(max=float(columns[-1]))[2:98])


def test_two_half_batches_equal_one_batch() -> None:
    """Thanks to group norms and a mean over all pixels."""
    net = segmenter()
    images, labels = torch.rand(4, 3, 32, 32), torch.randint(0, 3, (4, 32, 32))
    labels[0, :20] = IGNORED
    full = net.losses(images, labels)["loss_main"]
    halves = [net.losses(images[part], labels[part])["loss_main"] for part in (slice(0, 2), slice(2, 4))]
    assert torch.allclose(full, torch.stack(halves).mean(), atol=1e-6)


def test_ignored_pixels_add_nothing() -> None:
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    labels = torch.randint(0, 3, (1, 4, 4))
    labels[:, 2:] = IGNORED
    by_hand = -logits.log_softmax(1).gather(1, labels[:, None].clamp(max=2))[:, 0][:, :2].sum() / 16
    loss = pixel_loss(logits, labels, 1.0)
    assert torch.allclose(loss, by_hand)
    loss.backward()
    assert logits.grad is not None and logits.grad[:, :, 2:].abs().sum() == 0
    assert pixel_loss(logits, torch.full((1, 4, 4), IGNORED), 1.0) == 0


@given(length=st.integers(1, 300), window=st.integers(1, 120))
def test_windows_cover_everything(length: int, window: int) -> None:
    starts = window_starts(length, window)
    seen = np.zeros(length, int)
    for start in starts:
        assert start >= 0 and (start + window <= length or length < window)
        seen[start : start + window] += 1
    assert seen.min() >= 1


class Pointwise(torch.nn.Module):
    """A network whose output at a pixel depends on that pixel alone, so that windows and flips change nothing."""

    spec, pyramid = SegmenterSpec(2), SimpleNamespace(strides=[1.0])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([images.sum(1), -images.prod(1)], 1)


@pytest.mark.parametrize("window", [0, 7, 16, 64])
@pytest.mark.parametrize("flip", [False, True])
def test_windows_and_flips_keep_positions(window: int, flip: bool) -> None:
    net, images = Pointwise(), torch.randn(2, 3, 21, 34)
    found = probabilities(net, images, (21, 34), window=window, flip=flip)  # type: ignore[arg-type]
    assert torch.allclose(found, net(images).softmax(1), atol=1e-5)


class Patchwise(torch.nn.Module):
    """Means of patches of 16 pixels; the last patch extends past the edge."""

    spec, pyramid = SegmenterSpec(2), SimpleNamespace(strides=[16.0])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        below, right = -images.shape[2] % 16, -images.shape[3] % 16
        means = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(images, (0, right, 0, below)), 16)
        return torch.stack([means.sum(1), -means[:, 0]], 1)


def test_the_last_patch_is_cut_at_the_edge() -> None:
    """An image that ends within a patch equals a part of a larger image."""
    net, images = Patchwise(), torch.zeros(1, 3, 48, 64)
    images[:, :, :40, :50] = torch.randn(1, 3, 40, 50)
    full = probabilities(net, images, (48, 64))  # type: ignore[arg-type]
    part = probabilities(net, images[:, :, :40, :50], (40, 50))  # type: ignore[arg-type]
    torch.testing.assert_close(part, full[:, :, :40, :50])


def test_multi_scale_is_the_mean_over_scales_and_flips() -> None:
    task = SegmentationTask(segmenter(), 32).eval()
    picture = torch.randint(0, 256, (3, 40, 56), dtype=torch.uint8)
    test = TestConfig(multi_scale=True, scales=[0.5, 1.5], flip=True, window=0)
    total = torch.zeros(3, 40, 56)
    with torch.no_grad():
        for scale in (0.5, 1.5):
            size = (max(32, round(32 * scale)), max(32, round(32 * scale * 56 / 40)))
            resized = F.interpolate(picture[None] / 255, size=size, mode="bilinear", antialias=True)
            resized = (resized - task.mean) / task.std
            for mirrored in (False, True):
                logits = task.net(resized.flip(3) if mirrored else resized)
                covered = [round(cells * task.net.pyramid.strides[0]) for cells in logits.shape[2:]]
                chances = F.interpolate(logits, size=covered, mode="bilinear").softmax(1)[:, :, : size[0], : size[1]]
                chances = chances.flip(3) if mirrored else chances
                total += F.interpolate(chances, size=(40, 56), mode="bilinear")[0] / 2
    found = task.predict([picture], test)[0]
    assert (found == total.argmax(0)).float().mean() > 0.999


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("scales", [[1.0], [0.5, 1.0, 3.0]])
def test_classes_of_large_images_are_compared_in_chunks(
    chunk: int, scales: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result equals that of all classes at once."""
    size = (90, 120)
    views = [torch.randn(7, round(30 * scale), round(40 * scale)).softmax(0) for scale in scales]
    views[0][3] = views[0][1]  # the first of equals wins
    total: Any = sum(F.interpolate(view[None], size=size, mode="bilinear")[0] for view in views)
    monkeypatch.setattr(model, "_MAX_PROBABILITIES", chunk * 90 * 120 + 1)
    assert torch.equal(most_probable(views, size), total.argmax(0))


@pytest.mark.parametrize(
    ("size", "side", "seen"),
    [
        ((480, 640), 512, (512, 683)),
        ((100, 400), 64, (64, 256)),
        ((30, 3000), 512, (32, 2048)),
        ((200, 3), 64, (256, 32)),
    ],
)
def test_strips_are_resized_smaller(size: tuple[int, int], side: int, seen: tuple[int, int]) -> None:
    assert size_at_test(size, side) == seen


@given(
    height=st.integers(10, 90),
    width=st.integers(10, 90),
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=COLUMNS, max_size=COLUMNS),
)
def test_crops_stay_inside_and_keep_the_shape(height: int, width: int, numbers: list[float]) -> None:
    labels = torch.zeros(height, width, dtype=torch.uint8)
    crop = choose_crop(labels, 32, (0.5, 2.0), 0.75, numbers)
    assert 0 <= crop.top <= height - crop.height and 0 <= crop.left <= width - crop.width
    assert max(crop.out) <= 32
    scale = 32 / min(height, width) * (0.5 + 1.5 * numbers[0])
    assert crop.out[0] == pytest.approx(crop.height * scale, abs=max(1.0, scale))


def test_crops_filled_by_one_class_are_drawn_again() -> None:
    labels = torch.zeros(64, 64, dtype=torch.uint8)
    labels[:, 48:] = 1
    random = np.random.default_rng(0)
    shares = {}
    for limit in (0.75, 1.0):
        both = 0
        for _ in range(100):
            crop = choose_crop(labels, 32, (2.0, 2.0), limit, random.random(COLUMNS).tolist())
            part = labels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
            both += int(0.25 <= part.float().mean() <= 0.75)
        shares[limit] = both
    assert shares[0.75] > 90 > shares[1.0]


def test_distortion_changes_colours_within_range() -> None:
    images, full = torch.rand(8, 3, 6, 6), torch.ones(8, 1, 6, 6)
    none = torch.ones(8, 8, dtype=torch.float64) * 0.9
    assert torch.allclose(distort(images, none, full), images, atol=1e-5)
    numbers = torch.rand(8, 8, dtype=torch.float64) * 0.4
    changed = distort(images, numbers, full)
    assert (changed - images).abs().amax((1, 2, 3)).min() > 1e-3
    assert changed.min() >= 0 and changed.max() <= 1
    strongest = torch.tensor([[0.9, 0.5] * 3 + [0.1, 1.0]], dtype=torch.float64)
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    tenth = torch.tensor([1.0, 0.6, 0.0]).view(1, 3, 1, 1)  # a tenth of a turn towards yellow
    torch.testing.assert_close(distort(red, strongest, torch.ones(1, 1, 1, 1)), tenth, atol=1e-3, rtol=0)


def test_contrast_equals_torchvision_without_the_padding() -> None:
    picture = torch.rand(1, 3, 4, 5) * 0.5 + 0.3
    padded, inside = torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8)
    padded[..., :4, :5], inside[..., :4, :5] = picture, 1
    half = torch.tensor([[0.9, 0.5, 0.1, 0.0, 0.9, 0.5, 0.9, 0.5]], dtype=torch.float64)
    found = distort(padded, half, inside)[..., :4, :5]
    torch.testing.assert_close(found, adjust_contrast(picture, 0.5), atol=1e-5, rtol=0)


def test_batches_depend_on_seed_step_and_rank(tmp_path: Path) -> None:
    data = open_scenes(str(make_scenes(tmp_path / "shapes")))
    scenes = data.splits["train"]

    def batch(step: int, rank: int = 0, world: int = 1, seed: int = 0) -> torch.Tensor:
        pictures = ImageReader([scene.path for scene in scenes], [(s.height, s.width) for s in scenes])
        task = SegmentationTask(segmenter(), 32)
        dataset = SegmentationDataset(scenes, data, pictures)
        task.loader = StepLoader(len(scenes), 4, dataset.load, COLUMNS, seed=seed, rank=rank, world=world)
        for earlier in range(max(0, step - 1), step):
            task.batch_at(earlier)
        found = task.batch_at(step)
        assert found.images.shape == (4 // world, 3, 32, 32) and found.labels.shape == (4 // world, 32, 32)
        assert set(found.labels.unique().tolist()) <= {0, 1, 2, IGNORED}
        return found.images

    full = batch(3)
    assert torch.equal(full, batch(3))
    assert torch.equal(full, torch.cat([batch(3, rank, 2) for rank in (0, 1)]))
    assert not torch.equal(full, batch(4)) and not torch.equal(full, batch(3, seed=1))


@pytest.mark.parametrize("photometric", [True, False])
@pytest.mark.parametrize("scales", [(0.5, 2.0), (0.4, 0.8)])
def test_batches_equal_the_oracle(tmp_path: Path, photometric: bool, scales: tuple[float, float]) -> None:
    """The oracle crops image by image. Padding of small images changes none of their colours."""
    data = open_scenes(str(make_scenes(tmp_path / "shapes", side=45)))
    scenes = data.splits["train"]
    dataset = SegmentationDataset(scenes, data, open_pictures(scenes, "ram"))
    task = SegmentationTask(segmenter(), 40, scales=scales, photometric=photometric)
    task.loader = StepLoader(len(scenes), 4, dataset.load, COLUMNS, seed=5, workers=2)
    for step in range(4):
        found = task.batch_at(step)
        numbers = uniform(4, COLUMNS, generator_for(5, "augment", step))
        images, labels = torch.zeros(4, 3, 40, 40), torch.full((4, 40, 40), IGNORED)
        inside = torch.zeros(4, 1, 40, 40)
        for position, index in enumerate(task.loader.indices(step)):
            pixels, classes = dataset.load(index)
            row = numbers[position].tolist()
            crop = choose_crop(classes, 40, scales, task.largest_share, row)
            window = (slice(crop.top, crop.top + crop.height), slice(crop.left, crop.left + crop.width))
            image = F.interpolate(pixels[None, :, *window].float() / 255, crop.out, mode="bilinear", antialias=True)[0]
            label = F.interpolate(classes[None, None, *window].float(), crop.out, mode="nearest-exact")[0, 0].long()
            height, width = crop.out
            flipped = row[1] < 0.5
            if photometric:
                image = distort(image[None], numbers[position : position + 1, -8:], torch.ones(1, 1, height, width))[0]
            images[position, :, :height, :width] = image.flip(2) if flipped else image
            labels[position, :height, :width] = label.flip(1) if flipped else label
            inside[position, :, :height, :width] = 1
        wanted = torch.where(inside > 0, task.normalize(images), 0.0)
        torch.testing.assert_close(found.images, wanted, atol=1e-5 if photometric else 0, rtol=0)
        assert torch.equal(found.labels, labels)


def test_an_epoch_sees_every_image_once() -> None:
    loader = StepLoader(10, 4, lambda index: index, 1, seed=0)
    seen = [index for step in range(5) for index in loader.at(step)[0]]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


@pytest.mark.parametrize(
    ("test", "window", "views"),
    [
        ({}, 0, [(32, False)]),
        ({"window": 20}, 20, [(32, False)]),
        ({"multi_scale": True, "scales": [1.0, 2.0], "flip": True}, 32, [(32, True), (64, True)]),
        ({"multi_scale": True, "scales": [2.0]}, 32, [(64, False)]),
        ({"multi_scale": True, "scales": [2.0], "flip": True, "window": 0}, 0, [(64, True)]),
    ],
)
def test_scales_windows_and_flips_of_a_test(
    test: dict[str, Any], window: int, views: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, bool]] = []
    windows: set[int] = set()

    def record(net: Any, images: torch.Tensor, size: tuple[int, int], *, window: int, flip: bool) -> torch.Tensor:
        calls.append((images.shape[2], flip))
        windows.add(window)
        return torch.zeros(len(images), 3, *size)

    monkeypatch.setattr(segment_task, "probabilities", record)
    task = SegmentationTask(segmenter(), 32)
    image = torch.zeros(3, 48, 60, dtype=torch.uint8)
    assert task.predict([image, image], TestConfig(**test)).shape == (2, 48, 60)
    assert calls == views and windows == {window}


def test_ignored_pixels_do_not_fill_a_crop() -> None:
    """Three classes have equal shares of the few counted pixels: the first position is taken."""
    labels = torch.full((20, 40), IGNORED, dtype=torch.uint8)
    labels[:, 8:11], labels[:, 30:33] = torch.arange(3), torch.arange(3)
    numbers = [0.5, 0.0, *[0.25, 0.25], *[0.75, 0.75] * 9]
    assert choose_crop(labels, 10, (1.0, 1.0), 0.75, numbers).left == 5
    labels[:, :25] = IGNORED  # the first position has no counted pixel
    assert choose_crop(labels, 10, (1.0, 1.0), 0.75, numbers).left == 15
