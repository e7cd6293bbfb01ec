"""``frugalvit pretrain`` end to end on a few images: learning, health, collapse."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import nn

from frugalvit.backbones import Backbone
from frugalvit.config.data import CropsConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.engine.schedules import Constant
from frugalvit.errors import UserError
from frugalvit.experiment.builders import make_backbone
from frugalvit.experiment.load_model import adopt_init_architecture, load_model
from frugalvit.experiment.resolve import AutoValues
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.collapse import Health
from frugalvit.tasks.pretraining.task import PretrainingTask
from frugalvit.tasks.pretraining.train import _check_crops, make_plan, pretrain
from helpers.tiny_runs import (
    PRETRAIN,
    TRAIN,
    differences,
    interrupted_at,
    load_state,
    read_metrics,
    resolve,
    run_tiny,
    write_images,
)


def config(photos: Path, out: Path, **values: object) -> PretrainConfig:
    merged = PRETRAIN | {"data": str(photos), "out": str(out)} | values
    if "matching" in values:
        merged["matching"] = PRETRAIN["matching"] | values["matching"]  # type: ignore[operator]
    return PretrainConfig.parse(merged)


def test_a_run_has_a_summary_and_a_model(photos: Path, tmp_path: Path) -> None:
    result = pretrain(config(photos, tmp_path / "run", steps=20, report=True))
    assert result.data["health"] and result.data["effective_rank"] >= 1 and result.data["knn"] is not None
    assert (tmp_path / "run" / "report.html").exists()
    model = load_model(str(tmp_path / "run"))
    state = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)["task"]
    name = next(name for name in model.backbone.state_dict() if name.endswith("qkv.weight"))
    torch.testing.assert_close(model.backbone.state_dict()[name], state[f"teacher.{name}"])
    names = {key for line in read_metrics(tmp_path / "run") for key in line}
    assert {
        "view_loss",
        "region_loss",
        "teacher_entropy",
        "prototypes_used",
        "agreement",
        "region_match_entropy",
    } <= names
    tuned = train(
        TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(tmp_path / "t"), "init": str(tmp_path / "run")})
    )
    assert tuned.data["top1"] >= 0


@pytest.mark.parametrize(("every", "epochs", "steps"), [(1.0, 4, 10), (1.0, 200, 40), (0.5, 4, 5), (0.01, 4, 1)])
def test_health_interval(every: float, epochs: int, steps: int) -> None:
    """Fifty times at most."""
    settings = PretrainConfig.parse(
        {"data": "x", "epochs": epochs, "batch": 10, "lr": 1e-3, "health": {"every": every}}
    )
    assert make_plan(resolve(settings, 100), images=100, world=1).evaluate_every == steps


def test_the_first_steps_are_not_a_collapse(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of every run are flat at first: no alarm in the first fifth."""
    settled: list[int] = []

    def record(prototypes: int, steps: int, from_step: int, **more: bool) -> Health:
        settled.append(from_step)
        return Health(prototypes, steps, from_step, **more)

    monkeypatch.setattr("frugalvit.tasks.pretraining.train.Health", record)
    pretrain(config(photos, tmp_path / "run", steps=20))
    assert settled == [4]


