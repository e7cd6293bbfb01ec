"""The demonstration, shortened: it ends with a table, predictions and what was measured."""

import json
from pathlib import Path

import pytest

from frugalvit.cli.demo import demo, write_digits
from frugalvit.config.compare import DemoConfig


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = demo(DemoConfig(seeds=1, epochs=1, labels=2))
    assert (tmp_path / "runs/demo/compare/with/seed_0/report.html").exists()
    assert (tmp_path / "runs/demo/compare/comparison.png").exists()
    assert len(result.data["predictions"]) == 6 and result.data["settings"]["with"]["values"]
    assert any("one seed" in note or "95 %" in note for note in result.notes)
    json.dumps(result.data, allow_nan=False)  # what --json prints can be read by everybody: one seed has no interval
    again = demo(DemoConfig(seeds=1, epochs=1, labels=2))
    assert again.data["settings"] == result.data["settings"], "a second demo shows the first one's runs"


def test_a_digit_is_trained_on_or_tested_on(tmp_path: Path) -> None:
    """Whatever another demonstration, with another number of labels, has left in the folder."""
    for labels in (2, 5, 3):
        digits = write_digits(tmp_path / "digits", labels)
        train, test = ({path.name for path in (digits / split).glob("*/*.png")} for split in ("train", "test"))
        assert len(train) == 10 * labels and len(test) == 1797 - 10 * labels and not train & test
