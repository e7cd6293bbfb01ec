"""The detections of an image do not depend on the other images of its batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from frugalvit import create_backbone
from frugalvit.data.formats.coco import open_coco
from frugalvit.tasks.dense.checkpoint import single_device_fabric
from frugalvit.tasks.dense.commands import open_pictures
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.dataset import DetectionDataset, View, padded_size
from frugalvit.tasks.detection.layers import DetectorSpec
from frugalvit.tasks.detection.model import Detector
from frugalvit.tasks.detection.task import DetectionTask
from helpers.dense_samples import edit, make_coco, resize

SHAPES = [(40, 64), (64, 40), (40, 40), (64, 40), (30, 90), (41, 64)]


def task_of(head: str, masks: bool) -> DetectionTask:
    torch.manual_seed(0)
    backbone = create_backbone("swin_nano", img_size=64, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    spec = DetectorSpec(2, head, masks=masks, channels=16, hidden=32, anchors=2, proposals=10, samples=32)
    task = DetectionTask(Detector(Pyramid(backbone), spec), View(48))
    task.fabric = single_device_fabric("cpu")
    return task.eval()


def noise() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (3, *shape), dtype=torch.uint8, generator=random) for shape in SHAPES]


def are_alike(found: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    assert len(found) == len(other) > 0
    for one, two in zip(found, other, strict=True):
        assert one.keys() == two.keys() and one["label"] == two["label"]
        assert one["score"] == pytest.approx(two["score"], abs=1e-4)
        assert one["bbox"] == pytest.approx(two["bbox"], abs=1e-2)
    return True


@pytest.mark.parametrize("head", ["mask-rcnn", "cascade"])
@pytest.mark.parametrize("masks", [True, False])
def test_detections_are_equal_in_batches_and_alone(head: str, masks: bool) -> None:
    task, pictures = task_of(head, masks), noise()
    together = task.detect(pictures)
    for pixels, found in zip(pictures, together, strict=True):
        assert are_alike(found, task.detect([pixels])[0])
    assert all(("segmentation" in entry) == masks for found in together for entry in found)


@pytest.mark.parametrize("batch", [2, 3, 16])
def test_batches_have_one_size_and_results_are_in_order(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_folder = make_coco(tmp_path / "data", train=1, val=len(SHAPES), side=40)
    for position, shape in enumerate(SHAPES):
        resize(data_folder / "images" / f"val_{position}.png", shape)

    def change(content: dict[str, Any]) -> None:
        for entry, (height, width) in zip(content["images"], SHAPES, strict=True):
            entry.update(height=height, width=width)
        content["annotations"] = []

    edit(data_folder, "val", change)
    data, task = open_coco(str(data_folder)), task_of("mask-rcnn", False)
    items = data.splits["val"]
    dataset = DetectionDataset(items, data, open_pictures(items, "ram"), False)
    task.eval_batch = 1
    alone = task.find(dataset)
    batches: list[int] = []
    original = task.net.forward
    monkeypatch.setattr(
        task.net, "forward", lambda images, *rest: (batches.append(len(images)), original(images, *rest))[1]
    )
    task.eval_batch = batch
    found = task.find(dataset)
    assert [entry["image"] for entry in found] == [entry["image"] for entry in alone]
    assert are_alike(found, alone)
    assert sum(batches) == len(SHAPES) and max(batches) > 1
    assert all(size < padded <= size + 32 for size in range(1, 99) for padded in padded_size((size, size)))
