"""Batches of a detector equal those of a slow oracle, image by image, with any cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from frugalvit import create_backbone
from frugalvit.data.formats.coco import masks_of, open_coco
from frugalvit.data.rng import generator_for, uniform
from frugalvit.tasks.dense import loader
from frugalvit.tasks.dense.commands import open_pictures
from frugalvit.tasks.dense.loader import StepLoader
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.dataset import DetectionDataset, Objects, View, make_targets, unpack_bits
from frugalvit.tasks.detection.layers import DetectorSpec
from frugalvit.tasks.detection.model import Detector
from frugalvit.tasks.detection.task import DetectionTask
from helpers.dense_samples import edit, make_coco

BATCH = 4


def cached(dataset: DetectionDataset) -> int:
    """Number of images whose objects are in the cache."""
    objects: Any = dataset.objects
    return objects.cache_info().currsize if hasattr(objects, "cache_info") else 0


def one_by_one(
    task: DetectionTask, dataset: DetectionDataset, step: int, seed: int
) -> tuple[Tensor, list[Any], list[Any]]:
    """The oracle: resize every image and rasterize its masks by itself, then pad."""
    order = [
        int(
            torch.randperm(len(dataset), generator=generator_for(seed, "order", position // len(dataset)))[
                position % len(dataset)
            ]
        )
        for position in range(step * BATCH, (step + 1) * BATCH)
    ]
    numbers = uniform(BATCH, 2, generator_for(seed, "augment", step)).tolist()
    images, sizes, targets = [], [], []
    for index, (size_number, flip_number) in zip(order, numbers, strict=True):
        annotated = dataset.images[index]
        entries, pixels = annotated.trainable(), dataset.pictures.read(index)
        height, width = task.view.fit(annotated.height, annotated.width, task.view.side_for(size_number))
        image = F.interpolate(pixels[None].float() / 255, size=(height, width), mode="bilinear", antialias=True)
        corners = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        left, top, right, bottom = (
            corners * torch.tensor([width / annotated.width, height / annotated.height] * 2)
        ).unbind(1)
        target = {"labels": torch.tensor([dataset.data.class_of()[e["category_id"]] for e in entries]).long()}
        masks = torch.zeros(0, height, width, dtype=torch.uint8)
        if entries and dataset.masks:
            drawn = torch.from_numpy(masks_of(entries, annotated.height, annotated.width))[:, None].float()
            masks = (F.interpolate(drawn, size=(height, width), mode="bilinear")[:, 0] >= 0.5).to(torch.uint8)
        if flip_number < 0.5:
            image, masks, left, right = image.flip(3), masks.flip(2), width - right, width - left
        target["boxes"] = torch.stack([left, top, right, bottom], 1)
        targets.append(target | ({"masks": masks} if dataset.masks else {}))
        images.append(task.normalize(image)[0])
        sizes.append((height, width))
    sides = [-(-max(size[axis] for size in sizes) // 32) * 32 for axis in (0, 1)]
    padded = torch.zeros(BATCH, 3, *sides)
    for index, image in enumerate(images):
        padded[index, :, : image.shape[1], : image.shape[2]] = image
    return padded, sizes, targets


def task_of(masks: bool) -> DetectionTask:
    backbone = create_backbone("swin_nano", img_size=64, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    spec = DetectorSpec(3, masks=masks, channels=16, hidden=32, anchors=2, proposals=50, samples=32)
    return DetectionTask(Detector(Pyramid(backbone), spec), View(80, (0.5, 1.2)))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images: polygons and run lengths, one image without objects, one crowd."""
    root = make_coco(tmp_path_factory.mktemp("coco") / "shapes", train=6, val=1, side=50)

    def change(content: dict[str, Any]) -> None:
        empty = content["images"][2]["id"]
        content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] != empty]
        content["annotations"][0]["iscrowd"] = 1

    edit(root, "train", change)
    return root


