"""--continue keeps everything of the other run, and new parts start from scratch."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frugalvit import RegionMatching, ViewMatching, create_backbone
from frugalvit.cli import main as cli
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.engine.param_groups import remap_optimizer_state
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import AutoValues
from frugalvit.runs.run_folder import read_data_facts as read_facts
from frugalvit.tasks.pretraining.continue_run import ContinuedRun, start_from_heads
from frugalvit.tasks.pretraining.task import PretrainingTask
from helpers.tiny_runs import PRETRAIN, read_metrics, write_config, write_images


@pytest.fixture(scope="module")
def views_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with L_V alone, in the folder of its images and settings."""
    folder = tmp_path_factory.mktemp("continuing")
    write_images(folder / "images")
    matching = PRETRAIN["matching"] | {"region_weight": 0.0, "regions_from": 0.0}  # type: ignore[operator]
    write_config(folder / "views.yaml", PRETRAIN, matching=matching, steps=4)
    both = PRETRAIN["matching"] | {"region_weight": 0.5, "regions_from": 0.0}  # type: ignore[operator]
    write_config(folder / "both.yaml", PRETRAIN, matching=both, steps=8)
    assert run(folder, "views.yaml", "views") == 0
    return folder


def inherited(config: PretrainConfig) -> PretrainConfig:
    return ContinuedRun(str(config.continue_from)).inherit_options(config, AutoValues())


def run(folder: Path, config: str, out: str, *more: str) -> int:
    words = ["pretrain", str(folder / "images"), "--config", str(folder / config), "--out", str(folder / out)]
    return cli.main([*words, "--device", "cpu", "--quiet", *more])


def state(folder: Path, name: str, file: str = "last.pt") -> dict:
    return torch.load(folder / name / "checkpoints" / file, weights_only=True)


def test_adding_regions_keeps_views(views_only: Path) -> None:
    """The first state of the new run is the last of the old one, plus a fresh region head."""
    folder = views_only
    assert run(folder, "both.yaml", "both", "--continue", str(folder / "views"), "--save-every", "100") == 0
    old, first, last = state(folder, "views"), state(folder, "both", "previous.pt"), state(folder, "both")
    assert (old["step"], first["step"], last["step"]) == (4, 4, 8)
    assert old["best_step"] == 4 and (first["best"], first["best_step"], first["window"]) == (-math.inf, -1, {})
    assert all(torch.equal(first["task"][name], value) for name, value in old["task"].items())
    fresh = {name.split(".")[0] for name in first["task"].keys() - old["task"].keys()}
    assert fresh == {"regions"}
    student, teacher = (first["task"][f"regions.{who}.last_layer.weight_v"] for who in ("student", "teacher"))
    assert torch.equal(student, teacher) and not first["task"]["regions.center"].any()

    def moments(checkpoint: dict) -> dict[str, torch.Tensor]:
        groups = checkpoint["optimizer"]["param_groups"]
        names = {i: name for g in groups for i, name in zip(g["params"], g["param_names"], strict=True)}
        return {names[i]: values["exp_avg"] for i, values in checkpoint["optimizer"]["state"].items()}

    before, after = moments(old), moments(first)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert next(line["step"] for line in read_metrics(folder / "both") if line["split"] == "train") > 4


def test_auto_batch_with_continue(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "--continue", str(views_only / "views"), "--device", "cpu", "--no-report", "--steps", "5"]
    assert cli.main([*words, "--out", str(views_only / "tried"), "--auto-batch"]) == 0
    assert "auto-batch: batch stays 8" in capsys.readouterr().err


