"""Detectors on data where only some objects have a mask."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from frugalvit.config.dense import DetectConfig
from frugalvit.tasks.dense.predictors import load_detector
from frugalvit.tasks.detection import commands
from helpers.dense_models import detector
from helpers.dense_runs import Kind
from helpers.dense_samples import edit, make_coco

HEADS = ["mask-rcnn", "cascade"]
SIZES = [(64, 64), (64, 64)]


def targets(known: list[list[bool]]) -> list[dict[str, Tensor]]:
    """Two images with two objects each, of which the ``known`` have masks: the left halves of their boxes."""
    found = []
    for flags in known:
        boxes = torch.tensor([[4.0, 4, 30, 34], [40.0, 20, 60, 40]])
        masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
        masks[0, 4:34, 4:17] = masks[1, 20:40, 40:50] = 1
        there = torch.tensor(flags)
        indices = torch.where(there, there.cumsum(0) - 1, -1)
        found.append({"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks[there], "mask_of": indices})
    return found


def losses(head: str, known: list[list[bool]]) -> tuple[Any, Tensor, dict[str, Tensor]]:
    net = detector(head)
    torch.manual_seed(1)
    images = torch.rand(2, 3, 64, 64, requires_grad=True)
    torch.manual_seed(2)
    return net, images, net(images, SIZES, targets(known))


@pytest.mark.parametrize("head", HEADS)
def test_boxes_train_on_all_objects(head: str) -> None:
    """The same regions are sampled, so that the box losses are equal to the bit."""
    _, _, full = losses(head, [[True, True], [True, True]])
    net, images, found = losses(head, [[True, False], [False, False]])
    for name, value in found.items():
        assert torch.equal(value, full[name]) == (name != "loss_mask"), name
    (seen,) = torch.autograd.grad(found["loss_mask"], images, retain_graph=True)
    assert seen[0].any() and not seen[1].any(), "the second image has no mask"
    boxes = sum(value for name, value in found.items() if name != "loss_mask")
    assert torch.autograd.grad(boxes, images, retain_graph=True)[0][1].any()  # type: ignore[arg-type]
    weights = [p for name, p in net.named_parameters() if "mask_predictor.mask_fcn_logits" in name]
    for gradient in torch.autograd.grad(found["loss_mask"], weights):
        assert gradient[1].any() and not gradient[[0, 2, 3]].any(), "class 3 has no mask"


@pytest.mark.parametrize("head", HEADS)
def test_a_batch_without_any_mask(head: str) -> None:
    """All parameters have a gradient, as distributed training needs; that of the mask head is zero."""
    net, _, found = losses(head, [[False, False], [False, False]])
    assert found["loss_mask"] == 0
    sum(found.values()).backward()  # type: ignore[union-attr]
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert not ("mask_" in name and parameter.grad.any()), name


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """Data in which half of the objects have no mask."""
    data = make_coco(tmp_path / "half", train=10, val=4, side=48)
    for split in ("train", "val"):
        edit(data, split, lambda c: [e.pop("segmentation") for i, e in enumerate(c["annotations"]) if i % 4 in (1, 2)])
    return data


def test_a_run_trains_scores_and_resumes(half: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"report": False, "save_every": 2}
    scores = Kind("detect").train(half, tmp_path / "full", **options)
    assert scores["mask_ap"] is not None and scores["box_ap"] is not None
    lines = [json.loads(line) for line in (tmp_path / "full" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["loss_mask"] > 0 for line in lines if line["split"] == "train")
    original = commands.DetectionTask.after_step

    def stop(self: Any, step: int, skipped: Tensor) -> None:
        if step == 2:
            raise KeyboardInterrupt
        original(self, step, skipped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands.DetectionTask, "after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            Kind("detect").train(half, tmp_path / "stopped", **options)
    commands.train(DetectConfig.parse({"resume": str(tmp_path / "stopped"), "device": "cpu"}))
    first, second = (
        torch.load(tmp_path / run / "checkpoints" / "last.pt", weights_only=True)["task"] for run in ("full", "stopped")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_masks_option_overrides_auto(half: Path, tmp_path: Path) -> None:
    assert "mask_ap" not in Kind("detect").train(half, tmp_path / "off", masks=False, steps=1, report=False)
    edit(half, "train", lambda content: [entry.pop("segmentation", None) for entry in content["annotations"][1:]])
    few = Kind("detect").train(half, tmp_path / "few", steps=1, report=False)
    (decided,) = (d for d in json.loads((tmp_path / "few" / "decisions.json").read_text()) if d["name"] == "masks")
    assert "mask_ap" not in few and decided["value"] is False
    assert decided["reason"].startswith("1 of 20 training objects have one")
    assert "mask_ap" in Kind("detect").train(half, tmp_path / "on", masks=True, steps=1, report=False)


def test_classes_without_training_masks_get_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's masks of such a class would be random."""
    data, run = make_coco(tmp_path / "data", train=10, val=2, side=48), tmp_path / "run"
    edit(
        data, "train", lambda content: [e.pop("segmentation") for e in content["annotations"] if e["category_id"] == 17]
    )
    Kind("detect").train(data, run, steps=2, report=False)
    assert "predicted for disc" in capsys.readouterr().err
    objects = load_detector(run, device="cpu").predict(str(data / "images" / "val_0.png"), threshold=0.0)[0]
    assert {entry.name for entry in objects} == {"square", "disc"}
    assert all((entry.mask is None) == (entry.name == "disc") for entry in objects)
    assert Kind("detect").evaluate(run, data, out=str(tmp_path / "scored"))["mask_ap"] is not None
