"""A resumed run keeps its options."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig
from frugalvit.config.defaults import Facts
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.resolve import AutoValues, resolve_training
from frugalvit.runs import resume
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification.train import make_plan
from frugalvit.tasks.pretraining.task import PretrainingTask
from helpers.tiny_runs import TRAIN, differences, interrupted_at, run_tiny

FACTS = {"classes": ["cat", "dog"], "network": {}, "content": "", "processes": 2}


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}, {"optimizer": {"muon": True}}])
def test_resume_keeps_precision_and_optimizer(options: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    """The resuming command does not name them; the defaults here are single precision and AdamW."""
    run_tiny("train", data=photos, out=tmp_path / "complete", **options)
    with interrupted_at(7):
        run_tiny("train", data=photos, out=tmp_path / "cut", **options)
    run_tiny("train", resume=tmp_path / "cut")
    assert differences(tmp_path / "complete", tmp_path / "cut") == []


@pytest.mark.parametrize("step", [1, 7])
def test_resume_keeps_the_classifier_of_init(step: int, photos: Path, tmp_path: Path) -> None:
    """Before the first checkpoint and after it: no second start, and no values for a fitted classifier."""
    run_tiny("train", data=photos, out=tmp_path / "start")
    options = {"data": photos, "init": tmp_path / "start", "recipe": "finetune", "save_every": 5}
    run_tiny("train", out=tmp_path / "complete", **options)
    with interrupted_at(step):
        run_tiny("train", out=tmp_path / "cut", **options)
    run_tiny("train", resume=tmp_path / "cut")
    assert differences(tmp_path / "complete", tmp_path / "cut") == []


def test_resume_without_the_recipe_file(photos: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("task: train\nvalues: {stretch: 2.0}\n")
    with interrupted_at(7):
        run_tiny("train", data=photos, out=tmp_path / "run", recipe=recipe)
    recipe.unlink()
    assert run_tiny("train", resume=tmp_path / "run").data["steps"] == 10
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["stretch"] == 2.0


def check_steps(config: Any, run: RunFolder, world: int) -> int:
    """Return the steps of a resumed run whose batch ``world`` processes share."""
    plan = make_plan(config, 36, world)
    fabric: Any = SimpleNamespace(world_size=world, is_global_zero=True)
    builders.check_resumed_batch_size(config, plan, run, fabric)
    return plan.steps


def test_resume_keeps_the_batch_size(tmp_path: Path) -> None:
    """Two processes made 4 of a batch of 6. One process resumes with 4 and as many steps; three cannot."""
    run = RunFolder(tmp_path / "run")
    config = TrainConfig.parse({"data": "x", "batch": 6, "epochs": 4.0, "ema": 0.0, "devices": 2})
    config = resolve_training(config, Facts(36, 2, 32, "cpu"), AutoValues())
    run.save_json("data.json", FACTS | {"images": 36, "batch": 6})
    run.save_config(config)
    assert make_plan(config, 36, 2).steps == 36
    stored = resume.load_resumed_config(TrainConfig.parse({"resume": str(run.folder), "batch": 6}))
    stored = stored.with_options({}, ResolvedTrainConfig)
    assert stored.batch == 4 and check_steps(stored, run, world=1) == 36
    with pytest.raises(UserError, match=r"has 4 images per step, which 3 processes"):
        check_steps(stored, run, world=3)
    run.close()


def test_resume_after_the_last_checkpoint(photos: Path, tmp_path: Path) -> None:
    """Killed while its model was written: nothing is left to train."""
    values = TRAIN | {"data": str(photos), "steps": 4, "seeds": 1, "out": str(tmp_path / "compared")}
    config = CompareConfig.parse(
        values | {"settings": ["with: localization.weight=0.5", "without: localization.weight=0"]}
    )
    first = compare(config)
    (tmp_path / "compared" / "without" / "seed_0" / "summary.json").unlink()
    again = compare(config)
    assert set(first.data) == set(again.data)
    assert first.data["settings"]["without"]["values"] == again.data["settings"]["without"]["values"]


@pytest.mark.parametrize(("option", "used", "images"), [(8, 16, 100), (64, 6, 10), (64, 10, 10)])
def test_the_first_command_also_resumes(option: int, used: int, images: int, tmp_path: Path) -> None:
    """The run raised the batch to share it equally, or lowered it to the number of images."""
    run = RunFolder(tmp_path)
    run.save_json("data.json", FACTS | {"images": images, "batch": option})
    run.save_config(TrainConfig.parse({"data": "x", "batch": used}))
    run.close()
    resume.load_resumed_config(TrainConfig.parse({"resume": str(tmp_path), "batch": option}))
    with pytest.raises(UserError, match=f"--batch on resume .*{used}"):
        resume.load_resumed_config(TrainConfig.parse({"resume": str(tmp_path), "batch": 5}))


def test_paths_may_be_written_differently_on_resume(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.save_config(TrainConfig.parse({"data": "x", "init": f"{tmp_path}/weights/", "recipe": "scratch"}))
    run.close()
    options = {"resume": str(tmp_path / "run"), "recipe": "scratch"}
    resume.load_resumed_config(TrainConfig.parse(options | {"init": f"{tmp_path}/run/../weights"}))
    with pytest.raises(UserError, match="Cannot change --init"):
        resume.load_resumed_config(TrainConfig.parse(options | {"init": f"{tmp_path}/others"}))


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_accumulate_above_the_default_batch(verb: str, photos: Path, tmp_path: Path) -> None:
    run_tiny(verb, data=photos, out=tmp_path / "run", steps=2, batch="auto", accumulate=16)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch"] == 16
    with pytest.raises(UserError, match="--accumulate 32"):
        run_tiny(verb, data=photos, out=tmp_path / "other", steps=2, batch=64, accumulate=32)


def test_a_collapse_in_an_evaluation_is_saved(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretrainingTask, "on_metrics", lambda self, step, metrics: "knn" in metrics)
    run_tiny("pretrain", data=photos, out=tmp_path / "run", steps=400, save_every=0)
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
