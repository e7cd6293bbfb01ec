"""detect and segment from the command line: seconds, but the whole way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO
from PIL import Image

from frugalvit.cli import main
from frugalvit.config.transfer import DetectConfig, DetectEvalConfig, SegmentConfig
from frugalvit.errors import UserError
from frugalvit.transfer import detect_commands, running, segment_commands
from frugalvit.transfer.feed import Pictures

from .samples import edit, make_coco, make_scenes

TINY = {"embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4]}
COMMON: dict[str, Any] = {
    "backbone": "swin_nano", "backbone_args": TINY, "img_size": 32, "steps": 4, "batch": 2, "device": "cpu", "lr": 1e-3,
    "evaluate_every": 2, "log_every": 1, "workers": 1,
}  # fmt: skip
HEADS = {"channels": 16, "hidden": 32, "proposals": 30, "samples": 32}


def detect_config(data: Path, out: Path, **more: Any) -> DetectConfig:
    return DetectConfig.parse({**COMMON, "detector": HEADS, "data": str(data), "out": str(out), **more})


def segment_config(data: Path, out: Path, **more: Any) -> SegmentConfig:
    return SegmentConfig.parse({**COMMON, "decoder": {"channels": 16}, "data": str(data), "out": str(out), **more})


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coco(tmp_path_factory.mktemp("coco") / "shapes", side=48)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes") / "shapes", side=40)


@pytest.fixture(scope="module")
def detector(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "detector"
    detect_commands.train(detect_config(shapes, out, head="cascade"))
    return out


@pytest.fixture(scope="module")
def segmenter(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "segmenter"
    segment_commands.train(segment_config(scenes, out))
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["task"]


def test_a_detection_run_leaves_everything(detector: Path) -> None:
    summary = json.loads((detector / "summary.json").read_text())
    for key in ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75", "seconds", "run", "best_step"):
        assert key in summary
    for name in ("config.yaml", "metrics.jsonl", "model/model.safetensors", "transfer.safetensors", "report.html"):
        assert (detector / name).stat().st_size > 0
    page = (detector / "report.html").read_text()
    for words in ("Precision over recall", "Classes", "Best pictures", "Worst pictures", "box AP"):
        assert words in page
    lines = [json.loads(line) for line in (detector / "metrics.jsonl").read_text().splitlines()]
    assert any("loss_box_reg_3" in line for line in lines if line["split"] == "train")
    assert any("mask_ap" in line for line in lines if line["split"] == "val")
    # All objects are small: what is not there has no score, in files and on the page.
    for kind in ("box", "mask"):
        assert summary[f"{kind}_ap_small"] is not None
        assert summary[f"{kind}_ap_medium"] is None and summary[f"{kind}_ap_large"] is None
        assert f"{kind} ap small" in page and f"{kind} ap large" not in page


def test_images_without_objects_choose_no_best_weights(shapes: Path, tmp_path: Path) -> None:
    empty = make_coco(tmp_path / "empty", side=48)
    edit(empty, "val", lambda content: content.update(annotations=[]))
    summary = detect_commands.train(detect_config(empty, tmp_path / "run", steps=2)).data
    assert summary["box_ap"] is None and summary["val_box_ap"] is None and summary["best_step"] is None
    assert summary["weights"].startswith("those of the last step: no score on val")


def test_a_segmentation_run_leaves_everything(segmenter: Path) -> None:
    summary = json.loads((segmenter / "summary.json").read_text())
    for key in ("miou", "mean_accuracy", "seconds", "run", "val_miou"):
        assert key in summary
    page = (segmenter / "report.html").read_text()
    for words in ("Classes", "IoU", "Best pictures", "mIoU"):
        assert words in page
    assert (segmenter / "pictures" / "worst_1.jpg").exists()


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_a_resumed_run_ends_as_if_never_stopped(kind: str, tmp_path: Path, shapes: Path, scenes: Path) -> None:
    command, make, data = (
        (detect_commands, detect_config, shapes) if kind == "detect" else (segment_commands, segment_config, scenes)
    )
    whole = make(data, tmp_path / "whole", report=False, save_every=2)
    command.train(whole)  # type: ignore[arg-type]
    stopped = make(data, tmp_path / "stopped", report=False, save_every=2)
    original = detect_commands.DetectTask.after_step if kind == "detect" else segment_commands.SegmentTask.after_step

    def stop(self: Any, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt
        original(self, step)

    task = detect_commands.DetectTask if kind == "detect" else segment_commands.SegmentTask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            command.train(stopped)  # type: ignore[arg-type]
    command.train(type(stopped).parse({"resume": str(tmp_path / "stopped"), "device": "cpu"}))  # type: ignore[arg-type]
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_changed_masks_and_annotations_are_said(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data = (
        (detect_config, make_coco(tmp_path / "data", side=48))
        if kind == "detect"
        else (segment_config, make_scenes(tmp_path / "data", side=40))
    )
    command: Any = detect_commands if kind == "detect" else segment_commands
    settings = make(data, tmp_path / "run", report=False, steps=2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def resume() -> str:
        capsys.readouterr()
        with pytest.raises(KeyboardInterrupt):
            command.train(type(settings).parse({"resume": str(tmp_path / "run"), "device": "cpu"}))
        return capsys.readouterr().err

    monkeypatch.setattr(command.DetectTask if kind == "detect" else command.SegmentTask, "after_step", stop)
    with pytest.raises(KeyboardInterrupt):
        command.train(settings)
    for file in data.rglob("*.*"):
        os.utime(file, (1, 1))  # as a copy has other times
    assert "have changed" not in resume()
    if kind == "detect":
        edit(data, "train", lambda content: content["annotations"][0].update(bbox=[1.0, 1.0, 9.0, 9.0]))
    else:
        mask = data / "masks" / "train" / "0.png"
        Image.fromarray(np.asarray(Image.open(mask)).T).save(mask)
    assert "the masks or annotations of" in resume()


def test_eval_gives_the_scores_of_training(
    detector: Path, segmenter: Path, shapes: Path, scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, data, kind, key in ((detector, shapes, "detect", "box_ap"), (segmenter, scenes, "segment", "miou")):
        assert main([kind, "eval", str(run), str(data), "--device", "cpu", "--json", "--quiet"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found[key] == pytest.approx(json.loads((run / "summary.json").read_text())[key], abs=1e-6)
        assert found["scored_images"] == 4
    words = [str(detector), str(shapes / "instances_train.json"), "--device", "cpu", "--json", "--quiet"]
    assert main(["detect", "eval", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scored_on"] == "instances_train.json"
    assert found["scored_images"] == 8 and found["box_ap_large"] is None and found["box_ap_small"] is not None


def test_multi_scale_eval_says_both(segmenter: Path, scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--multi-scale", "--test.scales", "0.75", "1", "--json", "--quiet", "--device", "cpu"]
    assert main(["segment", "eval", str(segmenter), str(scenes), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["single_scale_miou"] == pytest.approx(json.loads((segmenter / "summary.json").read_text())["miou"])
    assert 0 <= found["miou"] <= 1


def test_predict_detect_writes_pictures_and_coco(
    detector: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--threshold", "0.0", "--out", str(tmp_path / "found"), "--device", "cpu", "--quiet", "--json"]
    assert main(["detect", "predict", str(detector), str(shapes / "images"), *words]) == 0
    told = json.loads(capsys.readouterr().out)["predictions"]
    content = COCO(str(tmp_path / "found" / "detections.json"))
    assert len(content.imgs) == 12 and {c["id"] for c in content.cats.values()} == {3, 17}
    assert len(list((tmp_path / "found").glob("*.jpg"))) == 12
    assert all((tmp_path / "found" / image["picture"]).is_file() for image in content.imgs.values())
    assert [entry["image"] for entry in told] == [image["file_name"] for image in content.imgs.values()]
    assert all(Path(entry["picture"]).is_file() for entry in told)
    assert sum(entry["objects"] for entry in told) == len(content.anns)
    for entry in content.anns.values():
        assert entry["category_id"] in (3, 17) and content.annToMask(entry).shape == (48, 48)


def test_predict_segment_writes_masks_with_the_datasets_labels(
    segmenter: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted((scenes / "images" / "val").iterdir())
    words = ["--out", str(tmp_path / "found"), "--device", "cpu", "--quiet", "--json"]
    assert main(["segment", "predict", str(segmenter), *map(str, images[:2]), *words]) == 0
    mask = np.asarray(Image.open(tmp_path / "found" / "0.png"))
    assert mask.shape == (40, 40) and set(np.unique(mask)) <= {0, 1, 2}
    assert (tmp_path / "found" / "1.jpg").exists()
    told = json.loads(capsys.readouterr().out)
    assert [entry["image"] for entry in told["predictions"]] == [str(path) for path in images[:2]]
    for entry in told["predictions"]:
        assert Path(entry["mask"]).suffix == ".png" and Path(entry["picture"]).is_file()
        assert set(entry["shares"]) <= set(told["classes"]) and sum(entry["shares"].values()) == pytest.approx(1, 1e-3)
    assert told["predictions"][0]["shares"][told["classes"][mask.flat[0]]] > 0


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_predict_never_writes_over_an_image(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "x.jpg")
    before = (tmp_path / "x.jpg").read_bytes()
    run = detector if kind == "detect" else segmenter
    assert main([kind, "predict", str(run), str(tmp_path), "--out", str(tmp_path), "--device", "cpu", "--quiet"]) == 2
    assert "already exists and is kept; choose another folder with --out" in capsys.readouterr().err
    assert (tmp_path / "x.jpg").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_predict_never_writes_over_an_earlier_result_and_looks_before_it_works(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "detections.json").write_text("earlier")
    assert main([kind, "predict", "no model", "no image", "--out", str(tmp_path / "out")]) == 2
    assert "already exists and is kept" in capsys.readouterr().err
    assert (tmp_path / "out" / "detections.json").read_text() == "earlier"


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_predict_goes_on_without_what_cannot_be_read(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.jpg").write_bytes(b"no image")
    words = [kind, "predict", str(detector if kind == "detect" else segmenter), str(tmp_path / "in"), "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 2 and "None of the 1 images can be read" in capsys.readouterr().err
    Image.new("RGB", (32, 32)).save(tmp_path / "in" / "good.jpg")
    assert main(words) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["unreadable"] == [str(tmp_path / "in" / "bad.jpg")] and "bad.jpg" in told.err
    assert (tmp_path / "out" / "good.jpg").exists()


@pytest.mark.parametrize("where", ["ram", "off"])
def test_a_picture_that_is_cut_short_is_found_before_training(where: str, tmp_path: Path) -> None:
    for name in ("whole.jpg", "short.jpg"):
        Image.effect_noise((64, 64), 60).save(tmp_path / name)
    whole = (tmp_path / "short.jpg").read_bytes()
    (tmp_path / "short.jpg").write_bytes(whole[: len(whole) // 2])
    pictures = Pictures([tmp_path / "whole.jpg", tmp_path / "short.jpg"], [(64, 64)] * 2, where=where)
    assert pictures.find_bad(1, max_bad=0.5) == [1]


def test_epochs_are_counted_in_steps_of_the_shared_batch(tmp_path: Path) -> None:
    config = detect_config(tmp_path, tmp_path / "run", steps=None, epochs=4, batch=10, accumulate=4)
    plan = running.make_plan(config, 100, 1, detect_commands.DetectJob())
    assert (plan.images_per_step, plan.steps_per_epoch, plan.steps) == (8, 12, 48)


def test_init_takes_the_backbone_of_a_run(segmenter: Path, shapes: Path, tmp_path: Path) -> None:
    """The folder says which network it is; everything fits; the detector starts from its weights."""
    values = {**COMMON, "backbone": "auto", "backbone_args": {}, "steps": 1, "lr": 1e-12, "init": str(segmenter)}
    values |= {"detector": HEADS, "data": str(shapes), "out": str(tmp_path / "run"), "report": False}
    detect_commands.train(DetectConfig.parse(values))
    before = {name: value for name, value in weights(segmenter).items() if ".pyramid.backbone.model." in f".{name}"}
    best = torch.load(segmenter / "checkpoints" / "best.pt", weights_only=True)["task"]
    after = weights(tmp_path / "run")
    assert before
    for name in before:
        ours = after[name.replace("net.pyramid", "net.features.pyramid")]
        assert torch.allclose(ours, best[name], atol=1e-6), name


def test_boxes_without_masks_train_too(tmp_path: Path) -> None:
    data = make_coco(tmp_path / "boxes", train=3, val=2, side=40)
    for split in ("train", "val"):
        edit(data, split, lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    found = detect_commands.train(detect_config(data, tmp_path / "run", steps=1, report=False)).data
    assert "box_ap" in found and "mask_ap" not in found
    with pytest.raises(UserError, match="does not have a mask for every object"):
        detect_commands.train(detect_config(data, tmp_path / "other", masks=True))


def test_models_and_data_must_belong_together(detector: Path, segmenter: Path, scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run of 'frugalvit segment', not of 'detect'"):
        detect_commands.evaluate(detect_commands.DetectEvalConfig(model=str(segmenter), data="x"))
    other = make_coco(tmp_path / "other", train=2, val=1, side=40)
    for split in ("train", "val"):
        edit(other, split, lambda content: content["categories"][0].update(name="box"))
    with pytest.raises(UserError, match=r"objects of category 3 'box', which .*detector does not have"):
        detect_commands.evaluate(detect_commands.DetectEvalConfig(model=str(detector), data=str(other)))
    with pytest.raises(UserError, match="the same labels must count in both"):
        segment_commands.evaluate(
            segment_commands.SegmentEvalConfig(model=str(segmenter), data=str(scenes), ignore_index=1)
        )
    with pytest.raises(UserError, match="has no split 'test'"):
        segment_commands.evaluate(
            segment_commands.SegmentEvalConfig(model=str(segmenter), data=str(scenes), split="test")
        )


def test_compare_trains_what_is_missing_and_tests_in_pairs(scenes: Path, tmp_path: Path) -> None:
    from frugalvit.config.transfer import SegmentCompareConfig
    from frugalvit.transfer import comparing

    values = {**COMMON, "steps": 1, "decoder": {"channels": 16}, "data": str(scenes), "report": False}
    values |= {
        "out": str(tmp_path / "both"),
        "seeds": 2,
        "settings": ["flat: photometric=false", "full: photometric=true"],
    }
    config = SegmentCompareConfig.parse(values)
    found = comparing.segment(config).data
    assert found["metric"] == "miou" and list(found["settings"]) == ["flat", "full"]
    assert found["differences"]["flat"]["count"] == 2
    before = (tmp_path / "both" / "flat" / "seed_1" / "summary.json").stat().st_mtime_ns
    assert comparing.segment(config).data == found
    assert (tmp_path / "both" / "flat" / "seed_1" / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="two settings"):
        comparing.segment(SegmentCompareConfig.parse({**values, "settings": []}))
    with pytest.raises(UserError, match="was run with decoder"):
        comparing.segment(SegmentCompareConfig.parse({**values, "decoder": {"channels": 24}}))


@pytest.mark.parametrize("head", ["mask-rcnn", pytest.param("cascade", marks=pytest.mark.slow)])
def test_detectors_learn_in_half_precision(shapes: Path, tmp_path: Path, head: str) -> None:
    found = detect_commands.train(detect_config(shapes, tmp_path / "run", head=head, precision="bf16", steps=2)).data
    assert found["skipped_steps"] == 0


def test_a_detector_of_one_category_is_scored_as_such(shapes: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = detect_commands.train(detect_config(shapes, out, categories="one", steps=2)).data
    scored = detect_commands.evaluate(DetectEvalConfig(model=str(out), data=str(shapes), device="cpu")).data
    assert scored["box_ap"] == pytest.approx(trained["box_ap"], abs=1e-6)
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["classes"] == ["object"]


def score(run: Path, data: Path, **more: Any) -> dict[str, Any]:
    return detect_commands.evaluate(DetectEvalConfig(model=str(run), data=str(data), device="cpu", **more)).data


def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every detector find exactly the first object of every picture, with the label 1: a square."""

    def find(self: Any, dataset: Any) -> list[dict[str, Any]]:
        return [
            {"image": place, "label": 1, "score": 0.9, "bbox": image.objects[0]["bbox"]}
            for place, image in enumerate(dataset.images)
        ]

    monkeypatch.setattr(detect_commands.DetectTask, "find", find)


