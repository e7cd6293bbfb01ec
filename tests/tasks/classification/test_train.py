"""``frugalvit train`` end to end on a few images."""

import base64
import csv
import html
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.backbones import create_backbone
from frugalvit.cli import main as cli
from frugalvit.config.train import PredictConfig, TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.data.augmentation.transforms import EvalTransform
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.loader import Batch
from frugalvit.errors import UserError
from frugalvit.experiment.builders import EvalSet
from frugalvit.experiment.load_model import load_model
from frugalvit.experiment.summary import collect_answers, relative_name, worst_mistakes
from frugalvit.objectives.drloc import loss_at_pairs
from frugalvit.tasks.classification import task
from frugalvit.tasks.classification import train as commands
from frugalvit.tasks.classification.metrics import ClassificationScores
from frugalvit.tasks.classification.predict import predict
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.classification.train import train
from frugalvit.utils.scores import read_scores
from helpers import suite_layouts
from helpers.shards import shard_images
from helpers.tiny_runs import TRAIN, differences, interrupted_at, load_state, read_metrics, write_config, write_images


def config(photos: Path, out: Path, **values: object) -> TrainConfig:
    return TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(out)} | values)


def test_a_run_writes_all_files(photos: Path, tmp_path: Path) -> None:
    result = train(config(photos, tmp_path / "run", steps=30, report=True))
    assert {"run", "top1", "top5", "mean_per_class", "seconds"} <= set(result.data)
    files = ("config.yaml", "metrics.jsonl", "summary.json", "report.html", "checkpoints/last.pt", "model/config.json")
    for name in files:
        assert (tmp_path / "run" / name).exists(), name
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["classes"] == ["cat", "dog"]
    errors = [line["localization_error"] for line in read_metrics(tmp_path / "run") if "localization_error" in line]
    assert len(errors) > 5 and np.isfinite(errors).all()
    assert result.data["localization_error"] == errors[-1]


def test_a_run_below_its_floor_is_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The colour shows the class, so simple methods need no network; one step teaches a network nothing."""
    squares = suite_layouts.folders(tmp_path / "squares", {"train": 8, "val": 4})
    words = ["train", str(squares), "--config", str(write_config(tmp_path / "c.yaml", TRAIN)), "--steps", "1"]
    assert cli.main([*words, "--report", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    methods = {"majority": pytest.approx(100 / 3), "nearest_neighbour": 100.0, "logistic": 100.0, "best": 100.0}
    assert {name: summary["floor"][name] for name in methods} == methods and summary["top1"] < 100
    (alarm,) = summary["alarms"]
    assert f"warning: {alarm}" in printed.err and f"alarm       {alarm}" in printed.out
    floor = r"floor +100.0 % \(95 %: 75.8 to 100.0\) without a network, on the same images: nearest neighbour"
    assert re.search(floor, printed.out) and re.search(r"top-1 .* % +\d.* to .* % +33.3 %", printed.out)
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "without a network<span>95 %: 75.8 to 100.0; the best simple method" in page
    assert alarm[1:] in re.sub(r"<[^>]+>", "", page)
    assert cli.main(["train", "--resume", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["floor"], again["alarms"]) == (summary["floor"], summary["alarms"])


def test_labels_and_seed_reach_the_floor(photos: Path, tmp_path: Path) -> None:
    """The simple methods learn from the labelled images only, and are scored on test if the run is."""
    data = shutil.copytree(photos, tmp_path / "photos")
    shutil.copytree(data / "val" / "cat", data / "test" / "cat")
    result = train(config(data, tmp_path / "run", steps=1, labels=4)).data
    assert (result["floor"]["fitted_images"], result["floor"]["train_images"]) == (8, 8)
    assert result["scored_on"] == "test" and result["floor"]["majority"] in (0, 100)


def test_a_stream_has_no_floor(photos: Path, tmp_path: Path) -> None:
    shards = shard_images(tmp_path / "shards", photos)
    result = train(config(shards / "{000..003}.tar", tmp_path / "run", steps=1, stream=True, workers=1))
    assert result.data["floor"] == {"skipped": "the training images are a stream"} and result.data["alarms"] == []
    assert "floor       not computed: the training images are a stream" in result.notes


def test_recipe_and_evaluation_interval_are_recorded(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(photos, tmp_path / "run", evaluate_every="auto", steps=6))
    log, written = capsys.readouterr().err, json.loads((tmp_path / "run" / "decisions.json").read_text())
    before_first_step = log.partition("epoch ")[0].splitlines()
    assert len(before_first_step) <= 12 and any("evaluate_every 3" in line for line in before_first_step)
    assert next(line for line in before_first_step if "recipe scratch" in line)
    assert {"recipe": "scratch", "evaluate_every": 3}.items() <= {d["name"]: d["value"] for d in written}.items()
    assert TrainConfig.from_run(tmp_path / "run" / "config.yaml").evaluate_every == 3
    train(config(photos, tmp_path / "explicit", recipe="scratch", steps=1))
    assert "recipe scratch" not in capsys.readouterr().err


def test_uncached_images_appear_in_the_report(tmp_path: Path) -> None:
    """Without a cache the images of mistakes are decoded again."""
    photos = write_images(tmp_path / "photos", classes=("cat", "dog", "cow", "hen"))
    for where in ("ram", "off"):
        result = train(config(photos, tmp_path / where, steps=2, cache={"location": where}, workers=0))
    assert "--cache.location off" in result.data["floor"]["skipped"], "computing it would decode all images again"
    mistakes, others = (json.loads((tmp_path / where / "mistakes.json").read_text()) for where in ("off", "ram"))
    assert mistakes and mistakes == others
    assert all(mistake["image"].startswith("data:image/jpeg") for mistake in mistakes)
    files = [Path(mistake["file"]) for mistake in mistakes]
    assert all((photos / file).is_file() and not file.is_absolute() for file in files)
    assert [file.parts[:2] for file in files] == [("val", mistake["label"]) for mistake in mistakes]


@pytest.mark.parametrize(("where", "shown"), [("photos", "val/cat/1.png"), ("photos/t.csv", "val/cat/1.png")])
def test_file_names_are_relative_to_the_data(where: str, shown: str, tmp_path: Path) -> None:
    """A report may go to others, who need not know the folders above the data."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "t.csv").write_text("")
    assert relative_name(str(tmp_path / where), str(tmp_path / "photos/val/cat/1.png")) == shown


