"""Trackers get numbers, pictures and tables; fakes play the services."""

import base64
import importlib.util
import io
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.config.train import TrainConfig
from frugalvit.engine.health import Alarm
from frugalvit.errors import UserError
from frugalvit.experiment.summary import per_class_table, save_pictures
from frugalvit.runs import trackers as tracking
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.pretraining.collapse import health_table
from frugalvit.utils.tables import Table
from helpers.tiny_runs import run_tiny

EVIL = "<b>a|b*_`</b>"


# -- TensorBoard


def read_board(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    return board.Reload()


def text_of(board: Any, name: str) -> tuple[int, str]:
    """The step and the Markdown of a table; the text plugin adds a part to the name it was given."""
    event = board.Tensors(f"{name}/text_summary")[-1]
    return event.step, event.tensor_proto.string_val[0].decode()


def picture_of(board: Any, name: str) -> tuple[int, np.ndarray]:
    event = board.Images(name)[-1]
    with Image.open(io.BytesIO(event.encoded_image_string)) as picture:
        return event.step, np.asarray(picture)


def test_tensorboard_of_a_training(photos: Path, tmp_path: Path) -> None:
    run_tiny("train", data=photos, out=tmp_path / "run")
    board = read_board(tmp_path / "run" / "tensorboard")
    losses = {event.step: event.value for event in board.Scalars("train/loss")}
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses == {x["step"]: pytest.approx(x["loss"]) for x in written if "loss" in x} and losses
    step, sheet = picture_of(board, "augmentations")
    with Image.open(tmp_path / "run" / "augmentations.jpg") as original:
        assert step == 10 and np.array_equal(sheet, np.asarray(original))
    step, table = text_of(board, "per_class")
    assert step == 10 and "| class | images | right |" in table and "| cat | 5 |" in table and "| dog | 5 |" in table
    assert "localization" not in table and "top1" in text_of(board, "summary")[1]


def test_tensorboard_of_a_pretraining(photos: Path, tmp_path: Path) -> None:
    run_tiny("pretrain", data=photos, out=tmp_path / "run")
    board = read_board(tmp_path / "run" / "tensorboard")
    table = text_of(board, "health")[1].replace("\\_", "_")
    assert "| verdict |" in table and "| teacher_entropy |" in table and "| effective_rank |" in table
    assert "| option | value | reason |" in text_of(board, "decisions")[1]
    assert picture_of(board, "augmentations")[1].shape[2] == 3


def test_a_resumed_run_purges_later_events(tmp_path: Path) -> None:
    for after in (None, 4):
        if after is not None:
            time.sleep(1)  # TensorBoard reads files by their names: a second, and then a counter whose 10 is before 9
        run = RunFolder(tmp_path / "run")
        if after is not None:
            run.truncate_metrics(after)
        for step in (2, 4, 6) if after is None else (6, 8):
            run.log(step, split="train", loss=float(step if after is None else 10 * step))
        run.close()
    events = read_board(tmp_path / "run" / "tensorboard").Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(2, 2), (4, 4), (6, 60), (8, 80)]


# -- tables and pictures


def test_per_class_table() -> None:
    confusion = torch.tensor([[3, 1, 0], [0, 0, 0], [2, 3, 0]])
    table = per_class_table(confusion, ("cat", "none here", EVIL))
    assert table.rows == [[EVIL, 5, 0, 0.0, "none here", 3], ["cat", 4, 3, 75.0, "none here", 1]]
    shown = tracking.markdown(table)
    bars = re.findall(r"(?<!\\)\|", shown)
    assert "<b>" not in shown and len(bars) == 7 * 4, "nothing in a name acts as Markdown or HTML"
    alarm = Alarm("divergence", "the loss is 9", "Lower --lr")
    health = health_table("divergence", {"loss": 9.0, "knn": None}, [alarm])
    assert health.rows == [
        ["verdict", "divergence", None],
        ["loss", "9", None],
        ["alarm: divergence", "the loss is 9", "Lower --lr"],
    ]


def test_mistakes_are_written_as_picture_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, tables = io.BytesIO(), []
    Image.new("RGB", (96, 60), "red").save(buffer, "JPEG")
    image = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    mistake = {"label": "a", "predicted": "b", "probability": 0.9, "file": "val/a/1.png", "image": image}
    run = RunFolder(tmp_path)
    monkeypatch.setattr(run, "table", lambda name, table: tables.append(table))
    save_pictures(run, [mistake] * 7, None)
    run.close()
    assert tables[0].rows[0] == ["a", "b", 0.9, "val/a/1.png"] and len(tables[0].rows) == 7
    with Image.open(tmp_path / "mistakes.jpg") as sheet:
        assert sheet.size == (6 * 96, 2 * 96) and np.asarray(sheet)[48, 48, 0] > 200


