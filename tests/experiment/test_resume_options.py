"""A resumed run keeps its options."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.engine.step import TrainStep
from frugalvit.errors import UserError
from frugalvit.experiment import builders, resume
from frugalvit.experiment.auto_values import AutoValues, Facts, resolve_training
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification.train import make_plan, train
from frugalvit.tasks.pretraining.collapse import Health
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, write_images


class Cut(Exception):
    pass


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_images(tmp_path_factory.mktemp("images") / "photos"))


def cut_off(config: Any, monkeypatch: pytest.MonkeyPatch, at: int = 7) -> None:
    """Begin a run that ends abruptly before a step."""
    step = TrainStep.one_step

    def until(self: TrainStep) -> None:
        if self.step == at:
            raise Cut
        step(self)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "one_step", until)
        with pytest.raises(Cut):
            train(config)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_keeps_the_precision(
    precision: str, images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that resumes says nothing of it; single precision would be the default here."""
    values = TRAIN | {"data": images, "precision": precision, "device": "cpu"}
    train(TrainConfig.parse(values | {"out": str(tmp_path / "whole")}))
    cut_off(TrainConfig.parse(values | {"out": str(tmp_path / "cut")}), monkeypatch)
    train(TrainConfig.parse({"resume": str(tmp_path / "cut"), "device": "cpu"}))
    assert differences(tmp_path / "whole", tmp_path / "cut") == []