@pytest.mark.parametrize(("prob", "passes"), [(0.0, 1), (1.0, 2)])
def test_clean_images_need_a_second_forward(
    photos: Path, tmp_path: Path, prob: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    compute_losses = ClassificationTask.compute_losses

    def count(self: ClassificationTask, *inputs: Any) -> dict[str, torch.Tensor]:
        forward, calls = self.backbone.forward, []
        with monkeypatch.context() as patch:
            patch.setattr(self.backbone, "forward", lambda images: calls.append(1) or forward(images))
            losses = compute_losses(self, *inputs)
        seen.append(len(calls))
        return losses

    monkeypatch.setattr(ClassificationTask, "compute_losses", count)
    settings = {"localization": {"weight": 0.5, "images": "clean"}, "mixing": {"prob": prob, "cutmix": 0.0}, "steps": 2}
    train(config(photos, tmp_path / "run", **settings))
    assert seen == [passes] * 2 and "localization" in read_metrics(tmp_path / "run")[0]


class Brightness:
    """A classifier that predicts "light", more confidently for lighter images."""

    def eval(self) -> None: ...

    def __call__(self, images: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(pooled=images.mean((1, 2, 3)))

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros_like(pooled), 10 * (pooled - 0.5)], 1)


def test_worst_mistakes_are_sorted_by_confidence() -> None:
    levels, labels = torch.tensor([[20, 240, 150, 180, 250, 60, 5], [1, 1, 0, 0, 0, 0, 0]])
    store = CachedStore.from_arrays(levels.byte().view(7, 1, 1, 1).expand(7, 3, 8, 8), labels)
    dataset = EvalSet(store, EvalTransform(8, (0, 0, 0), (1, 1, 1)), batch=2)
    answers = collect_answers(Brightness(), dataset, "test")  # type: ignore[arg-type]
    found = worst_mistakes(answers, store, ("dark", "light"), count=3)
    assert [(each["label"], each["predicted"]) for each in found] == [
        ("dark", "light"),
        ("light", "dark"),
        ("dark", "light"),
    ]
    assert [each["probability"] for each in found] == pytest.approx([0.9919, 0.9855, 0.8868], abs=1e-3)
    pictures = [Image.open(io.BytesIO(base64.b64decode(each["image"].partition(",")[2]))) for each in found]
    assert [np.asarray(picture).mean() for picture in pictures] == pytest.approx([250, 20, 180], abs=3)