def test_auto_values_are_inherited(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Network, input size and heads: "auto" would decide each of them otherwise."""
    open_ = {"crops": PRETRAIN["crops"], "health": PRETRAIN["health"], "batch": 8, "lr": 1e-3, "report": False}
    write_config(views_only / "open.yaml", open_, steps=6)
    words = ["pretrain", str(views_only / "images"), "--config", str(views_only / "open.yaml"), "--device", "cpu"]
    assert cli.main([*words, "--out", str(views_only / "follows"), "--continue", str(views_only / "views")]) == 0
    said = capsys.readouterr().err
    assert f"matching.bottleneck = 4: inherited from {views_only / 'views'}" in said and "continuing" in said
    theirs, ours = (read_yaml(views_only / name / "config.yaml") for name in ("views", "follows"))
    heads = ("prototypes", "hidden", "bottleneck", "norm_last")
    assert {name: ours["matching"][name] for name in heads} == {name: theirs["matching"][name] for name in heads}
    assert [ours[name] for name in ("backbone", "img_size")] == ["swin_nano", 16]
    assert ours["backbone_args"] == theirs["backbone_args"]
    # What is asked for counts, and is refused where it does not fit.
    words += ["--out", str(views_only / "odd"), "--continue", str(views_only / "views")]
    assert cli.main([*words, "--matching.prototypes", "32"]) == 2
    assert "has another shape" in capsys.readouterr().err


def test_unset_options_are_inherited(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data, batch, crops, rates and losses; its length is doubled; and what is done otherwise is said."""
    words = ["pretrain", "--continue", str(views_only / "views"), "--device", "cpu", "--no-report"]
    assert cli.main([*words, "--out", str(views_only / "again")]) == 0
    theirs, ours = (read_yaml(views_only / name / "config.yaml") for name in ("views", "again"))
    own = ("continue_from", "out", "steps", "device")
    assert [name for name in theirs if name not in own and theirs[name] != ours[name]] == []
    assert (theirs["steps"], ours["steps"], ours["crops"]["local_crops"]) == (4, 8, 2)
    said = capsys.readouterr().err
    assert f"auto: steps = 8: twice the length of {views_only / 'views'}" in said
    assert said.count("auto: recipe = small") == 1
    assert f"unlike {views_only / 'views'}: steps 8 (there 4)\n" in said
    more = ["--steps", "5", "--batch", "6", "--crops.local-crops", "0", "--out", str(views_only / "otherwise")]
    assert cli.main([*words, *more]) == 0
    said = capsys.readouterr().err
    assert read_facts(views_only / "otherwise")["batch"] == 6, "a number, as --resume compares it"
    assert "batch 6 (there 8), crops.local_crops 0 (there 2), steps 5 (there 4)" in said
    # What a named recipe says is asked for too; the length in epochs is doubled in steps.
    values = read_yaml(views_only / "views" / "config.yaml") | {"steps": None, "epochs": 2.0}
    config = PretrainConfig.parse({"continue_from": str(views_only / "views"), "recipe": "esvit-paper"})
    (views_only / "epochs").mkdir()
    write_config(views_only / "epochs" / "config.yaml", values)
    shutil.copy(views_only / "views" / "data.json", views_only / "epochs")
    assert inherited(config).matching.prototypes == 65536
    plain = PretrainConfig.parse({"continue_from": str(views_only / "epochs")})
    assert inherited(plain).steps == 12, "24 images, batch 8, 2 epochs"
    refused = PretrainConfig.parse({"continue_from": str(views_only / "views"), "accumulate": 9})
    with pytest.raises(UserError, match="--accumulate"):
        inherited(refused)


def test_continue_with_moved_data(
    views_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another folder a relative place means another one: whose it is, and that DATA can be given, is said."""
    shutil.copytree(views_only / "views", tmp_path / "views")
    config = tmp_path / "views" / "config.yaml"
    config.write_text(config.read_text().replace(f"data: {views_only / 'images'}", "data: images/"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = ["--continue", "../views", "--device", "cpu", "--quiet", "--out", "run"]
    assert cli.main(["pretrain", *words]) == 2
    told = "frugalvit pretrain NEW_PATH --continue ../views"
    said = capsys.readouterr().err.strip()
    assert "'images/'" in said and said.endswith(told) and len(said.splitlines()) == 1
    assert cli.main(["pretrain", "wrong", *words]) == 2
    assert "elsewhere now" not in capsys.readouterr().err


def test_continue_must_be_longer(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(views_only, "both.yaml", "short", "--continue", str(views_only / "views"), "--steps", "3")
    said = capsys.readouterr().err
    assert status == 2 and "is at step 4 and this run would end at 3" in said
    assert "run folder" not in said and not (views_only / "short").exists()
    assert "cache:" not in said, "the images need not be decoded for that"


def test_another_backbone_is_refused(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = views_only
    arguments = {"embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2]}
    write_config(folder / "other.yaml", PRETRAIN, backbone_args=arguments)
    status = run(folder, "other.yaml", "other", "--continue", str(folder / "views"))
    assert status == 2 and "another backbone" in capsys.readouterr().err


def test_init_loads_heads(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = views_only
    write_config(folder / "one.yaml", PRETRAIN, steps=1, lr=1e-12)
    words = ["pretrain", str(folder / "images"), "--config", str(folder / "one.yaml"), "--out", str(folder / "init")]
    assert cli.main([*words, "--init", str(folder / "views"), "--device", "cpu"]) == 0
    assert f"loaded from {folder / 'views'}, step 4 (view level)" in capsys.readouterr().err
    old, new = state(folder, "views")["task"], state(folder, "init")["task"]
    torch.testing.assert_close(new["views.student.last_layer.weight_v"], old["views.student.last_layer.weight_v"])


def test_init_loads_heads_of_the_previous_checkpoint(
    views_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has lost its last checkpoint still has heads; an exported folder never had any, which is said."""
    run = shutil.copytree(views_only / "views", tmp_path / "views")
    (run / "checkpoints" / "last.pt").replace(run / "checkpoints" / "previous.pt")
    task: Any = nn.ModuleDict({"views": task_with_regions().views})
    wanted = state(views_only, "views")["task"]["views.student.last_layer.weight_v"]
    start_from_heads(task, str(run))
    assert f"loaded from {run}, step 4 (view level)" in capsys.readouterr().err
    torch.testing.assert_close(task.state_dict()["views.student.last_layer.weight_v"], wanted)
    start_from_heads(task, str(run / "model"))
    assert f"{run / 'model'} has no checkpoint with projection heads" in capsys.readouterr().err
    (run / "checkpoints" / "previous.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"No checkpoint of .* is intact"):
        start_from_heads(task, str(run))


def test_init_loads_heads_of_released_files(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file as EsViT writes it: heads and centre come along, heads of another size are refused with the right size."""
    folder = views_only
    task = state(folder, "views")["task"]
    teacher = {n.removeprefix("teacher.model."): v for n, v in task.items() if n.startswith("teacher.model.")}
    head = {n.replace("views.teacher.", "head."): v for n, v in task.items() if n.startswith("views.teacher.")}
    center = torch.full_like(task["views.center"], 0.5)
    torch.save({"teacher": teacher | head, "dino_loss": {"center": center}, "epoch": 3}, folder / "released.pth")
    still = PRETRAIN["matching"] | {"center_momentum": 1.0}  # type: ignore[operator]
    write_config(folder / "still.yaml", PRETRAIN, steps=1, lr=1e-12, matching=still)
    assert run(folder, "still.yaml", "from_file", "--init", str(folder / "released.pth")) == 0
    new = state(folder, "from_file")["task"]
    for who in ("student", "teacher"):
        torch.testing.assert_close(new[f"views.{who}.mlp.0.weight"], task["views.teacher.mlp.0.weight"])
    assert torch.equal(new["views.center"], center)
    more = ["--init", str(folder / "released.pth"), "--matching.prototypes", "32"]
    assert run(folder, "still.yaml", "other_size", *more) == 2
    assert "--matching.prototypes 16" in capsys.readouterr().err


def test_continue_from_a_damaged_run(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = views_only
    broken = folder / "broken"
    (broken / "checkpoints").mkdir(parents=True)
    (broken / "config.yaml").write_text((folder / "views" / "config.yaml").read_text())
    (broken / "checkpoints" / "last.pt").write_bytes(b"PK\x03\x04 nothing more")
    assert run(folder, "both.yaml", "from_broken", "--continue", str(broken)) == 2
    assert "last.pt" in capsys.readouterr().err


def test_optimizer_state_is_mapped_by_name() -> None:
    old = {"state": {0: "a", 1: "b"}, "param_groups": [{"params": [0, 1], "param_names": ["x", "y"]}]}
    new = {"state": {}, "param_groups": [{"params": [0, 1, 2], "param_names": ["y", "new", "x"]}]}
    assert remap_optimizer_state(old, new)["state"] == {0: "b", 2: "a"}


def task_with_regions(view: bool = True) -> PretrainingTask:
    backbone = create_backbone("swin_nano", 16, **PRETRAIN["backbone_args"])  # type: ignore[arg-type]
    heads = {"prototypes": 16, "hidden": 8, "bottleneck": 4}
    views = ViewMatching(backbone.dim, **heads) if view else None
    regions = RegionMatching(backbone.dim, **heads)
    return SimpleNamespace(views=views, regions=regions)  # type: ignore[return-value]


def released_head(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    head = {f"head.{n}": v.clone() for n, v in task_with_regions().views.student.state_dict().items()}  # type: ignore[union-attr]
    merged = head | {f"head.{name.replace('__', '.')}": value for name, value in changed.items()}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ({"teacher": {"norm.weight": torch.ones(3)}}, "has no projection heads for this run"),
        ({"teacher": released_head()}, "heads loaded from {path}: view level\n"),
        (
            {"teacher": released_head(), "dino_loss": {"center": torch.zeros(1, 16)}},
            "heads loaded from {path}: view level with its center\n",
        ),
    ],
)
def test_loaded_heads_are_logged(
    checkpoint: dict, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.pth"
    torch.save(checkpoint, path)
    start_from_heads(task_with_regions(), str(path))
    assert words.format(path=path) in capsys.readouterr().err
    start_from_heads(task_with_regions(view=False), str(path))
    assert "no projection heads for this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("head", "center", "words"),
    [
        (released_head(last_layer__weight_v=None), None, r"of another kind \(last_layer.weight_v differs\)"),
        (released_head(mlp__6__weight=torch.ones(2, 2)), None, r"of another kind \(mlp.6.weight differs"),
        (released_head(last_layer__weight_v=torch.ones(16)), None, r"of another kind \(last_layer.weight_v differs"),
        (released_head(last_layer__weight_v=torch.ones(9, 4)), None, "--matching.prototypes 9 --matching.bottleneck 4"),
        (released_head(), torch.zeros(1, 5), "a center of 5 numbers and heads of 16 prototypes"),
    ],
)
def test_other_heads_are_refused_in_one_line(
    head: dict, center: torch.Tensor | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.pth"
    torch.save({"teacher": head} | ({} if center is None else {"dino_loss": {"center": center}}), path)
    with pytest.raises(UserError, match=words) as caught:
        start_from_heads(task_with_regions(), str(path))
    assert "\n" not in str(caught.value)
