"""Comparisons: four outputs, only what is left is run, tables that can be rerun by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tiny import TRAIN, write_images

from frugalvit.config.compare import CompareConfig
from frugalvit.config.reproduce import ReproduceConfig
from frugalvit.errors import UserError
from frugalvit.reproduce import TABLES, reproduce
from frugalvit.training import compare as module
from frugalvit.training.compare import compare


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos"))


def config(photos: Path, out: Path, **values: object) -> CompareConfig:
    common = TRAIN | {"steps": 4, "seeds": 2, "data": str(photos), "out": str(out)}
    settings = {"with_settings": ["localization.weight=0.5"], "without_settings": ["localization.weight=0"]}
    return CompareConfig.parse(common | settings | values)


def test_four_outputs_and_only_what_is_left(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = module.run_once

    def stops_after_three(run, train):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(str(run.out))
        return real(run, train)

    monkeypatch.setattr(module, "run_once", stops_after_three)
    with pytest.raises(KeyboardInterrupt):
        compare(config(photos, tmp_path / "c"))
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("summary.json")}
    assert len(finished) == 3
    monkeypatch.setattr(module, "run_once", real)
    result = compare(config(photos, tmp_path / "c"))
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items()), "a finished run was done again"
    for kind in ("md", "csv", "tex", "png", "json"):
        assert (tmp_path / "c" / f"comparison.{kind}").stat().st_size > 50
    rows = list(csv.DictReader((tmp_path / "c" / "comparison.csv").open()))
    assert len(rows) == 4 and {row["seed"] for row in rows} == {"0", "1"}
    assert result.data["differences"]["with"]["count"] == 2 and "\\pm" in (tmp_path / "c/comparison.tex").read_text()
    assert json.loads((tmp_path / "c/comparison.json").read_text())["metric"] == "top1"
    with pytest.raises(UserError, match="steps"):
        compare(config(photos, tmp_path / "c", steps=5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"without_settings": []}, "two settings"),
        ({"settings": ["nameless"]}, "name: option=value"),
        ({"settings": ["a: lr=1", "a: lr=2"]}, "'a' twice"),
        ({"with_settings": ["recipe=finetune"]}, "cannot change the recipe"),
        ({"with_settings": ["localization.weight"]}, "option=value"),
        ({"with_settings": ["localization.wieght=1"]}, "localization.weight"),
    ],
)
def test_mistakes(photos: Path, tmp_path: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(config(photos, tmp_path / "c", **values))
    assert not list(tmp_path.rglob("config.yaml"))


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    recipe = TABLES[name]
    if recipe.settings:
        settings = [f"{key}: {value}" for key, value in recipe.settings.items()]
        made = CompareConfig.parse(recipe.common | {"data": "x", "settings": settings})
        from frugalvit.config.train import TrainConfig

        for values in made.named_settings().values():
            assert TrainConfig.parse(made.run_values(values, 0, str(tmp_path))).data == "x"
    else:
        from frugalvit.config.pretrain import PretrainConfig

        for values in recipe.pretrains.values():
            assert PretrainConfig.parse(recipe.common | values | {"data": "x"}).data == "x"


def test_a_table_is_rerun_from_a_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "data" / "flowers102")
    small = {"data": str(tmp_path / "data"), "out": str(tmp_path / "out"), "backbone": "swin_nano", "img_size": 32}
    with pytest.raises(UserError, match="nothing to score on"):
        reproduce(ReproduceConfig.parse(small | {"table": "drloc-flowers", "steps": 1, "seeds": 1}))
    with pytest.raises(UserError, match="there is no folder"):
        reproduce(ReproduceConfig(table="drloc-flowers", data=str(tmp_path)))
    assert "drloc-flowers" in reproduce(ReproduceConfig()).data["tables"]