def test_training_images_are_scored(photos: Path, tmp_path: Path) -> None:
    train(config(photos, tmp_path / "run", steps=2))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["training_images"]["count"] == 24 and 0 <= summary["training_images"]["top1"] <= 100
    assert sum(row["images"] for row in summary["calibration"]["bins"]) == summary["scored_images"]


@pytest.mark.parametrize(("weight", "error", "noted"), [(0.5, 0.9, True), (0.5, 0.6, False), (0.0, 0.9, False)])
def test_a_hardly_learned_drloc_task_is_noted(
    photos: Path, tmp_path: Path, weight: float, error: float, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the error of a constant answer; a run without the loss has no note."""
    monkeypatch.setattr(
        task,
        "loss_at_pairs",
        lambda head, *rest: (loss_at_pairs(head, *rest)[0], torch.tensor(error * head.constant_baseline_error(4, 4))),
    )
    settings = {"localization": {"weight": weight}, "steps": 2}
    result = train(config(photos, tmp_path / "run", **settings))
    assert any("hardly learned" in note for note in result.notes) == noted
    assert ("constant_answer_error" in result.data) == (weight > 0)


def test_summary_describes_last_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without val the test images choose nothing: the last weights are exported."""
    data = write_images(tmp_path / "photos")
    (data / "val").rename(data / "test")
    data = train(config(data, tmp_path / "run", split="given", steps=4, report=True)).data
    assert data["best_step"] is None and data["val_top1"] is None
    assert data["weights"] == "the last step (no validation images)"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert data["weights"] in page and "best step" not in page
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert data["weights"] in capsys.readouterr().out


@pytest.mark.parametrize("ema", [0.9, 0.0])
def test_best_weights_are_scored_and_exported(
    ema: float, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is best early: with --weights best the weights of that step count, not the last ones."""
    monkeypatch.setattr(ClassificationTask, "evaluate", lambda self, step: {"top1": 100.0 / step})
    data = train(config(photos, tmp_path / "run", ema=ema, weights="best")).data
    assert (data["best_step"], data["chosen_on"]) == (4, "val")
    assert "which also chose the weights" in str(read_scores(data)[0])
    best, last = (load_state(tmp_path / "run", name)["task"] for name in ("best.pt", "last.pt"))
    exported, network = load_model(str(tmp_path / "run")).backbone.state_dict(), "average" if ema else "backbone"
    assert all(torch.equal(value, best[f"{network}.{name}"]) for name, value in exported.items())
    assert not all(torch.equal(value, last[f"{network}.{name}"]) for name, value in exported.items())


@pytest.mark.parametrize(("test", "weights"), [(0, "last"), (4, "best")])
def test_images_that_score_choose_nothing(
    test: int, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a test split the last weights are exported; with one, val chooses and test scores."""
    squares = suite_layouts.folders(tmp_path / "squares", {"train": 8, "val": 4} | ({"test": test} if test else {}))
    monkeypatch.setattr(ClassificationTask, "evaluate", lambda self, step: {"top1": 100.0 / step})
    data = train(config(squares, tmp_path / "run")).data
    exported = load_model(str(tmp_path / "run")).backbone.state_dict()
    chosen = load_state(tmp_path / "run", f"{weights}.pt")["task"]
    assert all(torch.equal(value, chosen[f"average.{name}"]) for name, value in exported.items())
    assert data["scored_on"] == ("test" if test else "val") and not read_scores(data)[0].chosen
    assert f" weights {weights} " in " ".join(capsys.readouterr().err.split())


def test_resume_with_moved_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scratch disks change from job to job: the run ends with the same bits."""
    data, run = write_images(tmp_path / "here"), tmp_path / "moved"
    train(config(data, tmp_path / "complete", save_every=2))
    with interrupted_at(6):
        train(config(data, run, save_every=2))
    moved, stored = data.rename(tmp_path / "there"), (run / "config.yaml").read_text()
    assert cli.main(["train", "--resume", str(run)]) == 2
    assert "has moved" in capsys.readouterr().err
    assert cli.main(["train", str(moved), "--resume", str(run)]) == 0
    assert "have changed" not in capsys.readouterr().err
    # The next resume need not name the new path.
    assert (run / "config.yaml").read_text() == stored.replace(f"data: {data}\n", f"data: {moved}\n", 1)
    assert differences(tmp_path / "complete", run) == []


def test_predict_skips_unreadable_images(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File names with quotes and commas survive in the CSV."""
    train(config(photos, tmp_path / "run", steps=2, seed=99_999_999_999))
    (tmp_path / "in").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "in" / 'a "good", one.png')
    (tmp_path / "in" / "bad.png").write_bytes(b"no image")
    assert cli.main(["predict", str(tmp_path / "run"), str(tmp_path / "in"), "--format", "csv", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    rows = list(csv.DictReader(captured.out.splitlines()))
    assert {row["image"] for row in rows} == {str(tmp_path / "in" / 'a "good", one.png')} and "bad.png" in captured.err


def test_timm_predicts_the_same(photos: Path, tmp_path: Path) -> None:
    import timm

    train(config(photos, tmp_path / "run"))
    images = sorted(str(path) for path in (photos / "val").rglob("*.png"))[:3]
    predictions = predict(PredictConfig(model=str(tmp_path / "run"), images=images, top=2)).data["predictions"]
    ours = load_model(str(tmp_path / "run"))
    theirs = timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True).eval()
    for path, row in zip(images, predictions, strict=True):
        with torch.inference_mode():
            chances = theirs(ours.transform.image(Image.open(path)))[0].softmax(0)
        named = {ours.classes[i]: chance for i, chance in enumerate(chances.tolist())}  # type: ignore[index]
        for guess in row["predictions"]:
            assert guess["probability"] == pytest.approx(named[guess["class"]], abs=1e-4)


@pytest.mark.parametrize(
    "values",
    [
        {"localization": {"weight": 0.5, "variant": "dense", "hidden": 4, "pairs": 4}},
        {"localization": {"weight": 0.5, "variant": "ce", "form": "released", "hidden": 4, "schedule": "ramp"}},
        {"localization": {"weight": 0.5, "variant": "reg", "hidden": 4, "grid_size": None}},
        {"localization": {"weight": 0.5, "images": "clean", "grid": "raw", "pairs": "all", "hidden": 4, "lr_scale": 3}},
        {"localization": {"weight": 0}, "balance": True, "labels": 0.5, "accumulate": 2, "freeze": 1, "ema": 0},
        {"optimizer": {"layer_decay": 0.7, "clip": 1.0, "clip_per": "tensor"}, "precision": "bf16"},
        {"mixing": {"mixup": 0, "cutmix": 0}, "epochs": 1, "steps": None},
    ],
    ids=["dense", "released-ce", "reg-own-grid", "clean-all-pairs", "few-labels", "layers", "no-mixing"],
)
def test_options_do_something_and_run(photos: Path, tmp_path: Path, values: dict[str, object]) -> None:
    base = train(config(photos, tmp_path / "base", steps=4)).data
    other = train(config(photos, tmp_path / "other", **({"steps": 4} | values))).data
    assert np.isfinite(other["top1"])
    weights = [load_model(str(tmp_path / name)).backbone.state_dict() for name in ("base", "other")]
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0]), "the options changed nothing"
    assert base["run"] != other["run"]


