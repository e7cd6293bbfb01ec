"""The notebook runs."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells' Python runs in one namespace, as in a kernel."""
    notebook = json.loads((ROOT / "notebooks" / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "cells are stored without outputs"
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("epochs=30", "epochs=2")  # two are enough to run it
            exec(compile(source, "first_steps.ipynb", "exec"), names)
    assert names["predictions"]
