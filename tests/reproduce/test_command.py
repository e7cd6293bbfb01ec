"""``frugalvit reproduce``: every table parses, small ones run, begin from each other's runs, and go on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from frugalvit.cli.main import main
from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.tools import ReproduceConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.reproduce import TABLES, command, reproduce
from frugalvit.reproduce.command import folder_name
from frugalvit.reproduce.scoring import probe_scores
from frugalvit.reproduce.table_specs import Recipe
from helpers.tiny_runs import write_images

ROOT = Path(__file__).parents[2]
KINDS: dict[str, tuple[Any, Any]] = {
    "train": (CompareConfig, TrainConfig),
    "detect": (DetectCompareConfig, DetectConfig),
    "segment": (SegmentCompareConfig, SegmentConfig),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    recipe = TABLES[name]
    starts = {start: f"runs/{start}" for start in recipe.starts}
    for table, setting in recipe.starts.values():
        assert setting in TABLES[table].settings
    settings = {key: values.format(**starts) for key, values in recipe.settings.items()}
    assert len({folder_name(key) for key in settings}) == len(settings)
    if recipe.kind == "pretrain":
        for values in settings.values():
            assert PretrainConfig.parse(recipe.common | parse_assignments(values.split()) | {"data": "x"}).data == "x"
        return
    compared, one = KINDS[recipe.kind]
    texts = [f"{key}: {values}" for key, values in settings.items()]
    made = compared.parse(recipe.common | {"data": "x", "settings": texts, "metric": recipe.metric})
    for values in made.named_settings().values():
        assert one.parse(made.run_values(values, 0, str(tmp_path))).data == "x"


@pytest.mark.parametrize("name", [name for name, recipe in TABLES.items() if recipe.kind == "pretrain"])
def test_pretraining_says_what_auto_decided_otherwise_since_or_elsewhere(name: str) -> None:
    """The batch depends on the device; on small images the teacher's momentum was chosen anew by these tables."""
    recipe = TABLES[name]
    for setting, values in recipe.settings.items():
        given = recipe.common | parse_assignments(values.split())
        assert isinstance(given["batch"], int) or str(given["batch"]).isdigit()
        assert given["img_size"] > 32 or "momentum" in given.get("matching", {}), setting


