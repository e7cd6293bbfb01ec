"""data.json records the files that a run skipped."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from frugalvit.config.train import TrainConfig
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.dataset import ArrayExamples
from frugalvit.runs.data_record import MOST_NAMED, record_data_usage
from frugalvit.runs.run_folder import RunFolder
from frugalvit.runs.run_folder import read_data_facts as read_facts
from frugalvit.tasks.classification.train import train
from helpers.tiny_runs import TRAIN, write_images


def test_many_unreadable_files_are_counted(tmp_path: Path) -> None:
    """A store that decodes while training finds bad files only then: what is noted last counts."""
    kept = CachedStore.from_arrays(np.zeros((5, 3, 8, 8), np.uint8))
    examples = ArrayExamples(np.zeros((300, 8, 8, 3), np.uint8), None, "images")
    lazy = OnDemandStore(examples, (8, 8), torch.device("cpu"), workers=0, limit=300)
    run = RunFolder(tmp_path)
    run.save_json("data.json", {"images": 300})
    record_data_usage(run, ["said"], {"train": lazy, "val": kept})
    assert run.read_json("data.json")["left_out"] == {"count": 0, "files": []}
    lazy.unreadable += [(f"caf\udce9{number}.png", "truncated") for number in range(250)]
    record_data_usage(run, ["said"], {"train": lazy, "val": kept})
    facts = run.read_json("data.json")
    assert (facts["images"], facts["notes"], facts["used"]) == (300, ["said"], {"train": 50, "val": 5})
    assert facts["left_out"]["count"] == 250 and len(facts["left_out"]["files"]) == MOST_NAMED
    assert facts["left_out"]["files"][0] == {"name": r"caf\udce90.png", "split": "train", "reason": "truncated"}
    run.close()


@pytest.mark.parametrize(
    ("gone", "said", "warned"),
    [
        (("val/dog",), ["val has no image of 1 class: dog"], True),
        (("val/cow",), ["val has no image of 1 class: cow"], False),
        (("val/cow", "val/dog"), ["val has no image of 2 classes: cow, dog"], True),
        (("val",), ["val is made from train"], False),
        ((), [], False),
    ],
    ids=["one class left", "two left", "two gone", "no val", "all there"],
)
def test_absent_classes_are_noted(
    gone: tuple[str, ...], said: list[str], warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the terminal, and in data.json, which the report is made from."""
    classes = ("cat", "dog") if gone == ("val/dog",) else ("cat", "cow", "dog")
    photos = write_images(tmp_path / "photos", train=4, val=2, classes=classes)
    for folder in gone:
        shutil.rmtree(photos / folder)
    train(TrainConfig.parse(TRAIN | {"data": str(photos), "steps": 1, "out": str(tmp_path / "run"), "report": False}))
    notes, text = read_facts(tmp_path / "run")["notes"], capsys.readouterr().err
    warning = "val, which chooses the best weights, has one class only ('cat')"
    expected = said + [warning] * warned
    assert len(notes) == len(expected) and all(a.startswith(b) for a, b in zip(notes, expected, strict=True))
    assert all(text.count(words) == 1 for words in expected) and (f"warning: {warning}" in text) == warned
