"""The images that an export is checked on: the run's own if they are local, else noise."""

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
    """Record what is opened, and return one grey image."""
    calls: list[tuple[str, dict]] = []

    def record(data: str, **options: Any) -> list[Any]:
        calls.append((data, options))
        return [np.full((64, 64, 3), 128, np.uint8)]

    monkeypatch.setattr(verify, "read_images", record)
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
def test_remote_data_is_not_downloaded(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def download(*_: object, **__: object) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(named, "_download", download)
    monkeypatch.setattr(remote.urllib.request, "urlopen", download)
    folder, _ = made(tmp_path / "run", "resnet")
    data = data.replace("FOLDER", str(tmp_path))
    settings = {"data": data, "root": str(tmp_path / "empty")}
    (folder.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    result = export(ExportConfig(model=str(folder.parent), out=str(tmp_path / "out")))
    assert result.data["checked_on"] == "5 images of noise"
    assert f"{data} is not local" in capsys.readouterr().err


@pytest.mark.parametrize("data", ["http://127.0.0.1:9/index.json", "cifar100"])
def test_images_option_may_be_remote(data: str, ready: ReadyModel, opened: list):
    assert verify.check_images(ready, data, {"data": "elsewhere"})[1] == f"1 images of {data}"
    assert opened == [(data, {})]


def test_data_is_opened_with_the_runs_options(ready: ReadyModel, opened: list, tmp_path: Path):
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


def test_one_shard_of_streamed_data_is_opened(ready: ReadyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    photos = write_photos(tmp_path / "photos")
    for name in ("train-000000", "val-000000"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for path in sorted(photos.iterdir()):
                tar.add(path, path.name)
    opened_shards, index_shards = [], shards.index_shards

    def record(names: list[str], *others: Any) -> Any:
        opened_shards.extend(Path(name).name for name in names)
        return index_shards(names, *others)

    monkeypatch.setattr(shards, "index_shards", record)
    pattern = str(tmp_path / "*.tar")
    images, description = verify.check_images(ready, None, {"data": pattern, "stream": True})
    assert len(images) == 5 and description == f"5 images of {pattern}"
    assert opened_shards == ["val-000000.tar"]


def test_missing_data_is_a_warning(ready: ReadyModel, capsys: pytest.CaptureFixture[str]):
    assert verify.check_images(ready, None, {"data": "nowhere/at-all"})[1] == "5 images of noise"
    assert "nowhere/at-all" in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere"):
        verify.check_images(ready, "nowhere/at-all", {})


@pytest.mark.parametrize("name", ["list.csv", "list.JSONL", "list.txt", "list.tsv", "one.JPG"])
def test_images_may_be_any_kind_of_data(name: str, photos: Path):
    path = photos / name
    if name.endswith("JPG"):
        path.write_bytes((photos / "0.jpg").read_bytes())
    else:
        rows = {".csv": "path\n0.jpg\n", ".tsv": "path\n0.jpg\n", ".JSONL": '{"path": "0.jpg"}', ".txt": "0.jpg\n"}
        path.write_text(rows[path.suffix])
    assert len(verify.read_images(str(path))) == 1
    (photos / "shard.tgz").write_bytes(b"\x1f\x8b" + bytes(2000))
    with pytest.raises(UserError, match="compressed"):
        verify.read_images(str(photos / "shard.tgz"))
