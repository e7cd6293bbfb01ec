"""``frugalvit export``: checks, errors, and the output folder."""

import importlib.util
import json
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import frugalvit as fv
from frugalvit.cli.main import main
from frugalvit.config.tools import EXPORTS
from frugalvit.errors import UserError
from frugalvit.export import command as exporting
from frugalvit.export.format import ExportFormat
from helpers.exported_models import made, run_export


def test_command_writes_a_folder_once(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]):
    folder, _ = made(tmp_path, "resnet")
    arguments = ["export", str(folder), "--images", str(photos), "--out", str(tmp_path / "out"), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["config.json", "model.safetensors", "preprocessing.py"]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == 2 and "already exists" in captured.err
    assert main(["export", str(folder), "--to", "tensorflow"]) == 2


def test_unreadable_summary_is_an_error(tmp_path: Path):
    folder, _ = made(tmp_path / "run", "resnet")
    (folder.parent / "summary.json").write_text('{"top1": 9')
    with pytest.raises(UserError, match=r"summary\.json"):
        run_export(model=str(folder.parent), to="hf", out=str(tmp_path / "out"))


def test_failed_exports_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path, "resnet")
    with pytest.raises(UserError, match="already exists"):
        run_export(model=str(folder), out=str(folder))
    for difference, text in ((float("nan"), "nan"), (1.1e-3, r"0\.0011 \(allowed: 0\.001\)")):
        monkeypatch.setattr(exporting, "largest_difference", lambda *_, value=difference: value)
        with pytest.raises(UserError, match=f"differs from torch by {text}"):
            run_export(model=str(folder), out=str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    monkeypatch.undo()
    (tmp_path / "out").mkdir()  # empty: it may be used
    run_export(model=str(folder), out=str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_exports_that_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder, _ = made(tmp_path, "resnet")
    out = tmp_path / "out"

    def write_other_file(*_: object) -> float:
        out.mkdir()
        (out / "config.json").write_text("another's")
        return 0.0

    monkeypatch.setattr(exporting, "largest_difference", write_other_file)
    assert main(["export", str(folder), "--out", str(out)]) == 2
    assert "cannot be moved" in capsys.readouterr().err
    assert (out / "config.json").read_text() == "another's"


def test_options_that_do_not_fit_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path, "resnet", num_classes=0)
    with pytest.raises(UserError, match="--output logits"):
        run_export(model=str(folder), to="pt2", output="logits", out=str(tmp_path / "out"))
    for to in ("timm", "hf"):
        with pytest.raises(UserError, match="--output"):
            run_export(model=str(folder), to=to, output="features", out=str(tmp_path / "out"))
    for to in ("timm", "onnx", "pt2"):
        with pytest.raises(UserError, match="--license"):
            run_export(model=str(folder), to=to, license="mit", out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="nowhere"):
        run_export(model=str(folder), images=str(tmp_path / "nowhere"), out=str(tmp_path / "out"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "frugalvit\[export\]"'):
        run_export(model=str(folder), to="onnx", out=str(tmp_path / "out"))


def test_largest_difference():
    images = torch.rand(3, 2)
    network = torch.nn.Linear(2, 2)
    with torch.no_grad():
        assert exporting.largest_difference(network, lambda x: [network(x)], images) == 0
        assert exporting.largest_difference(network, lambda x: [network(x) + 0.25], images) == pytest.approx(0.25)
        assert np.isnan(exporting.largest_difference(network, lambda x: [network(x) * torch.nan], images))
        for wrong in (1, 3):  # wrong for a single image, or for a batch
            difference = exporting.largest_difference(network, lambda x, n=wrong: [network(x) + (len(x) == n)], images)
            assert difference == pytest.approx(1.0)
        network.forward = lambda x: (x, x)
        assert exporting.largest_difference(network, lambda x: [x + 0.5, x], images) == pytest.approx(0.5)
        with pytest.raises(ValueError, match="shorter"):
            exporting.largest_difference(network, lambda x: [x], images)


@pytest.mark.parametrize("name", EXPORTS)
def test_every_registered_format_has_the_interface(name: str):
    assert isinstance(pkgutil.resolve_name(EXPORTS[name])(), ExportFormat)


@pytest.mark.parametrize("data", ["http://127.0.0.1:9/index.json", "hf:cifar10", "cifar100", "nowhere/at-all"])
def test_data_that_is_not_local_is_not_opened(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = made(tmp_path / "run", "resnet")
    (folder.parent / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    monkeypatch.setattr(exporting, "read_images", None)
    assert run_export(model=str(folder.parent), out=str(tmp_path / "out"))["checked_on"] == "5 images of noise"


def test_local_data_of_the_run_is_used(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]):
    ready = fv.load(made(tmp_path, "resnet")[0])
    images, description = exporting.check_images(ready, None, str(photos))
    assert len(images) == 5 and description == f"5 images of {photos}"
    files = sorted(photos.rglob("*.*"))
    (tmp_path / "t.csv").write_text("\n".join(["path,age", *(f"{file},{row}" for row, file in enumerate(files))]))
    table = f"{tmp_path / 't.csv'}:label=age"
    assert exporting.check_images(ready, None, table)[1] == f"5 images of {table}"
    (tmp_path / "empty").mkdir()
    assert exporting.check_images(ready, None, str(tmp_path / "empty"))[1] == "5 images of noise"
    assert "checking the export on noise" in capsys.readouterr().err
    with pytest.raises(UserError, match="empty"):
        exporting.check_images(ready, str(tmp_path / "empty"), None)


@pytest.mark.parametrize("name", ["list.csv", "list.JSONL", "one.JPG"])
def test_images_may_be_any_kind_of_data(name: str, photos: Path):
    path = photos / name
    if name.endswith("JPG"):
        path.write_bytes((photos / "0.jpg").read_bytes())
    else:
        path.write_text({".csv": "path\n0.jpg\n", ".JSONL": '{"path": "0.jpg"}'}[path.suffix])
    assert len(exporting.read_images(str(path))) == 1
