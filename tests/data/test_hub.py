"""Datasets of Hugging Face: saved ones, files of them, and what is said offline."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from layouts import sizes
from PIL import Image

from frugalvit.data import open_data
from frugalvit.errors import UserError


def hub_dataset(count: int, names: list[str] | None = None):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (5, 4), (i, 0, 0)) for i in range(count)]
    labels = [i % 2 for i in range(count)]
    features = {
        "img": datasets.Image(),
        "label": datasets.ClassLabel(names=names) if names else datasets.Value("int64"),
    }
    return datasets.Dataset.from_dict({"img": images, "label": labels}, features=datasets.Features(features))


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_saved_datasets(tmp_path: Path, prefix: str) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": hub_dataset(6, ["zoo", "ant"]), "validation": hub_dataset(2, ["zoo", "ant"])}
    datasets.DatasetDict({**parts, "extra": hub_dataset(1, ["zoo", "ant"])}).save_to_disk(tmp_path / "d")
    source = open_data(f"{prefix}{tmp_path / 'd'}")
    assert source.classes == ("ant", "zoo") and sizes(source) == {"train": 6, "val": 2} and "extra" in source.notes[0]
    train = source.splits["train"]
    assert (
        train.labels.tolist() == [1, 0] * 3 and train.read(3)[0, 0, 0] == 3 and train.subset([5]).read(0)[0, 0, 0] == 5
    )
    assert pickle.loads(pickle.dumps(train)).read(2)[0, 0, 0] == 2
    assert train.header(0).format == "PNG" and train.stored_size(0) == len(train.raw(0))


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub_dataset(4).to_parquet(tmp_path / "d.parquet")
    source = open_data(tmp_path / "d.parquet", split="given")
    assert source.classes == ("0", "1") and source.splits["train"].read(1)[0, 0, 0] == 1
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="cannot be read as a dataset"):
        open_data(tmp_path / "bad.parquet")


def test_hub_offline_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'x/y' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="cannot be reached and is not in the local cache"):
        open_data("hf:x/y")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'frugalvit\[streams\]'"):
        open_data("hf:x/y")
