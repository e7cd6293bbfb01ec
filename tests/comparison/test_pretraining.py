"""``pretrain compare``: objectives and backbones over seeds, equal time, all probes, paired differences."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.comparison import pretraining
from frugalvit.comparison.pretraining import SCORES, compare_pretraining, fill_minutes, probe_scores
from frugalvit.comparison.statistics import paired_difference
from frugalvit.config.compare import PretrainCompareConfig
from frugalvit.errors import UserError
from frugalvit.utils.tables import CommandResult
from helpers.tiny_runs import PRETRAIN, write_images


def config(data: Path, out: Path, **values: Any) -> PretrainCompareConfig:
    tiny = PRETRAIN | {"backbone_args": {"embed_dim": 8, "depths": [2, 2, 1], "num_heads": [1, 1, 1]}, "img_size": 32}
    tiny["matching"] = {"prototypes": 8, "hidden": 8, "bottleneck": 4}
    return PretrainCompareConfig.parse(tiny | {"data": str(data), "out": str(out), "steps": 2, "seeds": 2} | values)


def test_all_scores_with_paired_differences(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("linear", "logistic"):  # slower, and tested elsewhere
        monkeypatch.setattr(pretraining, name, lambda config: CommandResult({"top1": float(len(config.model) % 7)}))
    options = config(photos, tmp_path / "c", metric="match_accuracy", report=False)
    result = compare_pretraining(options)
    assert list(result.data["settings"]) == ["L_V+L_R", "L_V"] and set(result.data["scores"]["L_V"][0]) == set(SCORES)
    assert [len(group) for group in result.data["scores"].values()] == [2, 2]
    first, last = ([run["knn"] for run in result.data["scores"][name]] for name in ("L_V+L_R", "L_V"))
    row = next(row for row in result.tables[1].rows if row[:2] == ["knn", "L_V+L_R"])
    assert row[3] == str(paired_difference(first, last)) and len(result.tables[1].rows) == 2 * len(SCORES)
    assert result.data["settings"]["L_V"]["values"] == [run["match_accuracy"] for run in result.data["scores"]["L_V"]]
    assert result.data["verdict"].startswith("L_V+L_R") and result.data["scored"].startswith("10 images of val")
    page = (tmp_path / "c/comparison.md").read_text()
    assert "| attention" in page and (tmp_path / "c/comparison.png").exists()
    capsys.readouterr()
    assert compare_pretraining(options).data == result.data and "starting" not in capsys.readouterr().err


def test_changed_data_are_scored_again(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def score(config: Any) -> CommandResult:
        calls.append(config.data)
        return CommandResult({"top1": float(len(calls))})

    for name in ("knn", "linear", "logistic"):
        monkeypatch.setattr(pretraining, name, score)
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    run = save_model_folder(create_backbone("test_vit", img_size=32), tmp_path / "run")
    first = probe_scores(run, str(data), "cpu")
    assert probe_scores(run, str(data), "cpu") == first and len(calls) == 3
    next(path for path in data.rglob("*.*") if path.is_file()).unlink()
    assert probe_scores(run, str(data), "cpu")["knn"] == 4.0 and len(calls) == 6


def test_every_setting_runs_with_every_backbone() -> None:
    settings = PretrainCompareConfig.parse({"data": "x", "backbones": ["deit_small", "swin_tiny_w7"]}).named_settings()
    assert list(settings) == [
        f"{name}_{loss}" for name in ("deit_small", "swin_tiny_w7") for loss in ("L_V+L_R", "L_V")
    ]
    assert settings["swin_tiny_w7_L_V"] == {"matching": {"region_weight": 0.0}, "backbone": "swin_tiny_w7"}


def test_equal_time_gives_a_slow_setting_fewer_steps(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[str] = []

    def measured(run: Any) -> CommandResult:
        asked.append(Path(run.out).name)
        Path(run.out).mkdir(parents=True)
        return CommandResult({"seconds_per_step": 0.5 if run.matching.region_weight else 0.25})

    monkeypatch.setattr(pretraining, "pretrain", measured)
    options = config(photos, tmp_path / "c", minutes=2)
    for _ in range(2):  # the second time from the file: a resumed comparison has the same steps
        settings = fill_minutes(options, options.named_settings())
        assert {name: values["steps"] for name, values in settings.items()} == {"L_V+L_R": 240, "L_V": 480}
    assert asked == ["L_V+L_R", "L_V"] and not (tmp_path / "c/pace").exists()
    assert json.loads((tmp_path / "c/pace.json").read_text()) == {"L_V+L_R": 0.5, "L_V": 0.25}
    with pytest.raises(UserError, match="--minutes"):
        fill_minutes(options.model_copy(update={"devices": 2}), {})


def test_images_without_labels_need_another_metric(tmp_path: Path) -> None:
    images = write_images(tmp_path / "photos") / "train" / "cat"
    with pytest.raises(UserError, match="--metric match_accuracy"):
        compare_pretraining(config(images, tmp_path / "c"))
    assert not (tmp_path / "c").exists()