def test_one_file_is_scored_by_the_names_of_its_categories(
    detector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_coco(tmp_path / "data", side=48)
    for split in ("train", "val"):  # boxes alone, so that perfect ones need no masks
        edit(data, split, lambda content: [entry.pop("segmentation") for entry in content["annotations"]])
    sure(monkeypatch)
    before = score(detector, data)
    assert before["box_ap"] == pytest.approx(0.5) and before["scored_on"] == "val"  # all squares, no disc

    def renumber(content: dict[str, Any]) -> None:
        numbers = {3: 2, 17: 1}
        for entry in content["categories"]:
            entry["id"] = numbers[entry["id"]]
        for entry in content["annotations"]:
            entry["category_id"] = numbers[entry["category_id"]]

    edit(data, "val", renumber)
    capsys.readouterr()
    for where in (data, data / "instances_val.json"):
        assert score(detector, where)["box_ap"] == pytest.approx(0.5)
        assert f"numbers its categories otherwise than {detector if where.is_file() else ''}" in capsys.readouterr().err

    def squares_only(content: dict[str, Any]) -> None:
        content["categories"] = [entry for entry in content["categories"] if entry["name"] == "square"]
        content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] == 2]

    edit(data, "val", squares_only)
    found = score(detector, data / "instances_val.json")
    assert found["box_ap"] == pytest.approx(1) and found["scored_on"] == "instances_val.json"
    edit(data, "val", lambda content: content["categories"][0].update(name="ring"))
    with pytest.raises(UserError, match=r"objects of category 2 'ring', which .*detector does not have"):
        score(detector, data / "instances_val.json")


