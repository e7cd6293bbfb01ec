"""--continue keeps everything of the other run, and new parts start from scratch."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frugalvit import RegionMatching, ViewMatching
from frugalvit.cli import main as cli
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.engine.param_groups import remap_optimizer_state
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import AutoValues
from frugalvit.runs.run_folder import read_data_facts
from frugalvit.tasks.pretraining.continue_run import ContinuedRun, start_from_heads
from frugalvit.utils.files import read_json
from helpers.tiny_runs import PRETRAIN, load_state, read_metrics, write_config, write_images


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


def test_adding_regions_keeps_views(views_only: Path) -> None:
    """The first state of the new run is the last of the old one, plus a fresh region head."""
    folder = views_only
    assert run(folder, "both.yaml", "both", "--continue", str(folder / "views"), "--save-every", "100") == 0
    old, first, last = (
        load_state(folder / "views"),
        load_state(folder / "both", "previous.pt"),
        load_state(folder / "both"),
    )
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


def test_auto_values_are_inherited(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Network, input size and heads: "auto" would choose others."""
    values = {"crops": PRETRAIN["crops"], "health": PRETRAIN["health"], "batch": 8, "lr": 1e-3, "report": False}
    write_config(views_only / "open.yaml", values, steps=6)
    assert run(views_only, "open.yaml", "open", "--continue", str(views_only / "views")) == 0
    theirs, ours = (read_yaml(views_only / name / "config.yaml") for name in ("views", "open"))
    heads = ("prototypes", "hidden", "bottleneck", "norm_last")
    assert {name: ours["matching"][name] for name in heads} == {name: theirs["matching"][name] for name in heads}
    assert [ours[name] for name in ("backbone", "img_size")] == ["swin_nano", 16]
    assert ours["backbone_args"] == theirs["backbone_args"]
    # The user's options win, and are refused if they do not fit.
    assert run(views_only, "open.yaml", "odd", "--continue", str(views_only / "views"), "--matching.prototypes=32") == 2
    assert "has another shape" in capsys.readouterr().err


