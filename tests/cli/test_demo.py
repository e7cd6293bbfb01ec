"""The demonstration, shortened: it ends with a table, predictions and what was measured."""

import json
from pathlib import Path

import pytest
from sklearn.datasets import load_digits

from frugalvit.cli.demo import demo, write_digits
from frugalvit.config.compare import DemoConfig

SHORT = DemoConfig(seeds=1, epochs=1, pretrain_epochs=1, drloc_epochs=1, labels=2)
COUNT = 200


@pytest.fixture(autouse=True)
def _few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scikit-learn's 1,797 digits only the first."""
    images, targets = load_digits(return_X_y=True)
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda return_X_y: (images[:COUNT], targets[:COUNT]))


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = demo(SHORT)
    for name in ("train/report.html", "pretrain/report.html", "compare/comparison.png"):
        assert (tmp_path / "runs/demo" / name).exists(), name
    assert len(result.data["predictions"]) == 6 and result.data["drloc"]["settings"]["with"]["values"]
    nearest = f"{result.data['floor']['nearest_neighbour']:.1f} %"
    assert nearest in [row[1] for row in result.tables[-1].rows]
    assert any("one seed" in note or "95 %" in note for note in result.notes)
    json.dumps(result.data, allow_nan=False)  # what --json prints can be read by everybody: one seed has no interval
    again = demo(SHORT)
    assert again.data["top1"] == result.data["top1"], "a second demo shows the first one's runs"


def test_a_digit_is_trained_on_or_tested_on(tmp_path: Path) -> None:
    """Whatever another demonstration, with another number of labels, has left in the folder."""
    for labels, seed in ((2, 0), (5, 0), (3, 1)):
        unlabelled, digits = write_digits(tmp_path / "digits", labels, seed)
        train, test = ({path.name for path in (digits / split).glob("*/*.png")} for split in ("train", "test"))
        assert len(train) == 10 * labels and len(test) == COUNT - 10 * labels and not train & test
        assert {path.name for path in unlabelled.glob("*.png")} == train | test
