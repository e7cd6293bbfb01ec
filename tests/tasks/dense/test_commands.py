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
from frugalvit.comparison.compare import compare
from frugalvit.config.dense import DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.errors import UserError
from frugalvit.runs.layout import DENSE_FILES
from frugalvit.tasks.detection import commands
from helpers.dense_runs import COMMON, HEADS, Kind
from helpers.dense_samples import edit, make_coco


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
    # All objects are small: other sizes have no score, and the page does not print the same AP twice.
    for kind in ("box", "mask"):
        assert summary[f"{kind}_ap_small"] is not None
        assert summary[f"{kind}_ap_medium"] is None and summary[f"{kind}_ap_large"] is None
        assert f"{kind} AP, small objects" not in page and f"{kind} AP, large" not in page


def test_val_without_objects_selects_no_best_weights(tmp_path: Path) -> None:
    empty = make_coco(tmp_path / "empty", side=48)
    edit(empty, "val", lambda content: content.update(annotations=[]))
    summary = Kind("detect").train(empty, tmp_path / "run", steps=2)
    assert summary["box_ap"] is None and summary["val_box_ap"] is None and summary["best_step"] is None


def test_segment_writes_scores_and_report(segmenter: Path) -> None:
    summary = json.loads((segmenter / "summary.json").read_text())
    for key in ("miou", "mean_accuracy", "seconds", "run", "val_miou"):
        assert key in summary
    page = (segmenter / "report.html").read_text()
    assert "IoU" in page and "mIoU" in page
    assert (segmenter / "pictures" / "worst_1.jpg").exists()


def test_reports_show_used_images_and_notes(model: Path) -> None:
    stored = json.loads((model / "data.json").read_text(encoding="utf-8"))
    page = (model / "report.html").read_text(encoding="utf-8")
    assert stored["used"] == {"train": 8, "val": 4} and "train: 8 images · val: 4 images" in page
    assert all(note in page for note in stored["notes"])


def test_runs_write_only_known_files_and_overwrite_none(model: Path, kind: Kind, data: Path, tmp_path: Path) -> None:
    assert {path.name for path in model.iterdir()} <= {*DENSE_FILES, ".lock"}
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "worst_1.jpg").write_text("mine")
    with pytest.raises(UserError, match="pictures"):
        kind.train(data, tmp_path)


def interrupt_after(step: int, kind: Kind, patch: pytest.MonkeyPatch) -> None:
    original = kind.task.after_step

    def stop(self: Any, current: int, skipped: torch.Tensor) -> None:
        if current == step:
            raise KeyboardInterrupt
        original(self, current, skipped)

    patch.setattr(kind.task, "after_step", stop)


def resume(kind: Kind, run: Path) -> None:
    config: Any = DetectConfig if kind.verb == "detect" else SegmentConfig
    kind.commands.train(config.parse({"resume": str(run), "device": "cpu"}))


