"""Detectors on data where only some objects have a mask."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frugalvit.cli.main import main
from frugalvit.config.dense import DetectConfig
from frugalvit.tasks.dense.predictors import load_detector
from frugalvit.tasks.detection import commands
from helpers.dense_models import detector
from helpers.dense_runs import detect_config
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
        places = torch.where(there, there.cumsum(0) - 1, -1)
        found.append({"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks[there], "mask_of": places})
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
    _, _, whole = losses(head, [[True, True], [True, True]])
    net, images, found = losses(head, [[True, False], [False, False]])
    for name, value in found.items():
        assert torch.equal(value, whole[name]) == (name != "loss_mask"), name
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


def strip(share: float, seed: int = 0) -> Any:
    """Take the masks of a share of the objects."""

    def change(content: dict[str, Any]) -> None:
        entries = content["annotations"]
        for place in np.random.default_rng(seed).permutation(len(entries))[: round(share * len(entries))]:
            entries[place].pop("segmentation", None)

    return change


@pytest.fixture
def half(tmp_path: Path) -> Path:
    data = make_coco(tmp_path / "half", train=10, val=4, side=48)
    for split in ("train", "val"):
        edit(data, split, strip(0.5))
    return data


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["task"]


def test_a_run_trains_scores_and_resumes(half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"report": False, "save_every": 2}
    found = commands.train(detect_config(half, tmp_path / "whole", **settings)).data
    told = capsys.readouterr().err
    assert "instances_train.json: 10 of 20 objects" in told and "instances_val.json: 4 of 8 objects" in told
    assert "10 of 20 training objects have one" in told
    assert found["mask_ap"] is not None and found["box_ap"] is not None
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["loss_mask"] > 0 for line in lines if line["split"] == "train")
    original = commands.DetectionTask.after_step

    def stop(self: Any, step: int, skipped: Tensor) -> None:
        if step == 2:
            raise KeyboardInterrupt
        original(self, step, skipped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands.DetectionTask, "after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            commands.train(detect_config(half, tmp_path / "stopped", **settings))
    commands.train(DetectConfig.parse({"resume": str(tmp_path / "stopped"), "device": "cpu"}))
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_masks_option_overrides_auto(half: Path, tmp_path: Path) -> None:
    found = commands.train(detect_config(half, tmp_path / "off", masks=False, steps=1, report=False)).data
    assert "mask_ap" not in found
    edit(half, "train", strip(0.95))
    few = commands.train(detect_config(half, tmp_path / "few", steps=1, report=False)).data
    (decided,) = (d for d in json.loads((tmp_path / "few" / "decisions.json").read_text()) if d["name"] == "masks")
    assert "mask_ap" not in few and decided["value"] is False
    assert decided["reason"].startswith("1 of 20 training objects has one")
    assert "mask_ap" in commands.train(detect_config(half, tmp_path / "on", masks=True, steps=1, report=False)).data


def test_classes_without_training_masks_get_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's masks of such a class would be random."""
    data = make_coco(tmp_path / "data", train=10, val=2, side=48)

    def discs(content: dict[str, Any]) -> None:
        for entry in content["annotations"]:
            if entry["category_id"] == 17:
                del entry["segmentation"]

    edit(data, "train", discs)
    run = tmp_path / "run"
    commands.train(detect_config(data, run, steps=2, report=False))
    assert "predicted for disc" in capsys.readouterr().err
    words = [str(run), str(data / "images" / "val_0.png"), "--threshold", "0.0", "--device", "cpu", "--quiet"]
    assert main(["detect", "predict", *words, "--out", str(tmp_path / "found")]) == 0
    objects = json.loads((tmp_path / "found" / "detections.json").read_text())["annotations"]
    assert {entry["category_id"] for entry in objects} == {3, 17}
    assert all(("segmentation" in entry) == (entry["category_id"] == 3) for entry in objects)
    picture = data / "images" / "val_0.png"
    for found in load_detector(run, device="cpu").predict(str(picture), threshold=0.0)[0]:
        assert (found.mask is None) == (found.name == "disc")
    scored = commands.evaluate(
        commands.DetectEvalConfig(model=str(run), data=str(data), device="cpu", out=str(tmp_path / "scored"))
    ).data
    assert scored["mask_ap"] is not None