def test_unset_options_are_inherited(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data, batch, crops, rates and losses. The length is doubled, and differences are logged."""
    words = ["pretrain", "--continue", str(views_only / "views"), "--device", "cpu", "--no-report"]
    assert cli.main([*words, "--auto-batch", "--out", str(views_only / "again")]) == 0
    theirs, ours = (read_yaml(views_only / name / "config.yaml") for name in ("views", "again"))
    own = ("continue_from", "out", "steps", "device", "auto_batch")
    assert [name for name in theirs if name not in own and theirs[name] != ours[name]] == []
    assert (theirs["steps"], ours["steps"], ours["crops"]["local_crops"]) == (4, 8, 2)
    log = capsys.readouterr().err
    reasons = {
        value["name"]: value["reason"] for value in read_json(views_only / "again" / "decisions.json", list) or []
    }
    assert reasons["steps"] == f"twice the length of {views_only / 'views'}"
    assert "steps 8 " in log and "batch stays 8" in log
    assert log.count("recipe small") == 1
    more = ["--steps", "5", "--batch", "6", "--crops.local-crops", "0", "--out", str(views_only / "otherwise")]
    assert cli.main([*words, *more]) == 0
    assert read_data_facts(views_only / "otherwise")["batch"] == 6, "a number, as --resume compares it"
    assert "batch 6 (there 8), crops.local_crops 0 (there 2), steps 5 (there 4)" in capsys.readouterr().err


def test_recipe_and_length_of_a_continued_run(views_only: Path, tmp_path: Path) -> None:
    """A named recipe overrides inherited options; a length in epochs is doubled in steps."""
    source = str(views_only / "views")
    config = PretrainConfig.parse({"continue_from": source, "recipe": "esvit-paper"})
    assert inherited(config).matching.prototypes == 65536
    values = read_yaml(views_only / "views" / "config.yaml") | {"steps": None, "epochs": 2.0}
    write_config(tmp_path / "config.yaml", values)
    shutil.copy(views_only / "views" / "data.json", tmp_path)
    config = PretrainConfig.parse({"continue_from": str(tmp_path)})
    assert inherited(config).steps == 12, "24 images, batch 8, 2 epochs"
    with pytest.raises(UserError, match="--accumulate"):
        inherited(PretrainConfig.parse({"continue_from": source, "accumulate": 9}))


def test_continue_with_moved_data(
    views_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another working folder a relative path leads elsewhere."""
    shutil.copytree(views_only / "views", tmp_path / "views")
    config = tmp_path / "views" / "config.yaml"
    config.write_text(config.read_text().replace(f"data: {views_only / 'images'}", "data: images/"))
    monkeypatch.chdir(tmp_path)
    words = ["--continue", "views", "--device", "cpu", "--quiet", "--out", "run"]
    assert cli.main(["pretrain", *words]) == 2
    assert "has moved" in capsys.readouterr().err
    assert cli.main(["pretrain", "wrong", *words]) == 2
    assert "has moved" not in capsys.readouterr().err


def test_continue_must_be_longer(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(views_only, "both.yaml", "short", "--continue", str(views_only / "views"), "--steps", "3") == 2
    assert "is at step 4 and this run would end at 3" in capsys.readouterr().err
    assert not (views_only / "short").exists()


def test_another_backbone_is_refused(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2]}
    write_config(views_only / "other.yaml", PRETRAIN, backbone_args=arguments)
    assert run(views_only, "other.yaml", "other", "--continue", str(views_only / "views")) == 2
    assert "another backbone" in capsys.readouterr().err


def test_continue_from_a_damaged_run(views_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = views_only / "broken"
    (broken / "checkpoints").mkdir(parents=True)
    (broken / "config.yaml").write_text((views_only / "views" / "config.yaml").read_text())
    (broken / "checkpoints" / "last.pt").write_bytes(b"PK\x03\x04 nothing more")
    assert run(views_only, "both.yaml", "from_broken", "--continue", str(broken)) == 2
    assert "last.pt" in capsys.readouterr().err


def test_optimizer_state_is_mapped_by_name() -> None:
    old = {"state": {0: "a", 1: "b"}, "param_groups": [{"params": [0, 1], "param_names": ["x", "y"]}]}
    new = {"state": {}, "param_groups": [{"params": [0, 1, 2], "param_names": ["y", "new", "x"]}]}
    assert remap_optimizer_state(old, new)["state"] == {0: "b", 2: "a"}


# -- the heads of --init


def make_heads(*, with_views: bool = True) -> Any:
    dim, heads = 16, {"prototypes": 16, "hidden": 8, "bottleneck": 4}
    views = ViewMatching(dim, **heads) if with_views else None
    return SimpleNamespace(views=views, regions=RegionMatching(dim, **heads))


def released_head(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    head = {f"head.{name}": value.clone() for name, value in make_heads().views.student.state_dict().items()}
    merged = head | {f"head.{name.replace('__', '.')}": value for name, value in changed.items()}
    return {name: value for name, value in merged.items() if value is not None}


def test_init_loads_the_heads_of_a_run(views_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also from the previous checkpoint; an exported folder has no heads."""
    run = shutil.copytree(views_only / "views", tmp_path / "views")
    (run / "checkpoints" / "last.pt").replace(run / "checkpoints" / "previous.pt")
    task: Any = nn.ModuleDict({"views": make_heads().views})
    start_from_heads(task, str(run))
    old = load_state(views_only / "views")["task"]
    assert all(torch.equal(value, old[name]) for name, value in task.state_dict().items())
    start_from_heads(task, str(run / "model"))
    assert "start from scratch" in capsys.readouterr().err
    (run / "checkpoints" / "previous.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"No checkpoint of .* is intact"):
        start_from_heads(task, str(run))


def test_init_loads_heads_of_released_files(views_only: Path) -> None:
    """A file as EsViT writes it: heads and center are loaded."""
    task = load_state(views_only / "views")["task"]
    teacher = {n.removeprefix("teacher.model."): v for n, v in task.items() if n.startswith("teacher.model.")}
    head = {n.replace("views.teacher.", "head."): v for n, v in task.items() if n.startswith("views.teacher.")}
    center = torch.full_like(task["views.center"], 0.5)
    file = views_only / "released.pth"
    torch.save({"teacher": teacher | head, "dino_loss": {"center": center}, "epoch": 3}, file)
    still = PRETRAIN["matching"] | {"center_momentum": 1.0}  # type: ignore[operator]
    write_config(views_only / "still.yaml", PRETRAIN, steps=1, lr=1e-12, matching=still)
    assert run(views_only, "still.yaml", "from_file", "--init", str(file)) == 0
    new = load_state(views_only / "from_file")["task"]
    for network in ("student", "teacher"):
        torch.testing.assert_close(new[f"views.{network}.mlp.0.weight"], task["views.teacher.mlp.0.weight"])
    assert torch.equal(new["views.center"], center)


def test_a_file_without_heads_starts_from_scratch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"teacher": released_head()}, tmp_path / "file.pth")
    start_from_heads(make_heads(), str(tmp_path / "file.pth"))
    assert "view level loaded" in capsys.readouterr().err
    start_from_heads(make_heads(with_views=False), str(tmp_path / "file.pth"))
    assert "start from scratch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("head", "center"),
    [
        (released_head(last_layer__weight_v=None), None),
        (released_head(mlp__6__weight=torch.ones(2, 2)), None),
        (released_head(last_layer__weight_v=torch.ones(9, 4)), None),
        (released_head(), torch.zeros(1, 5)),
    ],
)
def test_other_heads_are_refused_in_one_line(
    head: dict[str, torch.Tensor], center: torch.Tensor | None, tmp_path: Path
) -> None:
    path = tmp_path / "file.pth"
    torch.save({"teacher": head} | ({} if center is None else {"dino_loss": {"center": center}}), path)
    with pytest.raises(UserError, match=r"^[^\n]*--matching\.prototypes[^\n]*$"):
        start_from_heads(make_heads(), str(path))