def is_equal(found: Any, wanted: tuple[Tensor, list[Any], list[Any]]) -> bool:
    images, sizes, targets = wanted
    assert torch.equal(found.images, images) and found.sizes == sizes and len(found.targets) == len(targets)
    for target, right in zip(found.targets, targets, strict=True):
        assert target.keys() == right.keys()
        assert all(
            target[name].dtype == value.dtype and torch.equal(target[name], value) for name, value in right.items()
        )
    return True


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("where", ["ram", "off"])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_equal_the_oracle(shapes: Path, masks: bool, where: str, workers: int) -> None:
    """In the first epoch and with cached masks; a loader that starts later gives the same (resume)."""
    data = open_coco(str(shapes))
    items, task = data.splits["train"], task_of(masks)
    dataset = DetectionDataset(items, data, open_pictures(items, where), masks)
    for seed in (0, 1):
        task.loader = StepLoader(len(dataset), BATCH, dataset.load, 2, seed=seed, workers=workers)
        for step in range(6):
            assert is_equal(task.batch_at(step), one_by_one(task, dataset, step, seed))
        task.loader = StepLoader(len(dataset), BATCH, dataset.load, 2, seed=seed, workers=workers)
        assert is_equal(task.batch_at(4), one_by_one(task, dataset, 4, seed))
    assert cached(dataset) == (len(items) if where == "ram" else 0)


@pytest.mark.parametrize(
    ("memory", "pictures", "masks"), [(45_000, False, False), (47_811, True, False), (47_812, True, True)]
)
def test_masks_are_cached_only_if_they_fit(
    shapes: Path, memory: int, pictures: bool, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six images of 50 × 50 take 45,000 bytes, the masks of nine objects 2,812; all may take a quarter of it."""
    monkeypatch.setattr(loader, "memory_share", lambda: 4 * memory)
    data = open_coco(str(shapes))
    items = data.splits["train"]
    dataset = DetectionDataset(items, data, open_pictures(items), True)
    for index in range(len(items)):
        dataset.load(index)
    assert dataset.pictures.is_cached == pictures and cached(dataset) == (len(items) if masks else 0)
    boxes = DetectionDataset(items, data, open_pictures(items), False)
    boxes.load(0)
    assert cached(boxes) == pictures


@given(st.integers(0, 4), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_masks_survive_packing(count: int, height: int, width: int, seed: int) -> None:
    """Also if they end within a byte."""
    drawn = np.random.default_rng(seed).integers(0, 2, (count, height, width), dtype=np.uint8)
    objects = Objects(torch.zeros(count, 4), torch.zeros(count).long(), torch.from_numpy(np.packbits(drawn)))
    size = (height, width)
    first, second = make_targets([objects] * 2, [size] * 2, [size] * 2, [False, True], torch.device("cpu"))
    assert torch.equal(first["masks"], torch.from_numpy(drawn))
    assert torch.equal(second["masks"], torch.from_numpy(drawn[:, :, ::-1].copy()))


@pytest.mark.gpu
def test_batches_are_equal_on_a_gpu(shapes: Path) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(unpack_bits(bits.cuda()).cpu(), unpack_bits(bits))
    data = open_coco(str(shapes))
    items, task = data.splits["train"], task_of(True)
    dataset = DetectionDataset(items, data, open_pictures(items, "ram"), True)
    found = []
    for device in ("cpu", "cuda"):
        task.to(device).loader = StepLoader(len(dataset), BATCH, dataset.load, 2, seed=0)
        found.append([task.batch_at(step) for step in range(3)])
    for here, there in zip(*found, strict=True):
        assert here.sizes == there.sizes
        assert torch.allclose(here.images, there.images.cpu(), atol=1e-4)
        for one, other in zip(here.targets, there.targets, strict=True):
            assert torch.equal(one["labels"], other["labels"].cpu()) and torch.equal(one["boxes"], other["boxes"].cpu())
            assert (one["masks"] != other["masks"].cpu()).float().mean().nan_to_num() < 1e-3
