"""detect train and segment train: tiny runs from data to report."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.backbones import factory
from frugalvit.config.dense import DetectConfig
from frugalvit.engine.step import TrainPlan
from frugalvit.errors import UserError
from frugalvit.runs.layout import DENSE_FILES
from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands
from helpers.dense_runs import COMMON, HEADS, detect_config, segment_config
from helpers.dense_samples import edit, make_coco, make_scenes
from helpers.tiny_runs import resolve


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["task"]


def test_detect_writes_scores_weights_and_report(detector: Path) -> None:
    summary = json.loads((detector / "summary.json").read_text())
    for key in ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75", "seconds", "run", "best_step"):
        assert key in summary
    for name in ("config.yaml", "metrics.jsonl", "model/model.safetensors", "transfer.safetensors", "report.html"):
        assert (detector / name).stat().st_size > 0
    page = (detector / "report.html").read_text()
    for title in ("Precision over recall", "box AP"):
        assert title in page
    lines = [json.loads(line) for line in (detector / "metrics.jsonl").read_text().splitlines()]
    assert any("loss_box_reg_3" in line for line in lines if line["split"] == "train")
    assert any("mask_ap" in line for line in lines if line["split"] == "val")
    # All objects are small: other sizes have no score, in files and in the report.
    for kind in ("box", "mask"):
        assert summary[f"{kind}_ap_small"] is not None
        assert summary[f"{kind}_ap_medium"] is None and summary[f"{kind}_ap_large"] is None
        assert f"{kind} ap small" in page and f"{kind} ap large" not in page


def test_val_without_objects_selects_no_best_weights(shapes: Path, tmp_path: Path) -> None:
    empty = make_coco(tmp_path / "empty", side=48)
    edit(empty, "val", lambda content: content.update(annotations=[]))
    summary = commands.train(detect_config(empty, tmp_path / "run", steps=2)).data
    assert summary["box_ap"] is None and summary["val_box_ap"] is None and summary["best_step"] is None


def test_segment_writes_scores_and_report(segmenter: Path) -> None:
    summary = json.loads((segmenter / "summary.json").read_text())
    for key in ("miou", "mean_accuracy", "seconds", "run", "val_miou"):
        assert key in summary
    page = (segmenter / "report.html").read_text()
    assert "IoU" in page and "mIoU" in page
    assert (segmenter / "pictures" / "worst_1.jpg").exists()


def test_reports_show_used_images_and_notes(tmp_path: Path) -> None:
    coco = make_coco(tmp_path / "coco", train=3, val=2, side=40)
    edit(coco, "train", lambda content: content["annotations"][0].update(bbox=[5, 5, 0, 9]))
    scenes = make_scenes(tmp_path / "scenes", train=3, val=2, side=40)
    commands.train(detect_config(coco, tmp_path / "detect", steps=1))
    segment_commands.train(segment_config(scenes, tmp_path / "segment", steps=1))
    for kind, note in (("detect", "instances_train.json: 1 object left out"), ("segment", "ignored labels: 255")):
        stored = json.loads((tmp_path / kind / "data.json").read_text(encoding="utf-8"))
        assert stored["used"] == {"train": 3, "val": 2} and any(note in line for line in stored["notes"])
        page = (tmp_path / kind / "report.html").read_text(encoding="utf-8")
        assert "train: 3 images · val: 2 images" in page and note in page


def test_runs_write_only_known_files_and_overwrite_none(
    detector: Path, segmenter: Path, scenes: Path, tmp_path: Path
) -> None:
    for run in (detector, segmenter):
        assert {path.name for path in run.iterdir()} <= {*DENSE_FILES, ".lock"}
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "worst_1.jpg").write_text("mine")
    with pytest.raises(UserError, match="pictures"):
        segment_commands.train(segment_config(scenes, tmp_path))


@pytest.mark.parametrize("kind", [pytest.param("detect", marks=pytest.mark.slow), "segment"])
def test_a_resumed_run_has_the_same_weights(
    kind: str, tmp_path: Path, shapes: Path, scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another network would be chosen for its images now."""
    command, make, data = (
        (commands, detect_config, shapes) if kind == "detect" else (segment_commands, segment_config, scenes)
    )
    whole = make(data, tmp_path / "whole", report=False, save_every=2)
    command.train(whole)  # type: ignore[arg-type]
    stopped = make(data, tmp_path / "stopped", report=False, save_every=2)
    original = commands.DetectionTask.after_step if kind == "detect" else segment_commands.SegmentationTask.after_step

    def stop(self: Any, step: int, skipped: torch.Tensor) -> None:
        if step == 2:
            raise KeyboardInterrupt
        original(self, step, skipped)

    task = commands.DetectionTask if kind == "detect" else segment_commands.SegmentationTask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            command.train(stopped)  # type: ignore[arg-type]
    monkeypatch.setattr(factory, "adapt", lambda *_: ({"mlp_ratio": 3.0}, []))
    command.train(type(stopped).parse({"resume": str(tmp_path / "stopped"), "device": "cpu"}))  # type: ignore[arg-type]
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_changed_annotations_are_warned_of_on_resume(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data = (
        (detect_config, make_coco(tmp_path / "data", side=48))
        if kind == "detect"
        else (segment_config, make_scenes(tmp_path / "data", side=40))
    )
    command: Any = commands if kind == "detect" else segment_commands
    settings = make(data, tmp_path / "run", report=False, steps=2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def resume() -> str:
        capsys.readouterr()
        with pytest.raises(KeyboardInterrupt):
            command.train(type(settings).parse({"resume": str(tmp_path / "run"), "device": "cpu"}))
        return capsys.readouterr().err

    monkeypatch.setattr(command.DetectionTask if kind == "detect" else command.SegmentationTask, "after_step", stop)
    with pytest.raises(KeyboardInterrupt):
        command.train(settings)
    for file in data.rglob("*.*"):
        os.utime(file, (1, 1))  # a copy has other times
    assert "images or annotations" not in resume()
    if kind == "detect":
        edit(data, "train", lambda content: content["annotations"][0].update(bbox=[1.0, 1.0, 9.0, 9.0]))
    else:
        mask = data / "masks" / "train" / "0.png"
        Image.fromarray(np.asarray(Image.open(mask)).T).save(mask)
    assert "images or annotations" in resume()


@pytest.mark.parametrize("where", ["ram", "off"])
def test_truncated_images_are_found_before_training(where: str, tmp_path: Path) -> None:
    for name in ("whole.jpg", "short.jpg"):
        Image.effect_noise((64, 64), 60).save(tmp_path / name)
    whole = (tmp_path / "short.jpg").read_bytes()
    (tmp_path / "short.jpg").write_bytes(whole[: len(whole) // 2])
    pictures = ImageReader([tmp_path / "whole.jpg", tmp_path / "short.jpg"], [(64, 64)] * 2, where=where)
    assert pictures.find_bad(1, max_bad=0.5) == [1]


@pytest.mark.parametrize("kind", ["detect", "segment"])
@pytest.mark.parametrize(("split", "message"), [("auto", "one image"), ("given", "--split auto")])
def test_one_image_is_too_few_and_makes_no_folder(kind: str, split: str, message: str, tmp_path: Path) -> None:
    make, config = (make_coco, detect_config) if kind == "detect" else (make_scenes, segment_config)
    command: Any = commands if kind == "detect" else segment_commands
    data = make(tmp_path / "data", train=1, val=0, side=48)
    (data / "instances_val.json").unlink(missing_ok=True)
    for folder in data.glob("*/val"):
        folder.rmdir()
    with pytest.raises(UserError, match=message):
        command.train(config(data, tmp_path / "run", split=split))
    assert not (tmp_path / "run").exists()


def test_epochs_count_steps_of_the_accumulated_batch(tmp_path: Path) -> None:
    config = detect_config(tmp_path, tmp_path / "run", steps=None, epochs=4, batch=10, accumulate=4)
    plan = TrainPlan.from_config(resolve(config, 100), 100, 1)
    assert (plan.images_per_step, plan.steps_per_epoch, plan.steps) == (8, 12, 48)


@pytest.mark.slow
def test_init_uses_the_backbone_of_a_run(segmenter: Path, shapes: Path, tmp_path: Path) -> None:
    """The architecture comes from the folder, and the detector starts from its weights."""
    values = {**COMMON, "backbone": "auto", "backbone_args": {}, "steps": 1, "lr": 1e-12, "init": str(segmenter)}
    values |= {"detector": HEADS, "data": str(shapes), "out": str(tmp_path / "run"), "report": False}
    commands.train(DetectConfig.parse(values))
    before = {name: value for name, value in weights(segmenter).items() if ".pyramid.backbone.model." in f".{name}"}
    best = torch.load(segmenter / "checkpoints" / "best.pt", weights_only=True)["task"]
    after = weights(tmp_path / "run")
    assert before
    for name in before:
        ours = after[name.replace("net.pyramid", "net.features.pyramid")]
        assert torch.allclose(ours, best[name], atol=1e-6), name


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_the_rate_does_not_depend_on_init(
    kind: str, shapes: Path, scenes: Path, segmenter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a comparison of initial weights would differ in the rate, too."""
    command: Any = commands if kind == "detect" else segment_commands
    make, data = (detect_config, shapes) if kind == "detect" else (segment_config, scenes)
    found: list[float] = []

    def stop(config: Any, *_: object) -> None:
        found.append(config.lr)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "make_schedule", stop)
    for name, start in (("random", {}), ("init", {"init": str(segmenter)})):
        with pytest.raises(KeyboardInterrupt):
            command.train(make(data, tmp_path / name, lr="auto", **start))
    anchor = 1e-4 if kind == "detect" else 6e-5
    assert found == pytest.approx([10 * anchor * math.sqrt(2 / 16)] * 2, rel=0.05)


def test_boxes_without_masks_are_trained_on(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "boxes", train=3, val=2, side=40)
    for split in ("train", "val"):
        edit(data, split, lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    free = {"evaluate_every": "auto", "report": False}
    found = commands.train(detect_config(data, tmp_path / "run", steps=1, **free)).data
    assert "box_ap" in found and "mask_ap" not in found
    decided = {d["name"]: d["value"] for d in json.loads((tmp_path / "run" / "decisions.json").read_text())}
    assert (decided["recipe"], decided["evaluate_every"]) == ("detect-small", 1)
    with pytest.raises(UserError, match="--masks"):
        commands.train(detect_config(data, tmp_path / "other", masks=True))


def test_objects_whose_masks_are_all_empty(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "empty", train=3, val=2, side=40)
    outside = [[-9.0, -9, -5, -9, -5, -5]]
    edit(data, "train", lambda content: [entry.update(segmentation=outside) for entry in content["annotations"]])
    found = commands.open_annotations(detect_config(data, tmp_path / "run"))
    assert found.splits["train"][0].learnable() and not found.has_masks()
    assert any("instances_train.json: 6 of 6 objects" in note for note in found.notes)
    with pytest.raises(UserError, match="--masks"):
        commands.open_annotations(detect_config(data, tmp_path / "run", masks=True))
    edit(data, "train", lambda content: content.update(annotations=[]))
    with pytest.raises(UserError, match="no objects"):
        commands.open_annotations(detect_config(data, tmp_path / "run"))


def test_models_of_other_data_are_refused(detector: Path, segmenter: Path, scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run of 'frugalvit segment', not of 'detect'"):
        commands.evaluate(commands.DetectEvalConfig(model=str(segmenter), data="x"))
    other = make_coco(tmp_path / "other", train=2, val=1, side=40)
    for split in ("train", "val"):
        edit(other, split, lambda content: content["categories"][0].update(name="box"))
    with pytest.raises(UserError, match=r"objects of category 3 'box', which .*detector does not have"):
        commands.evaluate(commands.DetectEvalConfig(model=str(detector), data=str(other)))
    with pytest.raises(UserError, match="--ignore-index"):
        segment_commands.evaluate(
            segment_commands.SegmentEvalConfig(model=str(segmenter), data=str(scenes), ignore_index=1)
        )
    with pytest.raises(UserError, match="has no split 'test'"):
        segment_commands.evaluate(
            segment_commands.SegmentEvalConfig(model=str(segmenter), data=str(scenes), split="test")
        )


def test_compare_trains_only_missing_runs(scenes: Path, tmp_path: Path) -> None:
    from frugalvit.comparison import dense
    from frugalvit.config.dense import SegmentCompareConfig

    values = {**COMMON, "steps": 1, "decoder": {"channels": 16}, "data": str(scenes), "report": False}
    values |= {
        "out": str(tmp_path / "both"),
        "seeds": 2,
        "settings": ["flat: photometric=false", "full: photometric=true"],
    }
    config = SegmentCompareConfig.parse(values)
    found = dense.segment(config).data
    assert found["metric"] == "miou" and list(found["settings"]) == ["flat", "full"]
    assert found["differences"]["flat"]["count"] == 2
    before = (tmp_path / "both" / "flat" / "seed_1" / "summary.json").stat().st_mtime_ns
    assert dense.segment(config).data == found
    assert (tmp_path / "both" / "flat" / "seed_1" / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="settings"):
        dense.segment(SegmentCompareConfig.parse({**values, "settings": []}))
    with pytest.raises(UserError, match="decoder"):
        dense.segment(SegmentCompareConfig.parse({**values, "decoder": {"channels": 24}}))


@pytest.mark.parametrize("head", ["mask-rcnn", pytest.param("cascade", marks=pytest.mark.slow)])
def test_detectors_train_in_half_precision(shapes: Path, tmp_path: Path, head: str) -> None:
    found = commands.train(detect_config(shapes, tmp_path / "run", head=head, precision="bf16", steps=2)).data
    assert found["skipped_steps"] == 0
