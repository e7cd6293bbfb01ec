"""``frugalvit reproduce``: all tables are valid, small ones run, start from each other's runs, and resume."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from frugalvit.cli.main import main
from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.tools import ReproduceConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.formats.named_catalog import DATASETS
from frugalvit.errors import UserError
from frugalvit.utils.tables import CommandResult, Table
from helpers.tiny_runs import write_images
from reproduce import Reproduction, folder_name, list_tables, load_table, reproduce

ROOT = Path(__file__).parents[2]
KINDS: dict[str, tuple[Any, Any]] = {
    "train": (CompareConfig, TrainConfig),
    "detect": (DetectCompareConfig, DetectConfig),
    "segment": (SegmentCompareConfig, SegmentConfig),
}


TABLES = list_tables()


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_valid_options(name: str, tmp_path: Path) -> None:
    spec = load_table(name)
    starts = {start: f"runs/{start}" for start in spec.starts}
    for table, setting in spec.starts.values():
        assert setting in load_table(table).settings
    settings = {key: values.format(**starts) for key, values in spec.settings.items()}
    assert len({folder_name(key) for key in settings}) == len(settings)
    if spec.kind == "pretrain":
        for values in settings.values():
            assert PretrainConfig.parse(spec.common | parse_assignments(values.split()) | {"data": "x"}).data == "x"
        return
    compared, one = KINDS[spec.kind]
    texts = [f"{key}: {values}" for key, values in settings.items()]
    made = compared.parse(spec.common | {"data": "x", "settings": texts, "metric": spec.metric})
    for values in made.named_settings().values():
        assert one.parse(made.run_values(values, 0, str(tmp_path))).data == "x"


@pytest.mark.parametrize(
    ("name", "recipe"), [("drloc-datasets", "drloc-paper"), ("drloc-finetune-datasets", "drloc-finetune")]
)
def test_tables_of_ten_datasets_take_those_present(
    name: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, small = load_table(name), {"table": name, "data": str(tmp_path)}
    assert len(spec.datasets) == 10 and set(spec.datasets) < set(DATASETS) and spec.common["recipe"] == recipe
    with pytest.raises(UserError, match="domainnet_sketch"):
        reproduce(ReproduceConfig.parse(small))
    for file in DATASETS["svhn"].files:
        (tmp_path / file).touch()
    seen: list[str] = []

    def record(self: Reproduction, settings: dict[str, str]) -> CommandResult:
        seen.append(self._common_options(self.spec, self.config, "swin_nano")["data"])
        return CommandResult({"run": self.name}, [Table(["a"], [[1]], "swin_nano")])

    monkeypatch.setattr(Reproduction, "_compare", record)
    result = reproduce(ReproduceConfig.parse(small))
    assert seen == [f"svhn:{tmp_path}"] and result.data == {"svhn": {"run": f"{name}/svhn"}}
    assert result.tables[0].title == "svhn, swin_nano" and len(result.notes) == 9


@pytest.mark.parametrize("name", [name for name in TABLES if load_table(name).kind == "pretrain"])
def test_pretraining_sets_batch_and_momentum(name: str) -> None:
    """'auto' depends on the device for the batch, and has changed for the momentum on small images."""
    spec = load_table(name)
    for setting, values in spec.settings.items():
        options = spec.common | parse_assignments(values.split())
        assert isinstance(options["batch"], int) or str(options["batch"]).isdigit()
        assert options["img_size"] > 32 or "momentum" in options.get("matching", {}), setting


def test_table_that_starts_from_another_runs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flowers = write_images(tmp_path / "data" / "flowers102")
    (flowers / "val").rename(flowers / "test")
    tiny = {"batch": 4, "img_size": 32, "split": "given"}
    settings = {"both": "init={esvit}", "none": "init=none"}
    few = write_table(tmp_path / "few.yaml", common=tiny, settings=settings, starts={"esvit": ["pre", "V"]})
    views = "matching.region_weight=0 crops.local_crops=2 matching.prototypes=16"
    settings = {"V": views, "V + R": "matching.prototypes=16"}
    pre = write_table(tmp_path / "pre.yaml", kind="pretrain", common={"batch": 4, "img_size": 32}, settings=settings)
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
    assert main(["reproduce", few, *small, "--only", "none"]) == 0
    alone = json.loads(capsys.readouterr().out)["rows"]
    assert main(["reproduce", few, *small]) == 0
    first = json.loads(capsys.readouterr().out)
    run = tmp_path / "out" / "pre" / "swin_nano" / "V" / "seed_0"
    assert (run / "summary.json").exists() and not (run / "reproduced.json").exists()
    settings = first["table"]["swin_nano"]["settings"]
    assert set(settings) == {"both", "none"} and settings["none"]["values"] == [alone[0][-1]]
    assert str(run) in (tmp_path / "out" / "few" / "swin_nano" / "both" / "seed_0" / "config.yaml").read_text()

    assert main(["probe", "knn", str(run), str(flowers), "--quiet", "--json"]) == 0  # not one of the table's probes
    capsys.readouterr()
    before = (run / "summary.json").stat().st_mtime_ns
    assert main(["reproduce", pre, *small, "--only", "V"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["objective"] for row in rows] == ["V"] and (run / "summary.json").stat().st_mtime_ns == before
    assert {"knn", "linear", "logistic", "match_accuracy", "match_error_px", "attention_bits"} <= set(rows[0])
    assert json.loads((run / "reproduced.json").read_text())["knn"] == rows[0]["knn"]
    assert len(json.loads((run / "probes.json").read_text())) == 3, "the results of the probes are recorded too"

    longer = [*small[:-1], "--steps", "3", "--only", "both", "--seeds", "2"]  # of another length
    assert main(["reproduce", few, *longer]) == 2
    error = capsys.readouterr().err
    assert str(run) in error and "steps = 2" in error
    assert (run / "summary.json").stat().st_mtime_ns == before


def write_table(path: Path, **values: Any) -> str:
    path.write_text(yaml.safe_dump({"about": path.stem, "data": "flowers102"} | values, allow_unicode=True))
    return str(path)


def finish(run: Path) -> None:
    """Mark a run as finished."""
    run.mkdir(parents=True)
    (run / "summary.json").write_text("{}")


@pytest.mark.parametrize(
    ("table", "options", "length"),
    [
        ("best-cifar", {}, (100, None)),
        ("best-cifar", {"epochs": 2.0}, (2, None)),
        ("best-cifar", {"epochs": 684.0}, (100, None)),
        ("few-labels", {"steps": 3}, (40, 3)),
        ("few-labels", {"steps": 5000}, (40, None)),
    ],
)
def test_longer_runs_do_not_lengthen_their_start(
    table: str, options: dict[str, Any], length: tuple[int, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter length applies to the start too, a longer one does not."""
    made: list[Any] = []
    monkeypatch.setattr("frugalvit.comparison.compare.run_once", lambda config, _: made.append(config))
    config = ReproduceConfig(table=table, data=str(tmp_path), out=str(tmp_path / "out"), **options)
    Reproduction(config).make_start(*load_table(table).starts["esvit"])
    assert (made[0].epochs, made[0].steps) == length