def test_the_report_compiles_nothing(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling the teacher again for the report on a CPU takes minutes."""
    seen: list[Backbone] = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **_: setattr(module, "_compiled_call_impl", module.forward)
    )
    monkeypatch.setattr("frugalvit.experiment.experiment.write_report", lambda *_, model, **__: seen.append(model))
    pretrain(config(photos, tmp_path / "run", steps=2, report=True, compile=True))
    assert [backbone._compiled_call_impl for backbone in seen] == [None]


@pytest.mark.parametrize(
    ("given", "rate"), [({}, 0.1), ({"drop_path": 0.4}, 0.4), ({"localization": {"grid": "raw"}}, 0.1)]
)
def test_init_keeps_the_runs_stochastic_depth(
    photos: Path, tmp_path: Path, given: dict[str, object], rate: float
) -> None:
    """A teacher has no stochastic depth; the new run uses the default of its network or its own option."""
    pretrain(config(photos, tmp_path / "run", backbone="swin_mini", steps=2))
    values = {"data": str(photos), "init": str(tmp_path / "run"), "img_size": 16}
    run = adopt_init_architecture(TrainConfig.parse(values | given), AutoValues())
    keywords = {} if run.drop_path == "auto" else {"drop_path": run.drop_path}
    backbone = make_backbone(run, 2, grid_norm=run.localization.grid == "normed", **keywords)
    depths = [module.drop_prob for module in backbone.modules() if isinstance(module, DropPath)]
    assert max(depths) == pytest.approx(rate) and backbone.grid_norm == (given != {"localization": {"grid": "raw"}})
    assert backbone.model.embed_dim == 8


def test_a_waiting_head_has_no_weight_decay(photos: Path, tmp_path: Path) -> None:
    """Until L_R begins, weight decay leaves its head alone."""
    heads = []
    for steps in (1, 4):
        waiting = {"steps": steps, "lr": 0.05, "optimizer": {"weight_decay": 0.5}, "matching": {"regions_from": 100.0}}
        pretrain(config(photos, tmp_path / str(steps), **waiting))
        state = load_state(tmp_path / str(steps))["task"]
        heads.append({name: value for name, value in state.items() if name.startswith(("regions.", "views."))})
    for name, value in heads[0].items():
        if name.startswith("regions."):
            assert torch.equal(value, heads[1][name]), name
    assert any(not torch.equal(value, heads[1][name]) for name, value in heads[0].items() if "views.student" in name)


def test_teacher_keeps_its_batch_norm_statistics() -> None:
    """Only parameters are averaged; the BatchNorm statistics are the teacher's own."""
    teacher, student = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    rates = {"teacher_temp": Constant(0.04), "momentum": Constant(0.5)}
    task = PretrainingTask(student, teacher, views=None, regions=None, **rates)  # type: ignore[arg-type]
    student.running_mean += 5
    with torch.no_grad():
        student.weight += 2
    task.after_step(0)
    assert teacher.weight.tolist() == [2.0] * 3
    assert teacher.running_mean is not None and teacher.running_mean.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "values",
    [
        {"matching": {"region_weight": 0.0}},
        {"matching": {"view_weight": 0.0, "regions_from": 0.0}},
        {"localization": {"weight": 0.5, "hidden": 4}, "images": "all"},
        {"crops": {"local_crops": 0}, "optimizer": {"clip_per": "global"}},
        {"crops": {"local_crops": 3, "local_size": 8}, "crops_at_once": 1, "matching": {"chunked": True}},
        {"accumulate": 2, "batch": 8},
        {"accumulate": 2, "batch": 8, "matching": {"centering": "sinkhorn", "koleo": 0.1, "chunked": True}},
    ],
    ids=["views", "regions", "drloc", "global-only", "few-at-once", "accumulated", "sinkhorn"],
)
def test_every_combination_runs(photos: Path, tmp_path: Path, values: dict[str, object]) -> None:
    result = pretrain(config(photos, tmp_path / "run", steps=3, **values))
    assert result.data["loss"] is not None and result.data["skipped_steps"] == 0