def test_a_table_that_begins_from_another_one_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flowers = write_images(tmp_path / "data" / "flowers102")
    (flowers / "val").rename(flowers / "test")
    tiny = {"batch": 4, "img_size": 32, "split": "given"}
    few = Recipe(
        "few", "flowers102", tiny, {"both": "init={esvit}", "none": "init=none"}, starts={"esvit": ("pre", "V")}
    )
    views = "matching.region_weight=0 crops.local_crops=2 matching.prototypes=16"
    pre = Recipe(
        "pre", "flowers102", {"batch": 4, "img_size": 32}, {"V": views, "V + R": "matching.prototypes=16"}, "pretrain"
    )
    monkeypatch.setitem(TABLES, "few", few)
    monkeypatch.setitem(TABLES, "pre", pre)
    small = [
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
        "--backbone",
        "swin_nano",
        "--steps",
        "2",
    ]
    small += ["--seeds", "1", "--json", "--quiet"]
    assert main(["reproduce", "few", *small, "--only", "none"]) == 0
    alone = json.loads(capsys.readouterr().out)["rows"]
    assert main(["reproduce", "few", *small]) == 0
    first = json.loads(capsys.readouterr().out)
    run = tmp_path / "out" / "pre" / "swin_nano" / "V" / "seed_0"
    assert (run / "summary.json").exists() and not (run / "reproduced.json").exists()
    settings = first["table"]["swin_nano"]["settings"]
    assert set(settings) == {"both", "none"} and settings["none"]["values"] == [alone[0][-1]]
    assert str(run) in (tmp_path / "out" / "few" / "swin_nano" / "both" / "seed_0" / "config.yaml").read_text()

    assert main(["probe", "knn", str(run), str(flowers), "--quiet", "--json"]) == 0  # it must not count as the table's
    capsys.readouterr()
    before = (run / "summary.json").stat().st_mtime_ns
    assert main(["reproduce", "pre", *small, "--only", "V"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["objective"] for row in rows] == ["V"] and (run / "summary.json").stat().st_mtime_ns == before
    assert {"knn", "linear", "logistic", "match_accuracy", "match_error_px", "attention_bits"} <= set(rows[0])
    assert json.loads((run / "reproduced.json").read_text())["knn"] == rows[0]["knn"]
    assert len(json.loads((run / "probes.json").read_text())) == 3, "each probe's own result stays beside it"

    longer = [*small[:-1], "--steps", "3", "--only", "both", "--seeds", "2"]  # in words now, of another length
    assert main(["reproduce", "few", *longer]) == 2
    told = capsys.readouterr().err
    assert f"{run} was run with steps = 2, now 3 is wanted: the table begins from it as it is" in told
    assert (run / "summary.json").stat().st_mtime_ns == before


def finish(run: Path) -> None:
    """The sign by which a run is known to be finished."""
    run.mkdir(parents=True)
    (run / "summary.json").write_text("{}")


@pytest.mark.parametrize(
    ("table", "asked", "begun"),
    [
        ("best-cifar", {}, (100, None)),
        ("best-cifar", {"epochs": 2.0}, (2, None)),
        ("best-cifar", {"epochs": 684.0}, (100, None)),
        ("few-labels", {"steps": 3}, (40, 3)),
        ("few-labels", {"steps": 5000}, (40, None)),
    ],
)
def test_a_longer_run_does_not_lengthen_its_start(
    table: str,
    asked: dict[str, Any],
    begun: tuple[int, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial's length is meant for both; "--epochs 684" is how long to go on from the pre-training as it is."""
    made: list[Any] = []
    monkeypatch.setattr("frugalvit.comparison.compare.run_once", lambda config, _: made.append(config))
    config = ReproduceConfig(table=table, data=str(tmp_path), out=str(tmp_path / "out"), **asked)
    command._make_start(*TABLES[table].starts["esvit"], config)
    assert (made[0].epochs, made[0].steps) == begun


def test_a_start_begins_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-100's longer pre-training goes on from the shorter one, which is made before it and as long as ever."""
    made: list[Any] = []
    monkeypatch.setattr("frugalvit.comparison.compare.run_once", lambda config, _: made.append(config))
    config = ReproduceConfig(table="best-cifar", data=str(tmp_path), out=str(tmp_path / "out"), epochs=684)
    command._make_start(*TABLES["best-cifar"].starts["longer"], config)
    assert [one.epochs for one in made] == [100, 300]
    assert made[0].init is None and made[1].init == f"{made[0].out}/model", "without its heads"
    finish(Path(made[1].out))
    command._make_start(*TABLES["best-cifar"].starts["longer"], config)
    assert len(made) == 2, "made already"


@pytest.mark.parametrize(("finished", "begun"), [(1, ["L_V+L_R", "EsViT"]), (2, [])])
def test_what_finished_runs_began_from_is_not_made_again(
    finished: int, begun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds that are there need no start; one more does."""
    made: list[str] = []

    def run_once(config: Any, _: Any) -> dict[str, float]:
        folder = Path(config.out)
        if not (folder / "summary.json").exists():
            made.append(folder.parent.name)
        return {"top1": 0.0}

    monkeypatch.setattr("frugalvit.comparison.compare.run_once", run_once)
    (tmp_path / "flowers102").mkdir()
    out = tmp_path / "out"
    for seed in range(finished):
        finish(out / "few-labels" / TABLES["few-labels"].backbones[0] / "EsViT" / f"seed_{seed}")
    config = ReproduceConfig(table="few-labels", data=str(tmp_path), out=str(out), only=["EsViT"], seeds=2)
    command.reproduce(config)
    assert made == begun


@pytest.mark.parametrize(
    ("table", "start", "epochs", "lengths"),
    [("best-cifar", "longer", 1, [1, 1]), ("esvit-cifar", "shorter", 150, [150])],
)
def test_a_start_is_as_long_as_is_wanted(
    table: str, start: str, epochs: int, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial is short throughout, and a start that is a row of the same table is as long as its rows."""
    made: list[Any] = []
    monkeypatch.setattr("frugalvit.comparison.compare.run_once", lambda config, _: made.append(config))
    config = ReproduceConfig(table=table, data=str(tmp_path), out=str(tmp_path / "out"), epochs=epochs)
    command._make_start(*TABLES[table].starts[start], config)
    assert [one.epochs for one in made] == lengths


def test_scores_of_an_older_table_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were once kept flat in probes.json, to which ``probe`` may have added its results since."""
    monkeypatch.setattr("frugalvit.probing.commands.knn", lambda _: pytest.fail("asked again"))
    old = {"knn": 28.5, "linear": 33.6, "attention_bits": 2.1}
    for more in ({}, {"knn flowers102": {"top1": 1.0}}):
        (tmp_path / "probes.json").write_text(json.dumps(old | more))
        assert probe_scores(tmp_path, "x", "cpu") == old
    (tmp_path / "reproduced.json").write_text(json.dumps(old | {"knn": 30.0}))
    assert probe_scores(tmp_path, "x", "cpu")["knn"] == 30.0
    (tmp_path / "reproduced.json").write_text("[1")
    with pytest.raises(UserError, match=r"reproduced\.json is not readable"):
        probe_scores(tmp_path, "x", "cpu")


def test_what_is_kept_of_a_run_holds_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("keep_results", ROOT / "docs" / "tools" / "keep_results.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "KEPT", tmp_path / "kept")
    for setting, files in {
        "old": {"probes.json": {"knn": 2.0, "knn x": {"top1": 9.0}}},
        "new": {"probes.json": {"knn x": {"top1": 9.0}}, "reproduced.json": {"knn": 2.0}},
    }.items():
        run = tmp_path / "runs" / "table" / "swin_nano" / setting / "seed_0"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "split": "val"}\n')
        for file, content in {"summary.json": {"knn": 1.0, "steps": 7}, **files}.items():
            (run / file).write_text(json.dumps(content))
    tool.keep(tmp_path / "runs")
    for setting in ("old", "new"):
        kept = tmp_path / "kept" / "table" / "swin_nano" / setting / "seed_0.json"
        assert json.loads(kept.read_text()) == {"knn": 2.0, "steps": 7}


def test_epochs_count_where_a_table_says_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 images, 12 a step: two steps, not the table's hundred, nor the setting's own nine epochs."""
    write_images(tmp_path / "data" / "flowers102")
    table = Recipe("table", "flowers102", {"batch": 12, "img_size": 32, "steps": 100}, {"a": "", "b": "ema=0 epochs=9"})
    monkeypatch.setitem(TABLES, "table", table)
    small = {"data": str(tmp_path / "data"), "out": str(tmp_path / "out"), "backbone": "swin_nano", "epochs": 1}
    reproduce(ReproduceConfig.parse(small | {"table": "table", "seeds": 1, "only": ["b"]}))
    summary = tmp_path / "out" / "table" / "swin_nano" / "b" / "seed_0" / "summary.json"
    assert json.loads(summary.read_text(encoding="utf-8"))["steps"] == 2


def test_mistakes(tmp_path: Path) -> None:
    write_images(tmp_path / "data" / "flowers102")
    small = {"data": str(tmp_path / "data"), "out": str(tmp_path / "out"), "backbone": "swin_nano", "img_size": 32}
    with pytest.raises(UserError, match="nothing to score on"):
        reproduce(ReproduceConfig.parse(small | {"table": "drloc-flowers", "steps": 1, "seeds": 1}))
    with pytest.raises(UserError, match="there is no folder"):
        reproduce(ReproduceConfig(table="drloc-flowers", data=str(tmp_path)))
    with pytest.raises(UserError, match="needs coco_mini"):
        reproduce(ReproduceConfig.parse(small | {"table": "detect-cascade"}))
    with pytest.raises(UserError, match="which has spaces"):
        reproduce(ReproduceConfig.parse(small | {"table": "few-labels", "out": str(tmp_path / "my tables")}))
    with pytest.raises(UserError, match="no setting 'L_X'"):
        reproduce(ReproduceConfig.parse(small | {"table": "esvit-flowers", "only": ["L_X"]}))
    assert "drloc-flowers" in reproduce(ReproduceConfig()).data["tables"]


def test_keywords_of_the_model_are_numbers_not_text() -> None:
    values = parse_assignments(["backbone_args.window_size=4", "backbone_args.depths=[1,1]", "backbone_args.act=gelu"])
    assert TrainConfig.parse({"data": "x"} | values).backbone_args == {
        "window_size": 4,
        "depths": [1, 1],
        "act": "gelu",
    }


def test_a_setting_may_have_several_values() -> None:
    values = parse_assignments(["crops.blur_sigma=0.1,0.3", "crops.jitter=0.1,0.2,0.3,0.4"])
    crops = PretrainConfig.parse({"data": "x"} | values).crops
    assert crops.blur_sigma == (0.1, 0.3) and crops.jitter == (0.1, 0.2, 0.3, 0.4)
    with pytest.raises(UserError, match="2 values"):
        PretrainConfig.parse({"data": "x"} | parse_assignments(["crops.blur_sigma=0.1"]))
