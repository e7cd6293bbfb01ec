"""What a run left out of its data is written down: by name up to a number, and never more than the file can hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from frugalvit.data.examples import ArrayExamples
from frugalvit.data.lazy import LazyStore
from frugalvit.data.store import ImageStore
from frugalvit.training.runs import Run
from frugalvit.training.used import MOST_NAMED, note_used


def test_many_bad_files_are_counted_and_the_first_named(tmp_path: Path) -> None:
    """A store that decodes while training finds bad files only then: what is noted last counts."""
    kept = ImageStore.from_arrays(np.zeros((5, 3, 8, 8), np.uint8))
    examples = ArrayExamples(np.zeros((300, 8, 8, 3), np.uint8), None, "images")
    lazy = LazyStore(examples, (8, 8), torch.device("cpu"), workers=0, limit=300)
    run = Run(tmp_path)
    run.save_json("data.json", {"images": 300})
    note_used(run, ["said"], {"train": lazy, "val": kept})
    assert run.read_json("data.json")["left_out"] == {"count": 0, "files": []}
    lazy.bad += [(f"caf\udce9{number}.png", "truncated") for number in range(250)]
    note_used(run, ["said"], {"train": lazy, "val": kept})
    facts = run.read_json("data.json")
    assert (facts["images"], facts["notes"], facts["used"]) == (300, ["said"], {"train": 50, "val": 5})
    assert facts["left_out"]["count"] == 250 and len(facts["left_out"]["files"]) == MOST_NAMED
    assert facts["left_out"]["files"][0] == {"name": r"caf\udce90.png", "split": "train", "reason": "truncated"}
    run.close()
