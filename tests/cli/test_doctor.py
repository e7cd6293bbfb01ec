"""frugalvit doctor: packages, devices and extras."""

import json

import pytest

from frugalvit.cli import doctor
from frugalvit.config.tools import DoctorConfig


def test_packages_and_devices() -> None:
    data = doctor.doctor(DoctorConfig()).data
    assert data["exit"] == 0 and not data["problems"]
    assert {"torch", "timm", "pydantic"} <= {package["name"] for package in data["packages"] if package["ok"]}
    assert data["devices"][0]["device"] == "cpu" and data["devices"][0]["memory_gib"] > 0
    assert {extra["name"] for extra in data["extras"]} == set(doctor.EXTRAS)
    json.dumps(data)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["torch>=99", "nowhere-at-all>=1", 'wandb-of-nobody>=1; extra == "tracking"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)
    result = doctor.doctor(DoctorConfig())
    assert result.data["exit"] == 1 and len(result.data["problems"]) == 2
    assert any("nowhere-at-all is missing" in note for note in result.notes)
    assert any('pip install "frugalvit[tracking]"' in note for note in result.notes)