def test_supercategories_are_scored_by_name_too(shapes: Path, tmp_path: Path) -> None:
    data = make_coco(tmp_path / "data", side=48)
    for split in ("train", "val"):
        edit(data, split, lambda c: [entry.update(supercategory=entry["name"] + "s") for entry in c["categories"]])
    run = tmp_path / "run"
    detect_commands.train(detect_config(data, run, categories="super", steps=1, report=False))

    def squares_only(content: dict[str, Any]) -> None:
        content["categories"] = [entry for entry in content["categories"] if entry["name"] == "square"]
        content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] == 3]

    edit(data, "val", squares_only)
    assert score(run, data / "instances_val.json")["scored_images"] == 4
    edit(data, "val", lambda content: content["categories"][0].update(supercategory="rings"))
    with pytest.raises(UserError, match=r"objects of category 'rings', which .*run does not have"):
        score(run, data / "instances_val.json")


def test_objects_without_masks_count_where_nobody_asks_for_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object of 24 is a slip for who learns masks; for boxes it is an object like any other."""

    def slip(content: dict[str, Any]) -> None:
        content["annotations"] = [entry | {"id": n} for n, entry in enumerate(4 * content["annotations"])]
        content["annotations"][0].update(segmentation=[])

    data = make_coco(tmp_path / "data", train=3, val=3, side=40)
    for split in ("train", "val"):
        edit(data, split, slip)
    counted: list[int] = []
    original = detect_commands.DetectTask.scores

    def scores(self: Any, dataset: Any, found: Any) -> Any:
        counted.append(sum(len(image.objects) for image in dataset.images))
        return original(self, dataset, found)

    monkeypatch.setattr(detect_commands.DetectTask, "scores", scores)
    for masks, objects in ((False, 24), (True, 23)):
        settings = detect_config(data, tmp_path / f"masks_{masks}", masks=masks, steps=1, report=False)
        opened = detect_commands.DetectJob().open(settings)
        assert [sum(len(image.objects) for image in opened.splits[split]) for split in opened.splits] == [objects] * 2
    run = tmp_path / "run"
    trained = detect_commands.train(detect_config(data, run, masks=False, steps=1, report=False)).data
    assert "mask_ap" not in trained and "mask_ap" not in score(run, data)
    assert len(counted) >= 2 and set(counted) == {24}


def cut_short(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 7 // 10])


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_a_png_that_is_cut_short_is_left_out_by_name(
    kind: str, detector: Path, segmenter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "detect":
        data, run = make_coco(tmp_path / "data", train=4, side=48), detector
        bad = [data / "images" / f"{split}_2.png" for split in ("train", "val")]
    else:
        data, run = make_scenes(tmp_path / "data", train=4, side=40), segmenter
        bad = [data / "images" / split / "2.png" for split in ("train", "val")]
    for path in bad:
        cut_short(path)
    command: Any = detect_commands if kind == "detect" else segment_commands
    make: Any = detect_config if kind == "detect" else segment_config
    with pytest.raises(UserError, match=r"1 of 4 images cannot be read, .*2\.png.*--cache.max-bad"):
        command.train(make(data, tmp_path / "strict", steps=1))
    capsys.readouterr()
    found = command.train(make(data, tmp_path / "run", steps=1, report=False, cache={"max_bad": 0.3})).data
    told = capsys.readouterr().err
    assert found["scored_images"] == 3 and all(str(path) in told for path in bad)
    words = [str(data), "--device", "cpu", "--json", "--quiet", "--out", str(tmp_path / "scored")]
    assert main([kind, "eval", str(run), *words]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["scored_images"] == 3 and str(bad[1]) in told.err
    pictures = bad[1].parent.glob("val_*.png" if kind == "detect" else "*.png")
    for path in pictures:
        cut_short(path)
    assert main([kind, "eval", str(run), *words[:-2]]) == 2
    assert "None of the 4 images can be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_eval_never_writes_over_anything_and_looks_before_it_works(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "pictures").mkdir(parents=True)
    (tmp_path / "out" / "pictures" / "best_1.jpg").write_text("mine")
    assert main([kind, "eval", "no model", "no data", "--out", str(tmp_path / "out")]) == 2
    assert "already exists and is kept; choose another folder with --out" in capsys.readouterr().err
    assert (tmp_path / "out" / "pictures" / "best_1.jpg").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    assert main([kind, "eval", "no model", "no data", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "Cannot write to" in capsys.readouterr().err