@pytest.mark.parametrize(
    ("matching", "warned"),
    [
        ({"regions_from": 50.0}, True),
        ({"regions_from": 50.0, "region_weight": 0.0}, False),
        ({"regions_from": 0}, False),
    ],
)
def test_regions_that_never_start_are_warned(
    photos: Path, tmp_path: Path, matching: dict[str, float], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(config(photos, tmp_path / "run", steps=1, matching=matching))
    assert ("--matching.regions-from 50 is not below" in capsys.readouterr().err) == warned


def test_regions_alone_cannot_start_late(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--matching\.view-weight 0"):
        pretrain(config(photos, tmp_path / "run", matching={"view_weight": 0.0, "regions_from": 1.0}))


def test_crops_in_parts_give_the_same_run(photos: Path, tmp_path: Path) -> None:
    for name, at_once in (("whole", 0), ("parts", 1)):
        pretrain(config(photos, tmp_path / name, steps=3, crops_at_once=at_once))
    first, second = (
        [line["loss"] for line in read_metrics(tmp_path / name) if line["split"] == "train"]
        for name in ("whole", "parts")
    )
    assert first == pytest.approx(second, rel=1e-4)


SINKHORN = {"centering": "sinkhorn", "koleo": 0.1}


def test_sinkhorn_and_koleo_resume_to_the_bit(photos: Path, tmp_path: Path) -> None:
    matching = PRETRAIN["matching"] | SINKHORN | {"regions_from": 0.0, "region_weight": 0.5}  # type: ignore[operator]
    values = {"data": photos, "matching": matching}
    run_tiny("pretrain", out=tmp_path / "complete", **values)
    with interrupted_at(7):
        run_tiny("pretrain", out=tmp_path / "cut", **values)
    run_tiny("pretrain", resume=tmp_path / "cut")
    assert differences(tmp_path / "complete", tmp_path / "cut") == []
    lines = [line for line in read_metrics(tmp_path / "cut") if line["split"] == "train"]
    assert len(lines) == 10
    for line in lines:
        total = 0.5 * (line["view_loss"] + line["region_loss"]) + 0.1 * line["koleo"]
        assert line["loss"] == pytest.approx(total, rel=1e-5) and 1 <= line["region_prototypes_used"] <= 16


@pytest.mark.parametrize("option", SINKHORN)
def test_each_option_changes_the_run(option: str, photos: Path, tmp_path: Path) -> None:
    losses = []
    for matching in ({}, {option: SINKHORN[option]}):
        pretrain(config(photos, tmp_path / str(len(losses)), steps=2, log_every=1, matching=matching))
        losses.append([line["loss"] for line in read_metrics(tmp_path / str(len(losses))) if line["split"] == "train"])
    assert all(one != other for one, other in zip(*losses, strict=True))


def test_options_without_effect_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"matching\.center_momentum"):
        config(photos, tmp_path / "run", matching={"centering": "sinkhorn", "center_momentum": 0.5})
    with pytest.raises(UserError, match="--batch"):  # no neighbour in a part of one image
        pretrain(config(photos, tmp_path / "run", steps=1, batch=4, accumulate=4, matching={"koleo": 0.1}))


def test_accumulation_updates_the_center_once(photos: Path, tmp_path: Path) -> None:
    """Two parts of four images give nearly the center of one part of eight; their crops differ."""
    levels = {"regions_from": 0.0, "region_weight": 0.5, "center_momentum": 0.5}
    for name, parts in (("one", 1), ("two", 2)):
        pretrain(config(photos, tmp_path / name, steps=1, lr=1e-9, accumulate=parts, matching=levels))
    states = [load_state(tmp_path / name)["task"] for name in ("one", "two")]
    for level in ("views", "regions"):
        one, two = (state[f"{level}.center"] for state in states)
        # A center that moves twice by half reaches three quarters of the mean instead of one half.
        assert two.norm() / one.norm() == pytest.approx(1.0, abs=0.2)


COLLAPSES = {
    # No sharpening: the outputs of the teacher are flat, and the student learns that.
    "uniform collapse": {"teacher_temp": 5.0, "teacher_temp_start": 5.0},
    "uniform collapse with Sinkhorn": {"teacher_temp": 5.0, "teacher_temp_start": 5.0, "centering": "sinkhorn"},
    # No centering and a very sharp teacher: one prototype gets all images.
    "one-prototype collapse": {"teacher_temp": 0.005, "teacher_temp_start": 0.005, "center_momentum": 1.0},
}


@pytest.mark.parametrize(("name", "seed"), [(name, 0) for name in COLLAPSES] + [("uniform collapse", 3)])
def test_a_forced_collapse_is_named(name: str, seed: int, photos: Path, tmp_path: Path) -> None:
    """Also if the features stay as spread as at random (seed 3)."""
    forced = COLLAPSES[name] | {"regions_from": 0.0, "region_weight": 0.0, "hold_last": 0.0}
    run = config(photos, tmp_path / "run", steps=60, log_every=2, lr=3e-3, matching=forced, seed=seed)
    result = pretrain(run.with_options({"health.stop_on_collapse": True}, PretrainConfig))
    assert name.removesuffix(" with Sinkhorn") in result.data["health"], result.data
    assert result.data["steps"] < 60 and (tmp_path / "run" / "model" / "config.json").exists()


def test_zero_weights_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to learn"):
        pretrain(config(photos, tmp_path / "run", matching={"region_weight": 0.0, "view_weight": 0.0}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("labels", "has_knn"), [("auto", True), ("ignore", False)])
def test_unlabelled_images_beside_classes_are_used(labels: str, has_knn: bool, tmp_path: Path) -> None:
    """Unreadable files are recorded by name."""
    folder = write_images(tmp_path / "photos")
    for number in range(3):
        shutil.copy(folder / "train" / "cat" / "0.png", folder / "train" / f"loose{number}.png")
    (folder / "train" / "words.png").write_bytes(b"just some words")
    run = config(folder, tmp_path / "run", steps=2, label_source=labels, report=True)
    summary = pretrain(run).data
    assert (summary["knn"] is not None) == has_knn
    facts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert facts["used"] == {"train": 27} and facts["images"] == 28
    assert any("unlabelled image" in note for note in facts["notes"]) == has_knn
    assert facts["left_out"]["count"] == 1
    assert [Path(file["name"]).name for file in facts["left_out"]["files"]] == ["words.png"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "words.png" in page and "not an image" in page and "train: 27 images" in page


def test_unlabelled_folder_and_summary(photos: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate((photos / "train").rglob("*.png")):
        (flat / f"{number}.png").write_bytes(path.read_bytes())
    result = pretrain(config(flat, tmp_path / "run", steps=3))
    assert result.data["knn"] is None
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["auto"]


@pytest.mark.parametrize(
    ("pixels", "local", "weight", "refused"), [(32, 16, 1.0, False), (16, 16, 1.0, True), (16, 16, 0.0, False)]
)
def test_crops_of_one_region(pixels: int, local: int, weight: float, refused: bool) -> None:
    backbone: Any = SimpleNamespace(name="net", grid_size=lambda size: (size[0] // 16, size[1] // 16))
    settings = PretrainConfig.parse({"data": "x", "matching": {"region_weight": weight}})
    augment = MultiCrop(CropsConfig(local_size=local), (pixels, pixels))
    with pytest.raises(UserError, match="no regions to match") if refused else nullcontext():
        _check_crops(backbone, augment, settings)
