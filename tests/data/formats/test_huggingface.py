"""Hugging Face datasets: saved folders, Parquet files, and errors without a network."""

import pickle
import sys
from pathlib import Path

import pytest
from PIL import Image

from frugalvit.data import open_data
from frugalvit.errors import UserError
from helpers.data_layouts import sizes


def hub_dataset(count: int, names: list[str] | None = None):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (5, 4), (i, 0, 0)) for i in range(count)]
    labels = [i % 2 for i in range(count)]
    features = {
        "img": datasets.Image(),
        "label": datasets.ClassLabel(names=names) if names else datasets.Value("int64"),
    }
    return datasets.Dataset.from_dict({"img": images, "label": labels}, features=datasets.Features(features))


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": hub_dataset(6, ["zoo", "ant"]), "validation": hub_dataset(2, ["zoo", "ant"])}
    datasets.DatasetDict({**parts, "extra": hub_dataset(1, ["zoo", "ant"])}).save_to_disk(tmp_path / "d")
    source = open_data(tmp_path / "d")
    assert source.classes == ("ant", "zoo") and sizes(source) == {"train": 6, "val": 2} and "extra" in source.notes[0]
    train = source.splits["train"]
    assert (
        train.labels.tolist() == [1, 0] * 3 and train.read(3)[0, 0, 0] == 3 and train.subset([5]).read(0)[0, 0, 0] == 5
    )
    assert pickle.loads(pickle.dumps(train)).read(2)[0, 0, 0] == 2
    assert train.header(0).format == "PNG" and train.stored_size(0) == len(train.raw(0))


@pytest.mark.parametrize("named", [True, False])
def test_split_with_hidden_labels_is_left_out(tmp_path: Path, named: bool) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["zoo", "ant"] if named else None
    train, val = hub_dataset(6, names), hub_dataset(4, names)
    test = hub_dataset(3, names).map(lambda row: {"label": -1})
    val = val.map(lambda row, i: {"label": -1 if i == 3 else row["label"]}, with_indices=True)
    parts = {"test": test, "validation": val, "train": train}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    source = open_data(tmp_path / "d")
    assert source.classes == (("ant", "zoo") if named else ("0", "1")) and sizes(source) == {"train": 6, "val": 3}
    assert source.splits["val"].labels.tolist() == ([1, 0, 1] if named else [0, 1, 0])
    assert [source.splits["val"].read(i)[0, 0, 0] for i in range(3)] == [0, 1, 2]
    notes = " ".join(source.notes)
    assert "3 of 3 rows without a label" in notes and "1 of 4 rows" in notes
    datasets.DatasetDict(parts | {"test": test.remove_columns("label")}).save_to_disk(tmp_path / "e")
    assert sizes(open_data(tmp_path / "e")) == {"train": 6, "val": 3}


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub_dataset(4).to_parquet(tmp_path / "d.parquet")
    source = open_data(tmp_path / "d.parquet", split="given")
    assert source.classes == ("0", "1") and source.splits["train"].read(1)[0, 0, 0] == 1
    hub_dataset(4).map(lambda row: {"label": 2 * row["label"] - 1}).to_parquet(tmp_path / "signs.parquet")
    assert open_data(tmp_path / "signs.parquet").classes == ("-1", "1"), "in train, -1 is a class"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"bad\.parquet"):
        open_data(tmp_path / "bad.parquet")


def test_hub_offline_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'x/y' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"hf:x/y.*Parquet"):
        open_data("hf:x/y")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'frugalvit\[streams\]'"):
        open_data("hf:x/y")
