"""Trackers get numbers, pictures and tables; fakes play the services."""

import importlib.util
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

from frugalvit.comparison.compare import compare
from frugalvit.config.compare import CompareConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment import summary
from frugalvit.experiment.summary import mistake_sheet, per_class_table, save_pictures
from frugalvit.runs import trackers as tracking
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.collapse import Alarm, health_table
from frugalvit.tasks.pretraining.train import pretrain
from frugalvit.utils.tables import Table
from helpers.tiny_runs import PRETRAIN, TRAIN, write_images

EVIL = "<b>a|b*_`</b>"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos"))


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
    import io

    event = board.Images(name)[-1]
    with Image.open(io.BytesIO(event.encoded_image_string)) as picture:
        return event.step, np.asarray(picture)


def test_tensorboard_of_a_training(photos: Path, tmp_path: Path) -> None:
    train(TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(tmp_path / "run")}))
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
    pretrain(PretrainConfig.parse(PRETRAIN | {"data": str(photos), "out": str(tmp_path / "run")}))
    board = read_board(tmp_path / "run" / "tensorboard")
    table = text_of(board, "health")[1].replace("\\_", "_")
    assert "| verdict |" in table and "| teacher_entropy |" in table and "| effective_rank |" in table
    assert "| option | value | reason |" in text_of(board, "decisions")[1]
    assert picture_of(board, "augmentations")[1].shape[2] == 3


def test_tensorboard_of_a_comparison(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder()
    monkeypatch.setattr(tracking, "_library", lambda name, load=True: library)
    values = TRAIN | {"data": str(photos), "out": str(tmp_path / "both"), "steps": 2, "seeds": 1, "track": ["wandb"]}
    settings = {"with_settings": ["localization.weight=0.5"], "without_settings": ["localization.weight=0"]}
    for _ in range(2):  # asked again, it shows the same once
        compare(CompareConfig.parse(values | settings))
    board = read_board(tmp_path / "both" / "tensorboard")
    table = text_of(board, "comparison")[1]
    assert "| with |" in table and "| without |" in table and "against without" in table
    assert len(board.Tensors("comparison/text_summary")) == 1
    assert picture_of(board, "comparison_chart")[1].size > 1000
    tables = [call[2]["columns"] for call in library.calls if call[0] == "Table"]
    assert ["setting", "seed", "top1", "run"] in tables and any(columns[0] == "class" for columns in tables)


def test_a_resumed_run_purges_later_events(tmp_path: Path) -> None:
    from frugalvit.runs.run_folder import RunFolder

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


def test_mistake_sheet(tmp_path: Path) -> None:
    import base64
    import io

    buffer = io.BytesIO()
    Image.new("RGB", (96, 60), "red").save(buffer, "JPEG")
    one = {"image": "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()}
    words = {"label": "Gänseblümchen mit sehr langem Namen", "predicted": "x", "probability": 0.9}
    with Image.open(io.BytesIO(mistake_sheet([one | words] * 7))) as sheet:
        assert sheet.size == (6 * 120, 2 * 132)
        assert np.asarray(sheet)[48, 60, 0] > 200 > 100 > np.asarray(sheet)[48, 60, 1]


def test_mistakes_table_has_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, shown = RunFolder(tmp_path), []
    monkeypatch.setattr(opened, "table", lambda name, table: shown.append(table))
    monkeypatch.setattr(opened, "picture", lambda *_: None)
    monkeypatch.setattr(summary, "mistake_sheet", lambda _: b"")
    save_pictures(opened, [{"label": "a", "predicted": "b", "probability": 0.9, "file": "val/a/1.png"}], None)
    assert shown[0].rows == [["a", "b", 0.9, "val/a/1.png"]] and shown[0].columns[-1] == "file"
    opened.close()


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
        tracker.log(10, {"split": "val", "top1": 71.0, "epoch": 1, "note": "words are no curve", "flag": True})
        tracker.image(10, "augmentations", tmp_path / "augmentations.jpg")
        tracker.table(10, "per_class", Table(["class", "percent"], [["cat", 50.0], ["dog", float("nan")]]))
        tracker.close()
    assert json.loads((tmp_path / "trackers.json").read_text())[name]
    said = str(library.calls)
    assert "val/top1" in said and "val/epoch" in said and "augmentations.jpg" in said and "words are no" not in said
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
    """Trackio knows runs by their names alone, and every comparison has a run called seed_0."""
    asked: list[dict[str, Any]] = []
    library = SimpleNamespace(init=lambda **keywords: asked.append(keywords))
    made, _ = tracking.TRACKERS["trackio"]
    for folder in ("with/seed_0", "without/seed_0", "here/run", "there/run"):
        made(library, tmp_path / folder, {}, None)
    names = [each["name"] for each in asked]
    assert len(set(names)) == 4 and {each["resume"] for each in asked} == {"never"}
    assert names[0].startswith("with-seed_0-") and names[2].startswith("run-")
    made(library, tmp_path / "with/seed_0", {}, names[0])
    assert asked[-1]["name"] == names[0] and asked[-1]["resume"] == "allow"


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
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "wandb is dropped for the rest of this run (no route to host)" in said[0]


def test_a_tracker_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def MlflowClient(self) -> None:
            raise RuntimeError("unsupported\nURI")

    monkeypatch.setattr(tracking, "_library", lambda name: Closed())
    with pytest.raises(UserError, match=r"mlflow failed to start \(unsupported URI\). Set MLFLOW_TRACKING_URI"):
        tracking.make_trackers(["mlflow"], tmp_path, {})


def test_a_damaged_trackers_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_library", lambda name: Recorder())
    (tmp_path / "trackers.json").write_text('{"wandb": ')
    with pytest.raises(UserError, match=r"trackers\.json is not readable JSON"):
        tracking.make_trackers(["wandb"], tmp_path, {})


def test_missing_or_misspelt_tracker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Did you mean 'wandb'"):
        tracking.check_trackers(["wanbd"])
    found = importlib.util.find_spec
    absent = lambda name, *more: None if name in tracking.TRACKERS else found(name, *more)  # noqa: E731
    monkeypatch.setattr(tracking.importlib.util, "find_spec", absent)
    for name in tracking.TRACKERS:
        with pytest.raises(UserError, match=r'pip install "frugalvit\[tracking\]"') as caught:
            tracking.make_trackers([name], tmp_path, {})
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "trackers.json").exists() and "wandb" not in sys.modules
