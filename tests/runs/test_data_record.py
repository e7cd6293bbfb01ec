"""data.json records the files that a run skipped."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.dataset import ArrayExamples
from frugalvit.runs.data_record import MOST_NAMED, record_data_usage
from frugalvit.runs.run_folder import RunFolder, read_data_facts
from helpers.tiny_runs import run_tiny, write_images


def test_many_unreadable_files_are_counted(tmp_path: Path) -> None:
    """A store that decodes while training finds unreadable files only then: the last record counts."""
    cached = CachedStore.from_arrays(np.zeros((5, 3, 8, 8), np.uint8))
    examples = ArrayExamples(np.zeros((300, 8, 8, 3), np.uint8), None, "images")
    lazy = OnDemandStore(examples, (8, 8), torch.device("cpu"), workers=0, limit=300)
    run = RunFolder(tmp_path)
    run.save_json("data.json", {"images": 300})
    record_data_usage(run, ["a note"], {"train": lazy, "val": cached})
    assert run.read_json("data.json")["left_out"] == {"count": 0, "files": []}
    lazy.unreadable += [(f"caf\udce9{number}.png", "truncated") for number in range(250)]
    record_data_usage(run, ["a note"], {"train": lazy, "val": cached})
    facts = run.read_json("data.json")
    assert (facts["images"], facts["notes"], facts["used"]) == (300, ["a note"], {"train": 50, "val": 5})
    assert facts["left_out"]["count"] == 250 and len(facts["left_out"]["files"]) == MOST_NAMED
    assert facts["left_out"]["files"][0] == {"name": r"caf\udce90.png", "split": "train", "reason": "truncated"}
    run.close()


@pytest.mark.parametrize(
    ("removed", "note"), [("val/cow", "val has no image of 1 class: cow"), ("val", "val is made from train")]
)
def test_absent_classes_are_noted(removed: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the terminal, and in data.json for the report."""
    photos = write_images(tmp_path / "photos", train=4, val=2, classes=("cat", "cow", "dog"))
    shutil.rmtree(photos / removed)
    run_tiny("train", data=photos, steps=1, out=tmp_path / "run")
    (stored,) = read_data_facts(tmp_path / "run")["notes"]
    assert stored.startswith(note) and capsys.readouterr().err.count(note) == 1