def test_starts_may_have_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("frugalvit.comparison.compare.run_once", lambda config, _: made.append(config))
    config = ReproduceConfig(table="best-cifar", data=str(tmp_path), out=str(tmp_path / "out"), epochs=684)
    Reproduction(config).make_start(*load_table("best-cifar").starts["longer"])
    assert [one.epochs for one in made] == [100, 300]
    assert made[0].init is None and made[1].init == f"{made[0].out}/model"
    finish(Path(made[1].out))
    Reproduction(config).make_start(*load_table("best-cifar").starts["longer"])
    assert len(made) == 2


@pytest.mark.parametrize(("finished", "expected"), [(1, ["L_V+L_R", "EsViT"]), (2, [])])
def test_finished_runs_need_no_start(
    finished: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        finish(out / "few-labels" / load_table("few-labels").backbones[0] / "EsViT" / f"seed_{seed}")
    config = ReproduceConfig(table="few-labels", data=str(tmp_path), out=str(out), only=["EsViT"], seeds=2)
    reproduce(config)
    assert made == expected


@pytest.mark.parametrize(
    ("table", "start", "epochs", "lengths"),
    [("best-cifar", "longer", 1, [1, 1]), ("esvit-cifar", "shorter", 150, [150])],
)
def test_starts_are_as_short_as_the_runs(
    table: str, start: str, epochs: int, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is a row of the same table is as long as the other rows."""
    made: list[Any] = []
    monkeypatch.setattr("frugalvit.comparison.compare.run_once", lambda config, _: made.append(config))
    config = ReproduceConfig(table=table, data=str(tmp_path), out=str(tmp_path / "out"), epochs=epochs)
    Reproduction(config).make_start(*load_table(table).starts[start])
    assert [one.epochs for one in made] == lengths


def test_keep_results_stores_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("keep_results", ROOT / "docs" / "tools" / "keep_results.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    run = tmp_path / "runs" / "table" / "swin_nano" / "setting" / "seed_0"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "split": "val"}\n')
    for file, content in {"summary.json": {"knn": 1.0, "steps": 7}, "reproduced.json": {"knn": 2.0}}.items():
        (run / file).write_text(json.dumps(content))
    tool.keep(tmp_path / "runs")
    stored = tmp_path / "results" / "table" / "swin_nano" / "setting" / "seed_0.json"
    assert json.loads(stored.read_text()) == {"knn": 2.0, "steps": 7}


def test_epochs_override_a_tables_steps(tmp_path: Path) -> None:
    """24 images at batch 12 are two steps, not the table's 100, nor the setting's 9 epochs."""
    write_images(tmp_path / "data" / "flowers102")
    common = {"batch": 12, "img_size": 32, "steps": 100}
    table = write_table(tmp_path / "table.yaml", common=common, settings={"a": "", "b": "ema=0 epochs=9"})
    small = {"data": str(tmp_path / "data"), "out": str(tmp_path / "out"), "backbone": "swin_nano", "epochs": 1}
    reproduce(ReproduceConfig.parse(small | {"table": table, "seeds": 1, "only": ["b"]}))
    summary = tmp_path / "out" / "table" / "swin_nano" / "b" / "seed_0" / "summary.json"
    assert json.loads(summary.read_text(encoding="utf-8"))["steps"] == 2


def test_errors(tmp_path: Path) -> None:
    write_images(tmp_path / "data" / "flowers102")
    small = {"data": str(tmp_path / "data"), "out": str(tmp_path / "out"), "backbone": "swin_nano", "img_size": 32}
    with pytest.raises(UserError, match="--data"):
        reproduce(ReproduceConfig(table="drloc-flowers", data=str(tmp_path)))
    with pytest.raises(UserError, match="coco_mini"):
        reproduce(ReproduceConfig.parse(small | {"table": "detect-cascade"}))
    with pytest.raises(UserError, match="--out"):
        reproduce(ReproduceConfig.parse(small | {"table": "few-labels", "out": str(tmp_path / "my tables")}))
    with pytest.raises(UserError, match="--only 'L_X'"):
        reproduce(ReproduceConfig.parse(small | {"table": "esvit-flowers", "only": ["L_X"]}))
    with pytest.raises(UserError, match="Did you mean 'few-labels'"):
        reproduce(ReproduceConfig.parse(small | {"table": "few-label"}))
    with pytest.raises(UserError, match=r"table\.yaml: .*settings"):
        reproduce(ReproduceConfig.parse(small | {"table": write_table(tmp_path / "table.yaml", common={})}))
    assert "drloc-flowers" in reproduce(ReproduceConfig()).data["tables"]
