"""The suite on small datasets in the real layouts: metrics, splits, cached results, wins, missing data."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from frugalvit.config.probe import SuiteConfig
from frugalvit.data.formats.named_catalog import DATASETS
from frugalvit.errors import UserError
from frugalvit.probing import suite
from helpers import suite_layouts

TINY = {"img_size": 32, "device": "cpu", "workers": 1}


def run(root: Path, out: Path, **more):
    return suite.suite(SuiteConfig(model="swin_nano", root=str(root), out=str(out), **(TINY | more)))


def test_present_datasets_are_scored_with_their_metrics(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for make in suite_layouts.LAYOUTS.values():
        make(root)
    own = suite_layouts.folders(tmp_path / "my photos", {"train": 4, "test": 2})
    result = run(root, tmp_path / "out", own=[str(own)])
    datasets = result.data["datasets"]
    assert len([name for name in datasets if DATASETS.get(name)]) == 18
    failed = {name: entry for name, entry in datasets.items() if "error" in entry}
    assert not failed
    scored = {name for name, entry in datasets.items() if "score" in entry}
    assert scored == {*suite_layouts.LAYOUTS, "my-photos"}
    assert result.data["scored"] == len(scored)
    assert result.data["average"] == pytest.approx(sum(datasets[name]["score"] for name in scored) / len(scored))
    # even random weights tell colours apart
    assert datasets["dtd"]["score"] > 90 and datasets["my-photos"]["score"] > 90
    assert {datasets[name]["metric"] for name in ("fgvc_aircraft", "oxford_pets", "caltech101")} == {"mean_per_class"}
    assert datasets["voc2007"]["metric"] == "map11" and datasets["voc2007"]["score"] > 80
    assert datasets["hateful_memes"]["metric"] == "roc_auc" and datasets["hateful_memes"]["score"] > 90
    assert datasets["dtd"]["train_images"] == 16 and datasets["dtd"]["test_images"] == 8
    assert datasets["caltech101"]["train_images"] == 60
    assert (
        datasets["cifar10"]["status"] == "downloadable"
        and "frugalvit data cifar10" in datasets["cifar10"]["what_to_do"]
    )
    missing = next(table for table in result.tables if table.title == "not scored")
    assert {row[0] for row in missing.rows} == set(datasets) - scored
    assert json.dumps(result.data, allow_nan=False)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    root = tmp_path / "four"
    root.mkdir()
    for name in ("dtd", "oxford_pets", "gtsrb", "mnist"):
        suite_layouts.LAYOUTS[name](root)
    return root


@pytest.mark.slow
def test_comparison_with_another_model(four: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(four, out, against="resnet18")
    datasets = [entry for entry in result.data["datasets"].values() if "score" in entry]
    assert len(datasets) == result.data["scored"] == 4
    assert result.data["wins"] == sum(entry["score"] > entry["against"] for entry in datasets)
    assert result.data["average_against"] == pytest.approx(sum(entry["against"] for entry in datasets) / 4)
    with (out / "suite.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["dataset"] for row in rows] == ["dtd", "oxford_pets", "mnist", "gtsrb"]  # the order of Table 9
    assert float(rows[0]["swin_nano"]) == result.data["datasets"]["dtd"]["score"]
    with Image.open(out / "suite.png") as picture:
        assert picture.width > 300
    assert len(list(out.glob("*/*.json"))) == 8


def test_two_models_of_one_name_have_a_column_each(four: Path, tmp_path: Path) -> None:
    result = run(four, tmp_path / "out", datasets=["gtsrb"], against="swin_nano")
    assert result.data["wins"] == 0 and result.data["average_against"] == result.data["average"]
    header = (tmp_path / "out" / "suite.csv").read_text().splitlines()[0]
    assert header.endswith(",swin_nano,swin_nano (2)")


def test_results_are_cached_until_the_data_changes(four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["dtd", "gtsrb"]
    first = run(four, tmp_path / "out", datasets=both)
    scored: list[str] = []
    real = suite.score_dataset

    def counted(source, *rest):
        scored.append(source.name)
        return real(source, *rest)

    monkeypatch.setattr(suite, "score_dataset", counted)
    again = run(four, tmp_path / "out", datasets=both)
    assert scored == []
    assert again.data["average"] == first.data["average"]
    suite_layouts.write(four / "dtd" / "dtd" / "images" / "banded" / "banded_00.jpg", 1, 7)
    run(four, tmp_path / "out", datasets=both)
    assert scored == ["dtd"]
    # Another seed has other random weights: another model.
    for setting in ({"seed": 1}, {"precision": "bf16"}):
        run(four, tmp_path / "out", datasets=["gtsrb"], **setting)
        run(four, tmp_path / "out", datasets=["gtsrb"], batch=3, **setting)
    assert scored[1:] == ["gtsrb"] * 2


def test_unconverged_fits_are_warned_of(four: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(four, tmp_path / "out", datasets=["gtsrb"], max_iterations=1)
    assert not result.data["datasets"]["gtsrb"]["converged"]
    assert "--max-iterations" in capsys.readouterr().err


def test_one_failing_dataset_does_not_stop_the_others(four: Path, tmp_path: Path) -> None:
    (four / "dtd" / "dtd" / "labels" / "train1.txt").unlink()
    result = run(four, tmp_path / "out", datasets=["dtd", "gtsrb"])
    assert result.data["datasets"]["dtd"]["status"] == "failed"
    assert "score" in result.data["datasets"]["gtsrb"] and result.data["scored"] == 1
    assert any(row[:2] == ["dtd", "failed"] for table in result.tables for row in table.rows)


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--download"):
        run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="Did you mean 'gtsrb'"):
        run(tmp_path, tmp_path / "out", datasets=["gtrsb"])


def test_own_data_shows_the_metric_of_its_labels(tmp_path: Path) -> None:
    """Several labels per image are detected when the data is opened."""
    entry = suite.Entry("mine", "mine", "mine", "accuracy", "present")
    scored = {
        "score": 80.0,
        "score_interval": (60.0, 90.0),
        "metric": "map11",
        "classes": 3,
        "train_images": 4,
        "test_images": 2,
    }
    table = suite.summarize([entry], {"model": {"mine": scored}}, tmp_path).tables[0]
    assert table.rows[0] == ["mine", "11-point mAP", 2, "80.0 % (60.0 to 90.0)"]
