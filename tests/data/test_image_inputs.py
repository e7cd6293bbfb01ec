"""Images and folders named on the command line: what of them may not be read is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from frugalvit.data.image_inputs import InputImages
from frugalvit.errors import UserError
from helpers.data_layouts import fill, lock


def test_a_folder_that_may_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, {"photos": 2, "photos/locked": 2, "shut/locked": 2, "empty": 0})
    lock(monkeypatch, "locked")
    assert len(InputImages([str(tmp_path / "photos")]).paths) == 2
    assert f"no permission to read {tmp_path}/photos/locked" in capsys.readouterr().err
    for place, words in [
        ("shut/locked", f"^No permission to read {tmp_path}/shut/locked.$"),
        ("shut", f"shut holds no images that can be read: no permission to read {tmp_path}/shut/locked.$"),
        ("empty", "empty holds no images.$"),
    ]:
        with pytest.raises(UserError, match=words):
            InputImages([str(tmp_path / place)])
