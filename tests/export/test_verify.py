"""An export is checked on the run's own images where they are at hand; nothing is fetched for it."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import frugalvit as fv
from frugalvit.config.tools import ExportConfig
from frugalvit.data.formats import named
from frugalvit.data.webdataset import remote, shards
from frugalvit.errors import UserError
from frugalvit.export import verify
from frugalvit.export.command import export
from frugalvit.export.inference_model import ReadyModel
from helpers.exported_models import made, write_photos


@pytest.fixture
def ready(tmp_path: Path) -> ReadyModel:
    return fv.load(made(tmp_path, "resnet")[0])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """What is opened, and how; a grey image is all that is in it."""
    calls: list[tuple[str, dict]] = []

    def note(where: str, **options: Any) -> list[Any]:
        calls.append((where, options))
        return [np.full((64, 64, 3), 128, np.uint8)]

    monkeypatch.setattr(verify, "read_images", note)
    return calls


@pytest.mark.parametrize(
    "data",
    [
        "http://127.0.0.1:9/index.json",
        "https://127.0.0.1:9/train-{000..003}.tar",
        "pipe:cat a.tar",
        "hf:cifar10",
        "cifar100",
        "CIFAR100:FOLDER",
    ],
)
def test_nothing_is_fetched_for_a_check(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr(named, "_download", fetched)
    monkeypatch.setattr(remote.urllib.request, "urlopen", fetched)
    folder, _ = made(tmp_path / "run", "resnet")
    data = data.replace("FOLDER", str(tmp_path))
    settings = {"data": data, "root": str(tmp_path / "empty")}
    (folder.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    result = export(ExportConfig(model=str(folder.parent), out=str(tmp_path / "out")))
    assert result.data["checked_on"] == "5 images of noise"
    assert f"{data} would have to be fetched: the export is checked on noise" in capsys.readouterr().err


@pytest.mark.parametrize("data", ["http://127.0.0.1:9/index.json", "cifar100"])
def test_what_is_asked_for_is_opened_wherever_it_lies(data: str, ready: ReadyModel, opened: list):
    assert verify.check_images(ready, data, {"data": "elsewhere"})[1] == f"1 images of {data}"
    assert opened == [(data, {})]


def test_data_are_opened_as_the_run_opened_them(ready: ReadyModel, opened: list, tmp_path: Path):
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "list.txt").write_text("apple\n")
    names = str(tmp_path / "list.txt")
    settings = {"data": "cifar100", "root": str(tmp_path), "labels": 0.5, "classes": names, "stream": "auto"}
    assert verify.check_images(ready, None, settings)[1] == "1 images of cifar100"
    verify.check_images(ready, None, settings | {"labels": "ignore", "classes": str(tmp_path / "gone.txt")})
    assert opened == [
        ("cifar100", {"root": str(tmp_path), "classes": names}),
        ("cifar100", {"root": str(tmp_path), "labels": "ignore"}),
    ]


def test_of_shards_read_in_passing_one_is_looked_at(ready: ReadyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    photos = write_photos(tmp_path / "photos")
    for name in ("train-000000", "val-000000"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for path in sorted(photos.iterdir()):
                tar.add(path, path.name)
    looked, index_shards = [], shards.index_shards

    def note(names: list[str], *others: Any) -> Any:
        looked.extend(Path(name).name for name in names)
        return index_shards(names, *others)

    monkeypatch.setattr(shards, "index_shards", note)
    pattern = str(tmp_path / "*.tar")
    images, words = verify.check_images(ready, None, {"data": pattern, "stream": True})
    assert len(images) == 5 and words == f"5 images of {pattern}"
    assert looked == ["val-000000.tar"]


def test_data_that_are_gone_are_warned_of(ready: ReadyModel, capsys: pytest.CaptureFixture[str]):
    assert verify.check_images(ready, None, {"data": "nowhere/at-all"})[1] == "5 images of noise"
    assert "the run's data cannot be read" in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere"):
        verify.check_images(ready, "nowhere/at-all", {})