def test_resume_without_the_recipe_file(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "mine.yaml"
    words = dict.fromkeys(("summary", "command", "hardware", "cost", "expect"), "mine")
    recipe.write_text(yaml.safe_dump(words | {"task": "train", "values": {"lr": 0.002}}))
    values = {name: value for name, value in TRAIN.items() if name != "lr"} | {"data": images, "recipe": str(recipe)}
    cut_off(TrainConfig.parse(values | {"out": str(tmp_path / "run")}), monkeypatch)
    recipe.unlink()
    train(TrainConfig.parse({"resume": str(tmp_path / "run")}))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 10
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["lr"] == 0.002


def shared(config: TrainConfig, run: RunFolder, world: int) -> int:
    """Steps of a resumed run whose batch so many processes share."""
    plan = make_plan(config, 36, world)
    fabric: Any = SimpleNamespace(world_size=world, is_global_zero=True)
    builders.check_resumed_batch_size(config, plan, run, fabric)
    return plan.steps


def test_resume_keeps_the_batch_size(tmp_path: Path) -> None:
    """Two processes made 4 of a batch of 6 images; one process goes on with 4, and as many steps; three cannot."""
    run = RunFolder(tmp_path / "run")
    config = TrainConfig.parse({"data": "x", "batch": 6, "epochs": 4.0, "ema": 0.0, "devices": 2})
    config = resolve_training(config, Facts(36, 2, 32, "cpu"), AutoValues())
    run.save_json("data.json", {"images": 36, "batch": 6, "processes": 2})
    run.save_config(config)
    steps = make_plan(config, 36, 2).steps
    assert steps == 36
    again = TrainConfig.parse({"resume": str(run.folder), "batch": 6})
    stored = resume.load_resumed_config(again)  # the same command as at the start
    stored = stored.with_options({}, ResolvedTrainConfig)
    assert stored.batch == 4 and shared(stored, run, world=1) == steps
    with pytest.raises(UserError, match=r"has 4 images per step, which 3 processes"):
        shared(stored, run, world=3)
    run.close()


def test_resume_after_the_last_checkpoint(images: str, tmp_path: Path) -> None:
    """Killed while its model was written: nothing is left to train, and it still knows how fast it was."""
    values = TRAIN | {"data": images, "steps": 4, "seeds": 1, "out": str(tmp_path / "compared")}
    values |= {"settings": ["with: localization.weight=0.5", "without: localization.weight=0"]}
    first = compare(CompareConfig.parse(values))
    (tmp_path / "compared" / "without" / "seed_0" / "summary.json").unlink()
    again = compare(CompareConfig.parse(values))
    assert again.data["seconds_per_step"]["without"] > 0
    assert set(first.data) == set(again.data)


def test_the_first_command_also_resumes(tmp_path: Path) -> None:
    """Whatever became of the batch: raised to be shared, or lowered to the images there are and then shared."""
    for asked, became, images in ((8, 16, 100), (64, 6, 10), (64, 10, 10)):
        folder = tmp_path / f"{asked}_{became}"
        run = RunFolder(folder)
        run.save_json("data.json", {"images": images, "batch": asked, "processes": 2})
        run.save_config(TrainConfig.parse({"data": "x", "batch": became}))
        run.close()
        resume.load_resumed_config(TrainConfig.parse({"resume": str(folder), "batch": asked}))
        with pytest.raises(UserError, match=f"--batch on resume .*{became}"):
            resume.load_resumed_config(TrainConfig.parse({"resume": str(folder), "batch": 5}))


def test_paths_may_be_written_differently_on_resume(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.save_config(TrainConfig.parse({"data": "x", "init": f"{tmp_path}/weights/", "recipe": "scratch"}))
    run.close()
    words = {"resume": str(tmp_path / "run"), "recipe": "scratch"}
    resume.load_resumed_config(TrainConfig.parse(words | {"init": f"{tmp_path}/run/../weights"}))
    with pytest.raises(UserError, match="Cannot change --init"):
        resume.load_resumed_config(TrainConfig.parse(words | {"init": f"{tmp_path}/others"}))


@pytest.mark.parametrize("command", [train, pretrain])
def test_accumulate_above_the_default_batch(command: Any, images: str, tmp_path: Path) -> None:
    kind, values = (TrainConfig, TRAIN) if command is train else (PretrainConfig, PRETRAIN)
    values = values | {"data": images, "steps": 2, "batch": "auto", "accumulate": 16, "out": str(tmp_path / "run")}
    assert command(kind.parse(values)).data["steps"] == 2
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch"] == 16
    with pytest.raises(UserError, match="--accumulate 32"):
        command(kind.parse(values | {"batch": 64, "accumulate": 32, "out": str(tmp_path / "other")}))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_adding_a_loss_is_not_divergence(share: float) -> None:
    """L_R begins late, within the steps of a line; both losses only fall."""
    health = Health(1024, steps=400, settled=40)
    said = []
    for line in range(40):
        metrics = {"loss": 3.4 - line / 20, "view_loss": 6.8 - line / 10}
        if line >= 20:
            part = share if line == 20 else 1.0
            metrics |= {"region_loss": 6.9 - line / 40, "loss": metrics["loss"] + part * (3.45 - line / 80)}
        said += health.check(10 * line, metrics)
    assert said == []


def test_health_of_long_runs_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    from frugalvit.tasks.pretraining import collapse as module

    looked, swing = [], module._swing
    monkeypatch.setattr(module, "_swing", lambda losses: looked.append(len(losses)) or swing(losses))
    watch = Health(1024, steps=40_000, settled=100)
    for line in range(4000):
        watch.check(10 * line, {"loss": 6.9, "view_loss": 6.9, "knn": 20.0})
    assert len(looked) < 400 and watch.verdict() == "stagnation"


def test_layer_decay_is_for_train_only(images: str) -> None:
    with pytest.raises(UserError, match=r"layer_decay"):
        PretrainConfig.parse(PRETRAIN | {"data": images, "optimizer": {"layer_decay": 0.7}})


def test_a_collapse_in_an_evaluation_is_saved(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frugalvit.tasks.pretraining.task import PretrainingTask

    monkeypatch.setattr(PretrainingTask, "on_metrics", lambda self, step, metrics: "knn" in metrics)
    values = PRETRAIN | {"data": images, "steps": 400, "save_every": 0, "out": str(tmp_path / "run")}
    pretrain(PretrainConfig.parse(values))
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
