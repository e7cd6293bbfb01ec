"""Images and folders named on the command line."""

from pathlib import Path

import pytest

from frugalvit.data.image_inputs import InputImages
from frugalvit.errors import UserError
from helpers.data_layouts import fill, lock


def test_unreadable_folders_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, {"photos": 2, "photos/locked": 2, "shut/locked": 2, "empty": 0})
    lock(monkeypatch, "locked")
    assert len(InputImages([str(tmp_path / "photos")]).paths) == 2
    assert f"no permission to read {tmp_path}/photos/locked" in capsys.readouterr().err
    for folder, message in [
        ("shut/locked", f"no permission to read {tmp_path}/shut/locked"),
        ("shut", f"no permission to read {tmp_path}/shut/locked"),
        ("empty", "holds no images"),
    ]:
        with pytest.raises(UserError, match=message):
            InputImages([str(tmp_path / folder)])
