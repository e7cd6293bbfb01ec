"""Reading the files of a run folder."""

import base64
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from frugalvit.errors import UserError
from frugalvit.report import run_record
from helpers.report_samples import write_picture, write_run


def write_lines(folder, *lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return folder


def test_curves_by_split_and_metric(tmp_path):
    folder = write_lines(
        tmp_path / "run",
        {"step": 10, "epoch": 1.0, "split": "train", "loss": 2.0, "note": "text", "flag": True, "gone": None},
        {"step": 20, "epoch": 2.0, "split": "train", "loss": float("nan"), "lr": 0.1},
        {"step": 20, "epoch": 2.0, "split": "val", "top1": 50.0},
    )
    record = run_record.read_run(folder)
    assert record.curves == {
        ("train", "loss"): [(1.0, 2.0)],
        ("train", "lr"): [(2.0, 0.1)],
        ("val", "top1"): [(2.0, 50.0)],
    }


def test_later_lines_win_and_incomplete_lines_are_skipped(tmp_path):
    lines = [{"step": n, "epoch": n / 10, "split": "train", "loss": loss} for n, loss in ((2, 5), (1, 3), (2, 4))]
    record = run_record.read_run(write_lines(tmp_path / "run", *lines, '{"step": 2, "lo'))
    assert record.curves[("train", "loss")] == [(0.1, 3.0), (0.2, 4.0)]


def test_runs_with_other_seeds_are_one_kind(tmp_path):
    runs = [run_record.read_run(write_run(tmp_path / f"{w}{s}", seed=s, weight=w)) for w in (0.0, 0.5) for s in (0, 1)]
    kinds = [run.kind() for run in runs]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]


def test_runs_of_a_compared_setting_are_one_kind(tmp_path):
    folders = [write_run(tmp_path / name / f"seed_{s}", seed=s) for name in ("with", "without") for s in (0, 1)]
    with (folders[0] / "config.yaml").open("a") as handle:
        handle.write("grid_size: 7\n")
    assert len({run_record.read_run(folder).kind() for folder in folders}) == 2
    (tmp_path / "comparison.json").write_text("{}")
    kinds = [run_record.read_run(folder).kind() for folder in folders]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]


def test_find_runs(tmp_path):
    write_run(tmp_path / "compare" / "with" / "seed_0")
    write_run(tmp_path / "compare" / "without" / "seed_0")
    runs = run_record.find_runs([tmp_path / "compare", tmp_path / "compare" / "with" / "seed_0"])
    assert [path.parent.name for path in runs] == ["with", "without"]
    with pytest.raises(UserError, match="nowhere"):
        run_record.find_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        run_record.find_runs([tmp_path / "empty"])


def test_unreadable_json_is_an_error(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json"):
        run_record.read_run(folder)


def test_pictures_are_resized_and_inside_the_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_picture(folder / "large.png", 1, 1200, 900)
    write_picture(tmp_path / "outside.png", 1)
    (folder / "fake.jpg").write_text("not a picture")
    for name in ("../outside.png", "missing.png", "fake.jpg"):
        assert run_record.to_data_uri(name, folder) is None
    uri = run_record.to_data_uri("large.png", folder, limit=192)
    assert uri is not None
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (144, 192)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=900))
def test_thin_curve_keeps_extremes(values):
    curve = [(float(x), y) for x, y in enumerate(values)]
    thinned = run_record.thin_curve(curve, buckets=20)
    assert set(thinned) <= set(curve)
    assert len(thinned) <= max(42, min(len(curve), 40))
    assert thinned == sorted(thinned, key=lambda point: point[0])
    assert max(y for _, y in thinned) == max(values) and min(y for _, y in thinned) == min(values)
    assert thinned[0] == curve[0] and thinned[-1] == curve[-1]


def test_mean_curve_at_common_points():
    assert run_record.mean_curve([[(0, 1.0), (1, 2.0)], [(1, 4.0), (2, 9.0)]]) == [(1, 3.0)]
    assert run_record.mean_curve([]) == [] == run_record.mean_curve([[(0, 1.0)], []])