def test_cells_are_plain() -> None:
    row = [1, 2.5, float("nan"), None, True, "word", Path("a"), np.float64(0.5)]
    assert tracking.row_of(row) == [1, 2.5, None, None, True, "word", "a", 0.5]
    json.dumps(tracking.row_of(row))


# -- the services


class Recorder:
    """Stands for a tracking library: remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.id = "identity"
        self.info = SimpleNamespace(run_id="identity")
        self.experiment_id = "7"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, arguments, keywords))
            return {"Image": "picture", "Table": "table"}.get(name, self)

        return call


@pytest.mark.parametrize("name", list(tracking.TRACKERS))
def test_trackers_get_numbers_pictures_and_tables(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder()
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda module: ModuleType(module))
    monkeypatch.setattr(tracking.importlib, "import_module", lambda module: library)
    for _ in range(2):  # the second time is a resumed run
        tracker = tracking.make_trackers([name, name], tmp_path, {"epochs": 3, "localization": {"weight": 0.5}})
        tracker.log(10, {"split": "val", "top1": 71.0, "epoch": 1, "note": "text", "flag": True})
        tracker.image(10, "augmentations", tmp_path / "augmentations.jpg")
        tracker.table(10, "per_class", Table(["class", "percent"], [["cat", 50.0], ["dog", float("nan")]]))
        tracker.close()
    assert json.loads((tmp_path / "trackers.json").read_text())[name]
    calls = str(library.calls)
    assert "val/top1" in calls and "val/epoch" in calls and "augmentations.jpg" in calls and "text" not in calls
    if name == "mlflow":
        assert [call[0] for call in library.calls].count("create_run") == 1
        assert ("log_param", ("identity", "localization.weight", "0.5"), {}) in library.calls
        columns = {"class": ["cat", "dog"], "percent": [50.0, None]}
        assert ("log_table", ("identity", columns, "per_class.json"), {}) in library.calls
    else:
        started = [call[2] for call in library.calls if call[0] == "init"]
        assert len(started) == 2 and started[1]["resume"] == "allow"
        assert ("log", ({"augmentations": "picture"},), {"step": 10}) in library.calls
        assert ("log", ({"per_class": "table"},), {"step": 10}) in library.calls
        rows = next(call[2]["data"] for call in library.calls if call[0] == "Table")
        cells = [list(row.values()) if isinstance(row, dict) else row for row in rows]
        assert cells == [["cat", 50.0], ["dog", None]]


def test_trackio_runs_of_one_name_differ(tmp_path: Path) -> None:
    """Trackio distinguishes runs by name only, and every comparison has a run called seed_0."""
    started: list[dict[str, Any]] = []
    library = SimpleNamespace(init=lambda **keywords: started.append(keywords))
    made, _ = tracking.TRACKERS["trackio"]
    for folder in ("with/seed_0", "without/seed_0", "here/run", "there/run"):
        made(library, tmp_path / folder, {}, None)
    names = [each["name"] for each in started]
    assert len(set(names)) == 4 and {each["resume"] for each in started} == {"never"}
    assert names[0].startswith("with-seed_0-") and names[2].startswith("run-")
    made(library, tmp_path / "with/seed_0", {}, names[0])
    assert started[-1]["name"] == names[0] and started[-1]["resume"] == "allow"


def test_a_tracker_that_fails_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Recorder):
        def log(self, step: int, values: Any) -> None:
            raise ConnectionError("no route\nto host")

    sound = Recorder()
    trackers = tracking.Trackers({"wandb": Broken(), "mlflow": sound})  # type: ignore[dict-item]
    for step in range(3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert [call[0] for call in sound.calls] == ["log", "log", "log", "close"]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "wandb is dropped for the rest of this run (no route to host)" in line


def test_a_tracker_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def MlflowClient(self) -> None:
            raise RuntimeError("unsupported\nURI")

    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda module: ModuleType(module))
    monkeypatch.setattr(tracking.importlib, "import_module", lambda name: Closed())
    with pytest.raises(UserError, match=r"mlflow failed to start \(unsupported URI\). Set MLFLOW_TRACKING_URI"):
        tracking.make_trackers(["mlflow"], tmp_path, {})


def test_missing_or_misspelt_tracker_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Did you mean 'wandb'"):
        TrainConfig.parse({"track": ["wanbd"]})
    found = importlib.util.find_spec
    absent = lambda name, *more: None if name in tracking.TRACKERS else found(name, *more)  # noqa: E731
    monkeypatch.setattr(tracking.importlib.util, "find_spec", absent)
    for name in tracking.TRACKERS:
        with pytest.raises(UserError, match=r'pip install "frugalvit\[tracking\]"') as caught:
            tracking.check_trackers([name])
        assert "\n" not in str(caught.value)
    assert "wandb" not in sys.modules