def test_same_seed_same_run(photos: Path, tmp_path: Path) -> None:
    runs = [train(config(photos, tmp_path / name, steps=4)).data["run"] for name in ("a", "b")]
    assert read_metrics(Path(runs[0])) == read_metrics(Path(runs[1]))


def test_resume_with_another_network_is_refused(photos: Path, tmp_path: Path) -> None:
    train(config(photos, tmp_path / "run", steps=2))
    (tmp_path / "run" / "summary.json").unlink()
    stored = tmp_path / "run" / "config.yaml"
    stored.write_text(stored.read_text().replace("backbone_args:\n", "backbone_args:\n  mlp_ratio: 3.0\n"))
    with pytest.raises(UserError, match="does not fit the network"):
        train(TrainConfig.parse({"resume": str(tmp_path / "run")}))


def test_init_with_three_images(tmp_path: Path, photos: Path) -> None:
    few = write_images(tmp_path / "few", train=2, val=1)
    first = train(config(photos, tmp_path / "first", steps=4)).data["run"]
    result = train(config(few, tmp_path / "second", init=first, steps=None, epochs=1, batch=128))
    assert result.data["steps"] >= 1 and TrainConfig.from_run(tmp_path / "second/config.yaml").recipe == "finetune"


@pytest.mark.parametrize(
    "where", ["run", "run/model", "run/checkpoints/last.pt", "exported", "exported/model.safetensors"]
)
def test_own_pretraining_uses_the_scratch_recipe(where: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("matching: {}\n")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text('{"frugalvit": {"meta": {"task": "pretrain"}}}')
    options = {"data": "photos", "init": str(tmp_path / where)}
    assert TrainConfig.parse(options).recipe == "scratch"
    (tmp_path / "run" / "config.yaml").write_text("mixing: {}\n")  # a classifier
    (tmp_path / "config.yaml").write_text("matching: {}\n")
    (tmp_path / "exported" / "config.json").write_text('{"frugalvit": {"meta": {"task": "train"}}}')
    assert TrainConfig.parse(options).recipe == "finetune"
    assert TrainConfig.parse({"data": "photos", "pretrained": True}).recipe == "finetune"
    (tmp_path / "run" / "config.yaml").write_text("a: !!python/tuple [1, 2]\n")  # of another program
    (tmp_path / "exported" / "config.json").write_text("{")
    assert TrainConfig.parse(options).recipe == "finetune"


def test_frozen_batch_norms_keep_their_statistics(photos: Path, tmp_path: Path) -> None:
    values = {"backbone": "resnet10t", "backbone_args": {}, "img_size": 32, "steps": 2, "freeze": 2, "ema": 0}
    train(config(photos, tmp_path / "run", **values))
    torch.manual_seed(0)
    start = create_backbone("resnet10t", img_size=32, num_classes=2).model.state_dict()
    end = load_model(str(tmp_path / "run")).backbone.model.state_dict()
    moved = {name for name in start if "running_mean" in name and not torch.equal(start[name], end[name])}
    assert moved and not any(name.startswith(("conv1", "bn1", "layer1", "layer2")) for name in moved)


def test_a_batch_that_cannot_be_shared_is_reduced(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(photos, tmp_path / "run", steps=2, accumulate=3, lr="auto"))
    assert "batch 6 " in capsys.readouterr().err
    decisions = json.loads((tmp_path / "run" / "decisions.json").read_text())
    reasons = {value["name"]: value["reason"] for value in decisions}
    assert "a multiple of 3 instead of 8" in reasons["batch"] and reasons["lr"].endswith("root to batch 6")
    assert read_yaml(tmp_path / "run" / "config.yaml")["batch"] == 6


def test_parts_of_a_step_draw_other_pairs(photos: Path, tmp_path: Path) -> None:
    drawn: list[torch.Tensor] = []

    class RecordingTask(ClassificationTask):
        def _pairs(self, batch: Batch) -> torch.Tensor | None:
            pairs = super()._pairs(batch)
            assert pairs is not None
            drawn.append(pairs)
            return pairs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "ClassificationTask", RecordingTask)
        train(config(photos, tmp_path / "run", steps=2, accumulate=2))
    assert len(drawn) == 4 and all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def remove_a_class(photos: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(photos / split / "dog")


def rename_a_class(photos: Path) -> None:
    (photos / "val" / "dog").rename(photos / "val" / "wolf")


@pytest.mark.parametrize("change", [remove_a_class, rename_a_class])
def test_unusable_classes_are_one_line(
    change: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_images(tmp_path / "photos", train=3, val=2)
    change(photos)
    words = ["train", str(photos), "--backbone", "swin_nano", "--steps", "1", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 2
    log = capsys.readouterr().err
    assert log.strip().splitlines()[-1].startswith("frugalvit: ") and "Traceback" not in log and "epoch" not in log


@pytest.mark.parametrize("values", [{"img_size": 2}, {"localization": {"weight": -0.1}}])
def test_impossible_options_are_refused(values: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        train(config(photos, tmp_path / "run", **values))


@pytest.mark.parametrize(
    ("tops", "count"), [((0.0, 50.0), 2), ((50.0, 0.0), 3)], ids=["last-is-best", "earlier-is-best"]
)
def test_a_run_scores_the_same_weights_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tops: tuple[float, ...], count: int
) -> None:
    scored: list[ClassificationScores] = []
    scores, fed = ClassificationTask.scores, iter(tops)

    def count_scores(task: Any, data: Any, *, alone: bool = False) -> Any:
        found = scores(task, data, alone=alone)
        scored.extend([] if alone else [found])  # alone: a sample of the training images
        return found

    monkeypatch.setattr(ClassificationTask, "scores", count_scores)
    evaluate = ClassificationTask.evaluate
    monkeypatch.setattr(ClassificationTask, "evaluate", lambda task, step: evaluate(task, step) | {"top1": next(fed)})
    summary = train(config(photos, tmp_path / "run", steps=4, evaluate_every=2, weights="best")).data
    assert len(scored) == count and summary["best_step"] == (4 if count == 2 else 2)
    assert scored[-1].summary().items() <= summary.items()