def test_a_resumed_run_has_the_same_weights(
    kind: Kind, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another network would be chosen for its images now."""
    options: dict[str, Any] = {"report": False, "save_every": 2}
    kind.train(data, tmp_path / "full", **options)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(2, kind, patch)
        with pytest.raises(KeyboardInterrupt):
            kind.train(data, tmp_path / "stopped", **options)
    monkeypatch.setattr(factory, "adapt", lambda *_: ({"mlp_ratio": 3.0}, []))
    resume(kind, tmp_path / "stopped")
    first, second = weights(tmp_path / "full"), weights(tmp_path / "stopped")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_changed_annotations_are_warned_of_on_resume(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = kind.make_data(tmp_path / "data", side=48)
    interrupt_after(0, kind, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        kind.train(data, tmp_path / "run", report=False, steps=2)

    def resumed() -> str:
        capsys.readouterr()
        with pytest.raises(KeyboardInterrupt):
            resume(kind, tmp_path / "run")
        return capsys.readouterr().err

    for file in data.rglob("*.*"):
        os.utime(file, (1, 1))  # a copy has other times
    assert "the annotations of" not in resumed()
    if kind.verb == "detect":
        edit(data, "train", lambda content: content["annotations"][0].update(bbox=[1.0, 1.0, 9.0, 9.0]))
    else:
        mask = data / "masks" / "train" / "0.png"
        Image.fromarray(np.asarray(Image.open(mask)).T).save(mask)
    assert "the annotations of" in resumed()


@pytest.mark.parametrize("split", ["auto", "given"])
def test_one_image_is_too_few_and_makes_no_folder(kind: Kind, split: str, tmp_path: Path) -> None:
    data = kind.make_data(tmp_path / "data", train=1, val=0, side=48)
    (data / "instances_val.json").unlink(missing_ok=True)
    for folder in data.glob("*/val"):
        folder.rmdir()
    with pytest.raises(UserError, match="--split auto"):
        kind.train(data, tmp_path / "run", split=split)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_init_uses_the_backbone_of_a_run(segmenter: Path, shapes: Path, tmp_path: Path) -> None:
    """The architecture comes from the folder, and the detector starts from its weights."""
    values = {**COMMON, "backbone": "auto", "backbone_args": {}, "steps": 1, "lr": 1e-12, "init": str(segmenter)}
    values |= {"detector": HEADS, "data": str(shapes), "out": str(tmp_path / "run"), "report": False}
    commands.train(DetectConfig.parse(values))
    best = torch.load(segmenter / "checkpoints" / "best.pt", weights_only=True)["task"]
    before = {name: value for name, value in best.items() if ".pyramid.backbone.model." in f".{name}"}
    after = weights(tmp_path / "run")
    assert before
    for name, value in before.items():
        assert torch.allclose(after[name.replace("net.pyramid", "net.features.pyramid")], value, atol=1e-6), name


def test_the_rate_does_not_depend_on_init(
    kind: Kind, data: Path, segmenter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a comparison of initial weights would differ in the rate, too."""
    rates: list[float] = []

    def stop(config: Any, *_: object) -> None:
        rates.append(config.lr)
        raise KeyboardInterrupt

    experiment = "DetectExperiment" if kind.verb == "detect" else "SegmentExperiment"
    monkeypatch.setattr(getattr(kind.commands, experiment), "make_schedule", staticmethod(stop))
    for name, start in (("random", {}), ("init", {"init": str(segmenter)})):
        with pytest.raises(KeyboardInterrupt):
            kind.train(data, tmp_path / name, lr="auto", **start)
    anchor = 1e-4 if kind.verb == "detect" else 6e-5
    assert rates == pytest.approx([10 * anchor * math.sqrt(2 / 16)] * 2, rel=0.05)


def test_boxes_without_masks_are_trained_on(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "boxes", train=3, val=2, side=40)
    for split in ("train", "val"):
        edit(data, split, lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    scores = Kind("detect").train(data, tmp_path / "run", steps=1, evaluate_every="auto", report=False)
    assert "box_ap" in scores and "mask_ap" not in scores
    decided = {d["name"]: d["value"] for d in json.loads((tmp_path / "run" / "decisions.json").read_text())}
    assert (decided["recipe"], decided["evaluate_every"]) == ("detect-small", 1)
    with pytest.raises(UserError, match="--masks"):
        Kind("detect").train(data, tmp_path / "other", masks=True)
    edit(data, "train", lambda content: content.update(annotations=[]))
    with pytest.raises(UserError, match="no objects"):
        Kind("detect").train(data, tmp_path / "other")


def test_models_of_other_data_are_refused(detector: Path, segmenter: Path, scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run of 'frugalvit segment', not of 'detect'"):
        Kind("detect").evaluate(segmenter, scenes)
    other = make_coco(tmp_path / "other", train=2, val=1, side=40)
    for split in ("train", "val"):
        edit(other, split, lambda content: content["categories"][0].update(name="box"))
    with pytest.raises(UserError, match="category 'box'"):
        Kind("detect").evaluate(detector, other)
    with pytest.raises(UserError, match="--ignore-index"):
        Kind("segment").evaluate(segmenter, scenes, ignore_index=1)


def test_compare_trains_only_missing_runs(scenes: Path, tmp_path: Path) -> None:
    values = {**COMMON, "steps": 1, "decoder": {"channels": 16}, "data": str(scenes), "report": False}
    values |= {
        "out": str(tmp_path / "both"),
        "seeds": 2,
        "settings": ["flat: photometric=false", "full: photometric=true"],
    }
    config = SegmentCompareConfig.parse(values)
    result = compare(config).data
    assert result["metric"] == "miou" and list(result["settings"]) == ["flat", "full"]
    assert result["differences"]["flat"]["count"] == 2
    before = (tmp_path / "both" / "flat" / "seed_1" / "summary.json").stat().st_mtime_ns
    assert compare(config).data == result
    assert (tmp_path / "both" / "flat" / "seed_1" / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="decoder"):
        compare(SegmentCompareConfig.parse({**values, "decoder": {"channels": 24}}))


@pytest.mark.parametrize("head", ["mask-rcnn", pytest.param("cascade", marks=pytest.mark.slow)])
def test_detectors_train_in_half_precision(shapes: Path, tmp_path: Path, head: str) -> None:
    assert Kind("detect").train(shapes, tmp_path / "run", head=head, precision="bf16", steps=2)["skipped_steps"] == 0
