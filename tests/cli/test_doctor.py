"""frugalvit doctor: packages, devices, extras and caches."""

import json
from pathlib import Path

import pytest

from frugalvit.cli import doctor
from frugalvit.config.tools import DoctorConfig


def test_packages_devices_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.bin").write_bytes(b"x" * 1000)
    data = doctor.doctor(DoctorConfig()).data
    assert data["exit"] == 0 and not data["problems"]
    assert {"torch", "timm", "pydantic"} <= {package["name"] for package in data["packages"] if package["ok"]}
    assert data["devices"][0]["device"] == "cpu" and data["devices"][0]["memory_gib"] > 0
    assert {extra["name"] for extra in data["extras"]} == set(doctor.EXTRAS)
    assert {"folder": str(tmp_path / "images"), "files": 1, "bytes": 1000} in data["caches"]
    json.dumps(data)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["torch>=99", "nowhere-at-all>=1", 'wandb-of-nobody>=1; extra == "tracking"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)
    result = doctor.doctor(DoctorConfig(cache=False))
    assert result.data["exit"] == 1 and len(result.data["problems"]) == 2
    assert any("nowhere-at-all is missing" in note for note in result.notes)
    assert any('pip install "frugalvit[tracking]"' in note for note in result.notes)


def test_files_that_vanish_while_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path))
    (tmp_path / "images").mkdir()
    for name in ("stays", "goes"):
        (tmp_path / "images" / name).write_bytes(b"12345")
    lstat = Path.lstat

    def vanish(self: Path):
        if self.name == "goes":
            raise FileNotFoundError(self)
        return lstat(self)

    monkeypatch.setattr(Path, "lstat", vanish)
    assert doctor._caches()[0] == {"folder": str(tmp_path / "images"), "files": 1, "bytes": 5}
